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
from helpers.scripts import load_script

FOLDER = ROOT / "06_checkpointing"


@pytest.mark.launch("06_checkpointing", "--epochs", 3)
def test_two_ranks_train_and_a_rerun_has_nothing_to_do(launched, repository):
    launched.check()
    place = launched.place
    first = (place / "mnist.pt").rename(place / "first.pt")
    again = run_ranks(repository / "06_checkpointing/train.py", 2, "--epochs", 3, cwd=place)
    assert again.code == 0, again
    progress = "3 of 3 epochs and 0 of 1260 images"
    assert again.output == f"resuming from checkpoint.pt, after {progress}\n", again
    assert equal(first, place / "mnist.pt")


# The labels are the larger of two sums. SLOW: an evaluation that does not end. STOPPED: stopped
# while the data is loaded. Each step's epoch, images done before and learning rate go to a file
OWN = """
class Points(torch.utils.data.TensorDataset):
    def __init__(self, first, last):
        if "STOPPED" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
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
RECORD = '            record(f"steps-{rank}", epoch, done["images"], scheduler.get_last_lr()[0])\n'
EVALUATION = "    net.eval()\n"
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
    kind = (torch.Tensor, nn.Parameter)
    tensors = [each for each in gc.get_objects() if type(each) in kind and each.shape == (32, 6)]
    record("copies", len({each.data_ptr() for each in tensors}))
"""


def test_a_copy_with_its_own_state_and_augmentation_resumes(project, tmp_path):
    """An EMA, a scheduler of torch and a number, each with the lines that a reader adds.

    After loading, the first layer is in memory three times: weights, momentum and EMA.
    """
    own = shutil.copytree(project, tmp_path / "own")
    ema = "torch.optim.swa_utils.AveragedModel(net, multi_avg_fn="
    ema += "torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))"
    changes = [
        ("\n\n\ndef network", f"\n{AUGMENTATION}"),
        ("train_sampler.set", "train_set.epoch = epoch\n        train_sampler.set"),
        ("ByProgress(optimizer, lambda _: warmup_then_decay(steps_done(), total_steps))",
         f"torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)\n    ema = {ema}"),
        ('"scheduler": scheduler}', '"scheduler": scheduler, "ema": ema}'),
        ('"best": None}', '"best": None, "evaluations": 0}'),
        ("            scheduler.step()\n",
         "            scheduler.step()\n            ema.update_parameters(net)\n"),
        ("        accuracy = eval", '        done["evaluations"] += 1\n        accuracy = eval'),
        ("\n    def save():", f"{COUNT}\n    def save():"),
    ]
    edit(own, "train.py", *changes)
    options = ["--epochs", 4, "--batch-size", 16]  # 100 steps
    folders = [tmp_path / name for name in ("stopped", "undisturbed")]
    for folder in folders:
        folder.mkdir()
    output = train(own, 2, folders[0], *options, stop=40).output
    progress = re.fullmatch("stopped (after .*); rerun the same.*", output.splitlines()[-1])[1]
    rest = train(own, 2, folders[0], *options)
    assert rest.output.startswith(f"resuming from checkpoint.pt, {progress}\n"), rest
    assert float(rest.epochs()[-1]["accuracy"]) > 0.9, rest
    whole = train(own, 2, folders[1], *options)
    losses = [[line["loss"] for line in each.epochs()] for each in (rest, whole)]
    assert losses[0] == losses[1][-len(losses[0]) :]  # the first one from before and after the stop
    one, other = [torch.load(folder / "checkpoint.pt") for folder in folders]
    assert bits(one) == bits(other)
    assert set(one["objects"]) == {"model", "optimizer", "scheduler", "ema"}
    assert one["done"]["evaluations"] == 4
    assert equal(*[folder / "best.pt" for folder in folders])
    points = [sorted((folder / "first-point").read_text().splitlines()) for folder in folders]
    assert points[0] == points[1] and len({line.split(maxsplit=1)[1] for line in points[0]}) == 4
    assert (folders[0] / "copies").read_text().split() == ["2", "2", "3", "3"]


def test_each_option_may_change_and_the_rate_follows_the_progress(project, tmp_path):
    """A finished run is extended on one process, then resumed on three with other options."""
    starts = [
        ({"--epochs": 1, "--batch-size": 16}, 2, None, 0),
        ({"--epochs": 2}, 1, 6, 800),
        ({"--epochs": 3, "--lr": 0.3, "--batch-size": 8, "--accumulate": 2, "--seed": 1}, 3, None,
         800 + 6 * 16),
    ]
    options = {"--epochs": 1, "--batch-size": 64, "--lr": 0.6, "--accumulate": 1, "--seed": 0}
    steps = tmp_path / "steps-0"
    for changes, ranks, stop, images in starts:
        before, options = options, options | changes
        given = [word for option in options.items() for word in option]
        output = train(project, ranks, tmp_path, *given, stop=stop).output
        changed = [line for line in output.splitlines() if line.startswith("--")]
        if images:
            expected = {f"{name} {now} in place of {before[name]}" for name, now in changes.items()}
            assert {line.split(": ")[0] for line in changed} == expected, output
        global_batch = options["--batch-size"] * options["--accumulate"] * ranks
        peak = options["--lr"] * (global_batch / 256) ** 0.5
        total_steps = options["--epochs"] * math.ceil(800 / global_batch)
        for line in steps.read_text().splitlines():
            epoch, done, rate = map(float, line.split())
            assert (epoch - 1) * 800 + done == images
            step = total_steps * images / (800 * options["--epochs"])
            factor = min((step + 1) / (0.4 * total_steps + 1), (1 - step / total_steps) / 0.6)
            assert rate == pytest.approx(peak * factor, rel=1e-12)
            images += min(global_batch, 800 - done)
        steps.unlink()
    assert images == 3 * 800


