"""06: a stopped run resumes as if nothing had happened, and a foreign checkpoint is rejected."""

import math
import os
import pickle
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.checks import bits, equal
from helpers.commands import WITNESS, wait_until
from helpers.paths import ROOT
from helpers.projects import copy_project, edit
from helpers.ranks import exit_codes, run_ranks, start_ranks
from helpers.scripts import load_script, rejected

FOLDER = ROOT / "06_checkpointing"


@pytest.mark.launch("06_checkpointing", "--epochs", 3)
def test_two_ranks_train_and_a_rerun_has_nothing_to_do(launched, repository):
    launched.check()
    place = launched.place
    first = (place / "mnist.pt").rename(place / "first.pt")
    again = run_ranks(repository / "06_checkpointing/train.py", 2, "--epochs", 3, cwd=place)
    assert again.code == 0, again
    done = torch.load(place / "checkpoint.pt", weights_only=True)["done"]
    assert (done["epoch"], done["images"]) == (4, 0)
    assert again.output == f"resuming from checkpoint.pt at {done}\n", again
    assert equal(first, place / "mnist.pt")


# The labels are the larger of two sums. SLOW: an evaluation that does not end. SCORE: its result.
# Each step's epoch, images done before and learning rates go to a file
OWN = """
class Points(torch.utils.data.TensorDataset):
    def __init__(self, first, last):
        points = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))[first:last]
        super().__init__(points, (points[:, :3].sum(1) > points[:, 3:].sum(1)).long())


def network():
    hidden = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)
    return nn.Sequential(*hidden, nn.Linear(32, 2))


def record(file, *values):
    with open(file, "a") as file:
        print(*values, file=file)
"""
STEP = "            optimizer.step()\n"
RECORD = '            rates = [group["lr"] for group in optimizer.param_groups]\n'
RECORD += '            record(f"steps-{rank}", epoch, done["images"], *rates)\n'
SCHEDULE = "ByProgress(optimizer, lambda _: warmup_then_decay(steps_done(), total_steps))"
LAYERS = ("(model.parameters(), lr,", "([{'params': net[:2].parameters(), 'lr': lr / 10}, "
          "{'params': net[2:].parameters()}], lr,")
EVALUATION = "    net.eval()\n"
SCORE = "    return correct.sum().item() / len(correct)\n"
SLOW = '    if "SLOW" in os.environ:\n        record("evaluating")\n        time.sleep(300)\n'


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with another network, other data and dropout, which trains in a moment."""
    project = copy_project(tmp_path_factory.mktemp("copy") / "my project", FOLDER / "train.py")
    changes = [
        ("load_mnist(args.data_dir)", "Points(0, 800), Points(800, 1000)"),
        ("ConvNet().to(device, memory_format=torch.channels_last)", "network().to(device)"),
        ("\n\ndef parse_args", f"\n{OWN}\n\ndef parse_args"),
        (STEP, RECORD + STEP),
        (EVALUATION, EVALUATION + SLOW),
        (SCORE, SCORE.replace("correct.", 'float(os.environ.get("SCORE", 0)) or correct.')),
    ]
    edit(project, "train.py", *changes)
    return project


def train(project, ranks, folder, *options, code=0, stop=None, **settings):
    """Train in forked ranks, of which the last one receives SIGTERM at its batch `stop`."""
    if stop:
        settings |= {"SIGNAL_AT_BATCH": f"{ranks - 1} {signal.SIGTERM:d} {stop}", **WITNESS}
        settings["TORCHELASTIC_RUN_ID"] = "any"
    result = run_ranks(project / "train.py", ranks, *options, cwd=folder, **settings)
    assert result.code == code, result
    return result


AUGMENTATION = '''
    epoch = 0

    def __getitem__(self, index):
        """A training point moves: in each epoch to another place, the same one after a resume."""
        point, label = super().__getitem__(index)
        if self.epoch:
            generator = torch.Generator().manual_seed(self.epoch * 1000 + index)
            point = point + 0.1 * torch.randn(6, generator=generator)
            if index == 0:
                record("first-point", self.epoch, *point.tolist())
        return point, label


def network'''
COUNT = """
    import gc

    kind = (torch.Tensor, nn.Parameter)
    tensors = [each for each in gc.get_objects() if type(each) in kind and each.shape == (32, 6)]
    record("copies", len({each.data_ptr() for each in tensors}))
