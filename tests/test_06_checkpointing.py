"""06: a stopped run resumes as if nothing had happened, and a foreign checkpoint is rejected."""

import argparse
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, Running, copy_project, edit, equal, load_script, run, run_ranks, wait_for

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


OWN = """
def data_sets():
    points = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
    labels = (points[:, :3].sum(1) > points[:, 3:].sum(1)).long()
    both = torch.utils.data.TensorDataset(points, labels)
    return [torch.utils.data.Subset(both, part) for part in (range(800), range(800, 1000))]


def network():
    hidden = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)
    return nn.Sequential(*hidden, nn.Linear(32, 2))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with another network and other data, by steps 1 to 3 of README's section.

    The labels are the larger of two sums; dropout draws random numbers in each step.
    """
    project = copy_project(tmp_path_factory.mktemp("copy") / "my project", FOLDER / "train.py")
    changes = [
        ("load_mnist(args.data_dir)", "data_sets()"),
        ('"collate_fn": already_batched, ', ""),
        ("ConvNet().to(device, memory_format=torch.channels_last)", "network().to(device)"),
        ("\n\ndef parse_args", f"\n{OWN}\n\ndef parse_args"),
    ]
    edit(project, "train.py", *changes)
    shutil.copy(FOLDER / "run.sh", project)
    return project


def test_another_network_on_other_data_is_stopped_and_resumes(project, tmp_path):
    options = ["--epochs", 10, "--batch-size", 16]  # 250 steps
    running = Running(["bash", project / "run.sh", *options], tmp_path)
    wait_for("epoch 1/10", running)
    running.process.send_signal(signal.SIGTERM)
    stopped = running.finish()
    assert stopped.code == 75, stopped
    last = stopped.output.splitlines()[-1]
    assert last.startswith("stopped after ") and last.endswith("rerun the same command to resume")
    rejected = run(["bash", project / "run.sh", *options, "--seed", 1], tmp_path)
    assert rejected.code == 1, rejected
    problem = "made with --seed 0, not 1; delete it to start from scratch"
    assert rejected.errors == f"error: --checkpoint checkpoint.pt: {problem}\n", rejected
    rest = run_ranks(project / "train.py", 2, *options, cwd=tmp_path)
    assert rest.code == 0, rest
    progress = last.removeprefix("stopped after ").split(";")[0]
    assert rest.output.startswith(f"resuming from checkpoint.pt, after {progress}\n"), rest
    assert float(rest.epochs()[-1]["accuracy"]) > 0.9, rest
    undisturbed = ["--checkpoint", "undisturbed-run.pt", "--output", "undisturbed.pt"]
    result = run_ranks(project / "train.py", 2, *options, *undisturbed, cwd=tmp_path)
    assert result.code == 0, result
    assert equal(tmp_path / "mnist.pt", tmp_path / "undisturbed.pt")
    losses = [[line["loss"] for line in each.epochs()] for each in (rest, result)]
    assert losses[0] == losses[1][-len(losses[0]) :]  # the first one from before and after the stop


class RunsCode:
    """Its pickle creates a file when something loads it that trusts it."""

    def __reduce__(self):
        return open, ("code-was-run", "w")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in a tensor, where torch.load does not notice it
    path.write_bytes(data)


@pytest.mark.parametrize(("change", "problem"), [
    ({"epochs": 4}, "made with --epochs 3, not 4"),
    ({"batch_size": 32}, "made with --batch-size 64, not 32"),
    ({"lr": 0.2}, "made with --lr 0.6, not 0.2"),
    ({"images": 500}, "made with the number of training images 600, not 500"),
    ({"net": torch.nn.Linear(4, 4)}, ".* size mismatch for weight: .*"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "File is not a zip file"),
    (flip_a_bit, "wrong checksum"),
    (lambda path: torch.save(RunsCode(), path), ".* rejects it, as it could run code"),
    (lambda path: torch.save({"weight": 1}, path), "not a checkpoint of this script"),
], ids=["epochs", "batch", "lr", "images", "network", "truncated", "bit", "code", "weights"])
def test_a_checkpoint_is_rejected(change, problem, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    script, checkpoint = load_script(FOLDER / "train.py"), Path("checkpoint.pt")
    options = {"epochs": 3, "batch_size": 64, "lr": 0.6, "seed": 0, "checkpoint": checkpoint}
    now = argparse.Namespace(**options, images=600, net=torch.nn.Linear(4, 2))
    run = script.describe_run(now, now.images)
    script.save_checkpoint({"run": run, "model": now.net.state_dict(), "epoch": 1}, checkpoint)
    if callable(change):
        change(checkpoint)
    else:
        vars(now).update(change)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        line = f"error: --checkpoint {checkpoint}: {problem}; delete it to start from scratch"
        with pytest.raises(SystemExit, match=f"^{line}$"):
            script.load_checkpoint(now, now.net, now.images)
        assert not os.path.exists("code-was-run")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