def test_a_stop_while_the_data_is_loaded_and_no_save_is_possible(project, tmp_path):
    """It is not forgotten: one step, and the exit code tells whether that step was saved."""
    options = ["--batch-size", 16]
    (tmp_path / "checkpoint.pt.tmp").mkdir()  # nothing can be written to it
    failed = train(project, 2, tmp_path, *options, code=1, STOPPED="1")
    reason = "checkpoint.pt was not saved ([Errno 21] Is a directory: 'checkpoint.pt.tmp')"
    assert f"warning: {reason}; the previous one does not exist\n" in failed.errors, failed
    assert failed.errors.endswith("error: stopped without saving the last steps\n"), failed
    assert failed.output == "", failed
    (tmp_path / "checkpoint.pt.tmp").rmdir()
    stopped = train(project, 2, tmp_path, *options, STOPPED="1")
    progress = "stopped after 0 of 1 epochs and 32 of 800 images"
    assert stopped.output == f"{progress}; rerun the same command to resume\n", stopped


def test_a_best_score_counts_only_if_its_weights_are_saved(project, tmp_path):
    best = tmp_path / "best.pt"
    best.mkdir()  # no file can take its place
    failed = train(project, 2, tmp_path, "--batch-size", 16)
    assert "warning: best.pt was not saved ([Errno 21] Is a directory" in failed.errors, failed
    assert torch.load(tmp_path / "checkpoint.pt")["done"]["best"] is None
    best.rmdir()
    train(project, 2, tmp_path, "--batch-size", 16, "--epochs", 2)
    score, weights = torch.load(tmp_path / "checkpoint.pt")["done"]["best"], best.read_bytes()
    worse = train(project, 2, tmp_path, "--batch-size", 16, "--epochs", 3, "--lr", 1000)
    assert float(worse.epochs()[-1]["accuracy"]) < score and best.read_bytes() == weights


def test_killed_in_a_long_evaluation_it_only_evaluates_again(project, tmp_path):
    files, options = [tmp_path / "output", tmp_path / "errors"], ["--batch-size", 16]
    ranks = start_ranks(project / "train.py", 2, options, tmp_path, files, SLOW="1")
    try:
        wait_until((tmp_path / "evaluating").exists)
        for rank in ranks:
            rank.terminate()
    finally:
        exit_codes(ranks, limit=0.5)  # they evaluate, and are killed
    steps = (tmp_path / "steps-1").read_text()
    assert steps.count("\n") == 25
    again = train(project, 2, tmp_path, *options)
    progress = "after 0 of 1 epochs and 800 of 800 images"
    assert again.output.startswith(f"resuming from checkpoint.pt, {progress}\nepoch 1/1 "), again
    assert (tmp_path / "steps-1").read_text() == steps


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
    """The script as a module, and the arguments with which it has saved a checkpoint."""
    monkeypatch.chdir(tmp_path)
    script = load_script(FOLDER / "train.py")
    settings = {"epochs": 3, "batch_size": 64, "accumulate": 1, "lr": 0.6, "seed": 0, "images": 600}
    objects = {"model": torch.nn.Linear(99, 2)}
    arguments = Path("checkpoint.pt"), settings, objects, {"epoch": 2, "images": 0}
    assert script.save_checkpoint(*arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield script, arguments
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("change", "problem"), [
    ({"images": 500}, "ValueError: it has 600 training images, not 500"),
    ({"model": torch.nn.Linear(98, 2)}, ".* size mismatch for weight: .*"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "BadZipFile: .*"),
    (flip_a_bit, "ValueError: wrong checksum"),
    (lambda path: torch.save(RunsCode(), path), "UnpicklingError: Weights only load failed.*"),
    (lambda path: torch.save({"weight": 1}, path), "KeyError: 'settings'"),
], ids=["images", "network", "truncated", "bit", "code", "weights"])
def test_a_checkpoint_is_rejected(change, problem, saved):
    script, (path, settings, objects, done) = saved
    if callable(change):
        change(path)
    else:
        settings, objects = [old | {name: change.get(name, old[name]) for name in old}
                             for old in (settings, objects)]
    line = f"error: cannot resume from checkpoint.pt \\({problem}\\): move it away to start from "
    with pytest.raises(SystemExit, match=f"^{line}scratch$"):
        script.load_checkpoint(path, settings, objects, done)
    assert not os.path.exists("code-was-run")


def test_a_disk_that_cannot_be_read_is_no_bad_checkpoint(saved):
    script, (path, *others) = saved
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="^.Errno 21. Is a directory: 'checkpoint.pt'$"):
        script.load_checkpoint(path, *others)


def test_what_could_not_be_loaded_again_is_not_saved(saved):
    """Torch's reason ends the run, and the checkpoint before remains."""
    script, (path, settings, objects, done) = saved
    before = path.read_bytes()
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: .* pathlib"):
        script.save_checkpoint(path, settings, objects, done | {"output": Path("mnist.pt")})
    assert path.read_bytes() == before