"""


def test_a_copy_with_its_own_state_and_augmentation_resumes(project, tmp_path):
    """An EMA, a scheduler of torch and a number, each with the lines that a reader adds.

    The scheduler counts steps, so another number of processes is an error. After loading, the first
    layer is in memory three times: weights, momentum and EMA.
    """
    own = shutil.copytree(project, tmp_path / "own")
    ema = "torch.optim.swa_utils.AveragedModel(net, multi_avg_fn="
    ema += "torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))"
    changes = [
        ("\n\n\ndef network", f"\n{AUGMENTATION}"),
        ("        train_sampler[:]", "        train_set.epoch = epoch\n        train_sampler[:]"),
        LAYERS,
        (SCHEDULE, "torch.optim.lr_scheduler.OneCycleLR(optimizer, [lr / 10, lr], total_steps)\n"
                   f"    ema = {ema}"),
        ('"lr": args.lr}', '"lr": args.lr, "batch": global_batch, "epochs": args.epochs}'),
        ('"scheduler": scheduler}', '"scheduler": scheduler, "ema": ema}'),
        ('"best": None}', '"best": None, "evaluations": 0}'),
        ("            scheduler.step()\n",
         "            scheduler.step()\n            ema.update_parameters(net)\n"),
        ("        score = eval", '        done["evaluations"] += 1\n        score = eval'),
        ("\n    def save():", f"{COUNT}\n    def save():"),
    ]
    edit(own, "train.py", *changes)
    options = ["--epochs", 4, "--batch-size", 16]  # 100 steps
    folders = [tmp_path / name for name in ("stopped", "undisturbed")]
    for folder in folders:
        folder.mkdir()
    output = train(own, 2, folders[0], *options, stop=40).output
    progress = re.fullmatch("stopped (at .*); rerun the same.*", output.splitlines()[-1])[1]
    alone = train(own, 1, folders[0], *options, code=1)
    assert re.search("ValueError: .* 'batch': 32, 'epochs': 4}, not .* 'batch': 16, ", alone.errors)
    rest = train(own, 2, folders[0], *options)
    assert rest.output.startswith(f"resuming from checkpoint.pt {progress}\n"), rest
    assert float(rest.epochs()[-1]["accuracy"]) > 0.9, rest
    whole = train(own, 2, folders[1], *options)
    [stopped, *others], [*_, whole_stopped, whole_1, whole_2] = rest.epochs(), whole.epochs()
    assert stopped["accuracy"] == whole_stopped["accuracy"]  # its loss is that of the rest
    assert [line["loss"] for line in others] == [whole_1["loss"], whole_2["loss"]]
    one, other = [torch.load(folder / "checkpoint.pt") for folder in folders]
    assert bits(one) == bits(other)
    assert set(one["objects"]) == {"model", "optimizer", "scheduler", "ema"}
    assert one["done"]["evaluations"] == 4
    assert equal(*[folder / "best.pt" for folder in folders])
    points = [sorted((folder / "first-point").read_text().splitlines()) for folder in folders]
    assert points[0] == points[1] and len({line.split(maxsplit=1)[1] for line in points[0]}) == 4
    assert (folders[0] / "copies").read_text().split() == ["2", "2", "3", "3"]


# In the place of the package: as it does, with its formula
TRANSFORMERS = """
import functools, math, torch

def factor(current_step, *, num_warmup_steps, num_training_steps):
    if current_step < num_warmup_steps:
        return current_step / max(1, num_warmup_steps)
    progress = (current_step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

def get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    given = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(factor, **given))
"""
COSINE = [
    ("import torch\n", "import torch\nfrom transformers import get_cosine_schedule_with_warmup\n"),
    (f"    scheduler = {SCHEDULE}\n", """    warmup = total_steps // 5
    cosine = get_cosine_schedule_with_warmup(optimizer, warmup, total_steps).lr_lambdas[0]
    scheduler = ByProgress(optimizer, lambda _: cosine(steps_done()))
