"""What a README adds to the loop of 04, as patches in copies/: each has the effect it is for."""

import itertools
import json
import re
import shutil
import subprocess
from collections import Counter

import pytest
import torch
from helpers.checks import bare_accuracy, distance, equal
from helpers.paths import DIGITS, ROOT
from helpers.projects import COPIES, apply, copy_project, edit, fewer_digits, splittable, trained
from helpers.ranks import run_ranks
from helpers.scripts import load_script

from common.data import load_mnist

LOSS = "                loss = criterion(model(images), labels)\n"
NAMES = sorted(path.stem.removeprefix("add_") for path in COPIES.glob("add_*.patch"))
BY_HAND = ("early_stopping", "ema")  # the page names the weights that the best file saves
EXCLUSIVE = ("stream", "weighted_sampling")  # a stream has no samples to choose from
TOGETHER = [  # all other pairs are in one of them
    ("early_stopping", "global_batch", "predictions", "profiler", "wandb", "weighted_sampling"),
    ("ema", "global_batch", "predictions", "profiler", "stream", "wandb"),
    ("ema", "weighted_sampling"), ("early_stopping", "stream"), BY_HAND,
]


def misfits(file, *names):
    """Write 04 with the hunks of these additions that fit, and return what patch says of others."""
    shutil.copy(ROOT / "04_ddp_torchrun/train.py", file)
    failed = ""
    for name in names:
        command = ["patch", "-F0", "-r", "-", file, COPIES / f"add_{name}.patch"]
        done = subprocess.run(command, capture_output=True, text=True)
        failed += f"add_{name}.patch does not fit:\n{done.stdout}" if done.returncode else ""
    return failed


def added(folder, *names, digits=20):
    """A copy of 04 with these additions, and few digits, each nine times: 180 images to train."""
    project = copy_project(folder / "project", ROOT / "04_ddp_torchrun/train.py")
    failed = misfits(project / "train.py", *names)
    assert not failed or names == BY_HAND, failed
    fewer_digits(project, now=140, digits=digits)
    return project


def run(project, nproc, *options):
    options = ["--data-dir", "common", "--batch-size", 30, *options]
    return run_ranks("train.py", nproc, *options, cwd=project)


def shown(project, what):
    """Let each rank print this before each of its steps."""
    text = f"print('shown', rank, epoch, {what}, flush=True)"
    edit(project, "train.py", (LOSS, f"                {text}\n{LOSS}"))


def seen(result):
    """What the ranks have printed: the numbers of each rank in each epoch, in order."""
    found = {}
    for rank, epoch, numbers in re.findall(r"^shown (\d) (\d+) \[(.*)\]", result.output, re.M):
        found.setdefault((int(rank), int(epoch)), []).extend(map(float, numbers.split(",")))
    return found


def test_two_additions_fit_or_are_rejected(tmp_path):
    """By patch -F0, in both orders as git merges them: no line ends up in the wrong place."""
    for pair in itertools.combinations(NAMES, 2):
        assert pair == EXCLUSIVE or any({*pair} <= {*names} for names in TOGETHER), pair
        sides = [tmp_path / name for name in (pair[0], "base", pair[1])]
        for side, names in zip(sides, (pair[:1], (), pair[1:]), strict=True):
            assert not (failed := misfits(side, *names)), failed
        merged = subprocess.run(["git", "merge-file", "-p", *sides], capture_output=True, text=True)
        for order in (pair, pair[::-1]):
            fits = not misfits(tmp_path / "both", *order)
            assert fits == (pair not in (BY_HAND, EXCLUSIVE)), order
            same = (tmp_path / "both").read_text() == merged.stdout
            assert fits == (merged.returncode == 0) == same, order


WANDB = """
import json

def note(name):
    def write(*args, **given):
        with open("notes", "a") as file:
            file.write(json.dumps([name, args, given], default=str) + "\\n")
    return write

init, log, finish = note("init"), note("log"), note("finish")
"""


@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_additions_that_fit_train_together(names, tmp_path):
    """Three ranks: no rate is negative, the loss falls, and files have what is printed."""
    project = added(tmp_path, *names)
    (project / "wandb.py").write_text(WANDB)  # in place of the package
    if names == BY_HAND:
        best = "save({}.state_dict(), args.output.with_name"
        edit(project, "train.py", ("score = evaluate(net", "score = evaluate(ema.module"),
             (best.format("net"), best.format("ema.module")))
    shown(project, "scheduler.get_last_lr()")
    batch = 30 if "global_batch" in names else 10
    result = run(project, 3, "--epochs", 3, "--batch-size", batch)
    assert min(rate for rates in seen(result).values() for rate in rates) >= 0, result
    losses, scores = [[line[name] for line in result.epochs()] for name in ("loss", "accuracy")]
    assert float(losses[0]) > float(losses[-1]), result
    assert scores[-1] == f"{bare_accuracy(project / 'mnist.pt'):.4f}", result
    if "early_stopping" in names:
        assert max(scores) == f"{bare_accuracy(project / 'best-mnist.pt'):.4f}", result
    if "predictions" in names:  # one per test image, in the order of the data set
        net = load_script(project / "common/model.py").ConvNet().eval()
        net.load_state_dict(torch.load(project / "mnist.pt", weights_only=True))
        with torch.no_grad():
            expected = net(load_mnist(DIGITS)[1].tensors[0]).argmax(1).tolist()
        assert [*map(int, (project / "predictions.txt").read_text().split())] == expected
    if "profiler" in names:  # each rank has a file with three steps, and in it what communicates
        for rank in range(3):
            trace = json.loads((project / f"trace-{rank}.json").read_text())["traceEvents"]
            events = {event["name"] for event in trace}
            assert len({name for name in events if name.startswith("ProfilerStep#")}) == 3
            assert "gloo:all_reduce" in events
    if "wandb" in names:  # rank 0 logs what it prints
        notes = [json.loads(line) for line in (project / "notes").read_text().splitlines()]
        assert [name for name, *_ in notes] == ["init", "log", "log", "log", "finish"]
        assert notes[0][2]["config"]["epochs"] == 3
        for epoch, (_, (values,), given) in enumerate(notes[1:4], start=1):
            assert given == {"step": epoch}
            values = {name: f"{value:.4f}" for name, value in values.items()}
            assert values == {"loss": losses[epoch - 1], "accuracy": scores[epoch - 1]}


def test_early_stopping_and_the_best_file(tmp_path):
    """All ranks stop after three epochs that were not better; the file has the best weights."""
    project = added(tmp_path, "early_stopping")
    score = "return correct.sum().item() / len(correct)"
    edit(project, "train.py", (score, "return SCORES.pop(0)"),
         ("MAX_GRAD_NORM =", "SCORES = [0.1, 0.3, 0.2, 0.3, 0.1, 0.9]\nMAX_GRAD_NORM ="),
         ("        if rank == 0:  # DDP-4: log", "        torch.save(net.state_dict(), "
          "f'{rank}-{epoch}.pt')\n        if rank == 0:  # DDP-4: log"))
    assert len(run(project, 2, "--epochs", 9).epochs()) == 5
    assert equal(project / "best-mnist.pt", project / "0-2.pt")
    assert (project / "1-5.pt").exists() and not (project / "1-6.pt").exists()