"""),
]


def linear_factor(step, total_steps):
    return min((step + 1) / (0.4 * total_steps + 1), (1 - step / total_steps) / 0.6)


def cosine_factor(step, total_steps):
    warmup = total_steps // 5
    decay = math.cos((step - warmup) / (total_steps - warmup) * math.pi) / 2 + 0.5
    return step / warmup if step < warmup else decay


@pytest.mark.parametrize(("changes", "factor"), [([], linear_factor), (COSINE, cosine_factor)],
                         ids=["own", "transformers"])
def test_each_option_may_change_and_the_rate_follows_the_progress(
        changes, factor, project, tmp_path):
    """Stopped on two processes, finished on one, extended, resumed on three with other options."""
    own = shutil.copytree(project, tmp_path / "own")
    (own / "transformers.py").write_text(TRANSFORMERS)
    edit(own, "train.py", LAYERS, *changes)
    starts = [
        ({"--epochs": 1, "--batch-size": 16}, 2, 6, 0),
        ({}, 1, None, 6 * 32),
        ({"--epochs": 2}, 1, 6, 800),
        ({"--epochs": 3, "--batch-size": 8, "--accumulate": 2}, 3, None, 800 + 6 * 16),
    ]
    options = {"--epochs": 1, "--batch-size": 64, "--lr": 0.6, "--accumulate": 1}
    steps = tmp_path / "steps-0"
    for changed, ranks, stop, images in starts:
        options |= changed
        given = [word for option in options.items() for word in option]
        train(own, ranks, tmp_path, *given, stop=stop)
        global_batch = options["--batch-size"] * options["--accumulate"] * ranks
        peak = options["--lr"] * (global_batch / 256) ** 0.5
        total_steps = options["--epochs"] * math.ceil(800 / global_batch)
        for line in steps.read_text().splitlines():
            epoch, done, *rates = map(float, line.split())
            assert (epoch - 1) * 800 + done == images
            rate = peak * factor(total_steps * images / (800 * options["--epochs"]), total_steps)
            assert rates == pytest.approx([rate / 10, rate], rel=1e-12)
            images += min(global_batch, 800 - done)
        steps.unlink()
    assert images == 3 * 800


def test_a_batch_may_be_a_dictionary(project, tmp_path):
    """As it is, an error; with the labels that the comment names, no bit differs."""
    own = shutil.copytree(project, tmp_path / "own")
    item = "dict(zip(('images', 'labels'), super().__getitem__(index)))"
    mapping = f"class Mapping(Points):\n    def __getitem__(self, index):\n        return {item}"
    edit(own, "train.py", ("\n\n\ndef network", f"\n\n\n{mapping}\n\n\ndef network"),
         ("Points(0, 800)", "Mapping(0, 800)"))
    options = ["--batch-size", 24, "--accumulate", 3]  # the last step has two, one of them smaller
    assert "KeyError: 1" in train(own, 2, own, *options, code=1).errors
    labels = re.search(r'#.*(batch\["\w+"\])', (own / "train.py").read_text())[1]
    edit(own, "train.py", ("len(batch[1])", f"len({labels})"),
         ("for part in batch]", "for part in (batch['images'], batch['labels'])]"))
    train(own, 2, own, *options)
    train(project, 2, tmp_path, *options)
    one, other = [torch.load(folder / "checkpoint.pt") for folder in (own, tmp_path)]
    assert bits(one) == bits(other)


@pytest.mark.parametrize("option", ["--lr", "--seed"])
def test_what_must_stay_the_same_is_compared(option, project, tmp_path):
    options = ["--batch-size", 16, "--lr", 0.5, "--seed", 1]
    train(project, 2, tmp_path, *options)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    result = train(project, 2, tmp_path, *options, "--epochs", 2, option, 2, code=1)
    runs = [{"images": 800, "seed": 1, "lr": 0.5}, {"images": 800, "seed": 1, "lr": 0.5}]
    runs[1][option.strip("-")] = 2 if option == "--seed" else 2.0
    error = "ValueError: checkpoint.pt is of {}, not {}: move it away to start again"
    assert error.format(*runs) in result.errors, result
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("file", ["checkpoint.pt", "best.pt", "mnist.pt"])
def test_a_save_that_fails_ends_the_run_and_keeps_the_file_before(file, project, tmp_path):
    """And the same command resumes the run when the disk has room again."""
    options = ["--batch-size", 16, "--epochs", 2]
    train(project, 2, tmp_path, "--batch-size", 16, SCORE="0.25")
    before = (tmp_path / file).read_bytes()
    (tmp_path / f"{file}.tmp").mkdir()  # nothing can be written to it
    failed = train(project, 2, tmp_path, *options, code=1, SCORE="0.5")
    assert f"IsADirectoryError: [Errno 21] Is a directory: '{tmp_path}/{file}.tmp'" in failed.errors
    assert (tmp_path / file).read_bytes() == before
    (tmp_path / f"{file}.tmp").rmdir()
    train(project, 2, tmp_path, *options, SCORE="0.5")
    assert (tmp_path / file).read_bytes() != before
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["done"]["best"] == 0.5


def test_only_a_better_epoch_replaces_the_best_weights(project, tmp_path):
    train(project, 2, tmp_path, "--batch-size", 16, SCORE="0.5")
    best = (tmp_path / "best.pt").read_bytes()
    train(project, 2, tmp_path, "--batch-size", 16, "--epochs", 2, SCORE="0.4")
    assert (tmp_path / "best.pt").read_bytes() == best
    train(project, 2, tmp_path, "--batch-size", 16, "--epochs", 3, SCORE="0.6")
    assert equal(tmp_path / "best.pt", tmp_path / "mnist.pt")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["done"]["best"] == 0.6


def test_a_symlink_stays_one(project, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoint.pt").symlink_to("disk/real.pt")
    train(project, 1, tmp_path, "--batch-size", 400)
    assert (tmp_path / "checkpoint.pt").is_symlink() and (tmp_path / "disk/real.pt").is_file()


@pytest.mark.parametrize(("options", "error"), [
    (["--checkpoint", "a.pt", "--output", "./a.pt"],
     "--output, --checkpoint and --best must be different files"),
    (["--best", "mnist.pt"], "--output, --checkpoint and --best must be different files"),
    (["--checkpoint", "no/such/folder/a.pt"], "no/such/folder is not a writable folder"),
    (["--best", "no/such/folder/a.pt"], "no/such/folder is not a writable folder"),
])
def test_rejects_paths_that_would_cost_a_run(options, error, monkeypatch, capsys):
    assert rejected(monkeypatch, capsys, FOLDER / "train.py", *options, RANK=0) == error


def test_killed_in_a_long_evaluation_it_only_evaluates_again(project, tmp_path):
    files, options = [tmp_path / "output", tmp_path / "errors"], ["--batch-size", 16]
    ranks = start_ranks(project / "train.py", 2, options, tmp_path, files, SLOW="1")
    try:
        wait_until((tmp_path / "evaluating").exists)
    finally:
        exit_codes(ranks, limit=0.5)  # they evaluate, and are killed
    evaluate_again(project, tmp_path)


def test_stopped_in_an_evaluation_it_only_evaluates_again(project, tmp_path):
    """The first batch of the evaluation is the 27th that a rank asks for: 25, and no more."""
    result = train(project, 2, tmp_path, "--batch-size", 16, stop=27)
    done = {"epoch": 1, "images": 800, "best": None}
    assert result.output == f"stopped at {done}; rerun the same command to resume\n", result
    evaluate_again(project, tmp_path)


def evaluate_again(project, folder):
    """The rerun of a run with batches of 16 that ended in its evaluation: it takes no step."""
    steps = (folder / "steps-1").read_text()
    assert steps.count("\n") == 25
    again = train(project, 2, folder, "--batch-size", 16)
    done = {"epoch": 1, "images": 800, "best": None}
    line = f"resuming from checkpoint.pt at {done}\nepoch 1/1  loss nan  accuracy "
    assert again.output.startswith(line), again
    assert (folder / "steps-1").read_text() == steps


class RunsCode:
    """Its pickle creates a file when something loads it that trusts it."""

    def __reduce__(self):
        return open, ("code-was-run", "w")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in a tensor, where torch.load does not notice it
    path.write_bytes(data)


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """The script as a module, and the arguments with which it loads the checkpoint it has saved."""
    monkeypatch.chdir(tmp_path)
    script = load_script(FOLDER / "train.py")
    run, done = {"images": 600, "seed": 0, "lr": 0.6}, {"epoch": 2, "images": 0}
    objects = {"model": torch.nn.Linear(99, 2)}
    states = {"model": objects["model"].state_dict()}
    script.save_file({"run": run, "done": done, "objects": states}, Path("checkpoint.pt"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield script, [Path("checkpoint.pt"), objects, {}, run]
    dist.destroy_process_group()


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"images": 500}, ValueError,
     "checkpoint.pt is of {'images': 600, .*}, not {'images': 500, .*}: move it away to start"),
    (torch.nn.Linear(98, 2), RuntimeError, "size mismatch for weight: "),
    (lambda path: path.write_bytes(path.read_bytes()[:-1000]), ValueError, "^checkpoint.pt is dam"),
    (flip_a_bit, ValueError, "^checkpoint.pt is damaged$"),
    (lambda path: torch.save(RunsCode(), path), pickle.UnpicklingError, "Weights only load failed"),
    (lambda path: torch.save({"weight": 1}, path), ValueError, "^checkpoint.pt is of None, not "),
], ids=["images", "network", "truncated", "bit", "code", "weights"])
def test_a_checkpoint_is_rejected(change, error, message, saved):
    script, arguments = saved
    assert script.load_checkpoint(*arguments) and arguments[2] == {"epoch": 2, "images": 0}
    if isinstance(change, dict):
        arguments[3] = arguments[3] | change
    elif isinstance(change, torch.nn.Module):
        arguments[1] = {"model": change}
    else:
        change(arguments[0])
    with pytest.raises(error, match=message):
        script.load_checkpoint(*arguments)
    assert not os.path.exists("code-was-run")


def test_what_could_not_be_loaded_again_is_not_saved(saved):
    """Torch's reason ends the run, and the checkpoint before remains."""
    script, (path, *_) = saved
    before = path.read_bytes()
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: .* pathlib"):
        script.save_file({"output": Path("mnist.pt")}, path)
    assert path.read_bytes() == before