def test_ema(tmp_path):
    """The saved and evaluated weights are the average, with the BatchNorm statistics of the end."""
    project = added(tmp_path, "ema")
    edit(project, "train.py", ("MAX_GRAD_NORM =", "STEPS = []\nMAX_GRAD_NORM ="),
         ("            scheduler.step()\n", "            scheduler.step()\n            "
          "STEPS.append({name: part.clone() for name, part in net.state_dict().items()})\n"),
         ("    # 6. Save\n", "    torch.save(STEPS, f'steps-{rank}.pt')\n"))
    result = run(project, 2, "--epochs", 3)
    first, *others = torch.load(project / "steps-1.pt", weights_only=True)
    for taken, step in enumerate(others, start=1):
        decay = min(0.99, (1 + taken) / (10 + taken))
        for name, weight in step.items():
            first[name] = decay * first[name] + (1 - decay) * weight
    saved = torch.load(project / "mnist.pt", weights_only=True)
    last = torch.load(project / "steps-0.pt", weights_only=True)[-1]
    for name, weight in saved.items():
        is_buffer = "running" in name or "batches" in name
        torch.testing.assert_close(weight, last[name] if is_buffer else first[name])
    assert result.epochs()[-1]["accuracy"] == f"{bare_accuracy(project / 'mnist.pt'):.4f}"


def test_weighted_sampling(tmp_path):
    """Two classes, one with nine times as many images: half of the images drawn are of each."""
    project = added(tmp_path, "weighted_sampling", digits=140)
    rare = "train_set.tensors[1] == 1, torch.arange(len(train_set)) % 9 == 0"
    keep = f"(train_set.tensors[1] == 0) | torch.logical_and({rare})"
    data = "    train_set, test_set = load_mnist(args.data_dir)\n"
    fewer = f"    train_set = type(train_set)(*[part[{keep}] for part in train_set.tensors])\n"
    edit(project, "train.py", (data, data + fewer))
    shown(project, "labels.tolist()")
    drawn = seen(run(project, 2, "--epochs", 2))
    assert len(drawn) == 4 and len({tuple(labels) for labels in drawn.values()}) == 4
    for epoch in (1, 2):
        labels = drawn[0, epoch] + drawn[1, epoch]
        assert len(labels) > 100 and 0.3 < sum(labels) / len(labels) < 0.7
    sampler = load_script(project / "train.py").WeightedSampler
    samplers = [sampler(range(10), *place, seed=3) for place in ((1, 0), (2, 0), (2, 1))]
    for each in samplers:
        each.weights = torch.arange(1.0, 11)
    whole, *shards = [list(each) for each in samplers]
    assert [index for pair in zip(*shards, strict=True) for index in pair] == whole


@pytest.mark.parametrize(("batch", "workers", "steps"), [(30, 0, 1), (5, 2, 6), (12, 2, 4)])
def test_stream(batch, workers, steps, tmp_path):
    """61 samples: none comes twice, and the rank with the most stops when another has none left.

    With workers, each of which ends with a shorter batch, the schedule must be long enough.
    """
    project = added(tmp_path, "stream")
    samples = "[(torch.full((1, 28, 28), n / 100), 0) for n in range(61)]"
    edit(project, "train.py", ("Stream(train_set,", f"Stream({samples},"),
         ("len(train_set) / ", "61 / "), ("options = {", f"options = {{'num_workers': {workers}, "))
    step = "            optimizer.step()\n"
    check = "            assert optimizer.param_groups[0]['lr'] >= 0\n"
    edit(project, "train.py", (step, check + step))
    shown(project, "(images[:, 0, 0, 0] * 100).round().tolist()")
    result = run(project, 2, "--batch-size", batch, "--epochs", 2)
    shards = [seen(result)[rank, 2] for rank in range(2)]
    assert seen(result)[0, 1] == shards[0] and seen(result)[1, 1] == shards[1]
    count = Counter(number for shard in shards for number in shard)
    assert {*count} <= {*range(61)} and {*count.values()} == {1}
    assert 61 - batch <= sum(count.values()) <= 61
    assert result.output.count("shown 0") == result.output.count("shown 1") == 2 * steps


def test_global_batch(tmp_path):
    """The same options on one and on two processes take the same steps."""
    project = splittable(tmp_path / "project")
    apply(project, "add_global_batch.patch")
    fewer_digits(project, now=140, digits=20)
    one, two = [trained(project, nproc, "--batch-size", 70) for nproc in (1, 2)]
    assert distance(one, two) < 1e-12
