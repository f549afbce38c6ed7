"""small.py, small_ddp.py and small_resume.py: exact, and resumed bit for bit."""

import re
import sys

import pytest
import torch
from helpers import (
    ROOT,
    Running,
    copy_project,
    distance,
    edit,
    equal,
    load,
    order_of,
    run,
    torchrun,
    train,
    wait_until,
)
from torch import nn

SMALL = "04_ddp_torchrun/small.py"
DDP = "04_ddp_torchrun/small_ddp.py"
RESUME = "06_checkpointing/small_resume.py"


def circle():
    points = torch.randn(1000, 2)
    return points, (points.norm(dim=1) < 1).long()


def accuracy_of(model, points, labels):
    return f"{(model(points[700:]).argmax(1) == labels[700:]).sum() / 300:.4f}"


def network():
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def test_small_prints_the_accuracy_of_what_it_saves(tmp_path):
    result = run([sys.executable, ROOT / SMALL], tmp_path)
    torch.manual_seed(0)
    points, labels = circle()
    model = network()
    model.load_state_dict(load(tmp_path / "model.pt"))
    assert result.output.startswith("training on cpu\nepoch 0  accuracy "), result
    accuracy = accuracy_of(model, points, labels)
    assert result.output.endswith(f"\nepoch 4  accuracy {accuracy}\n"), result


@pytest.mark.parametrize(("script", "ranks"), [(DDP, 1), (DDP, 3), (RESUME, 2)])
def test_processes_compute_what_one_does(script, ranks, tmp_path, float64):
    """The accuracy of each epoch, and the weights."""
    result = train(ROOT / script, ranks, cwd=tmp_path, fault="float64")
    torch.manual_seed(0)
    points, labels = circle()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    accuracies = []
    for epoch in range(5):
        order = torch.tensor(order_of(epoch, 700, ranks, seed=0))
        for step in order.split(16 * ranks):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points[step]), labels[step])
            loss.backward()
            optimizer.step()
        accuracies.append(accuracy_of(model, points, labels))
    assert re.findall(r"accuracy (\S+)", result.output) == accuracies
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} on cpu" in result.output
    assert distance(tmp_path / "model.pt", model.state_dict()) < 1e-9


def test_small_resume_resumes_bit_for_bit(tmp_path):
    """With dropout, killed after the first save; the options are those of 07's run.sh.

    It also resumes on another number of ranks. NaN is not saved.
    """
    script = copy_project(tmp_path / "a project", RESUME) / "small_resume.py"
    edit(script, "range(first, 5)", "range(first, 20)")
    edit(script, "nn.ReLU()", "nn.ReLU(), nn.Dropout(0.1)")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = ["--checkpoint", "new/a run.ckpt", "--output", "new/a run.pt"]
    running = Running(torchrun(script, 2, *options), killed, OMP_NUM_THREADS=1)
    wait_until((killed / "new/a run.ckpt").exists, running)
    running.kill_all()
    saved = (killed / "new/a run.ckpt").read_bytes()
    first, last = [
        train(script, 2, *options, cwd=folder).output.split("starting at epoch ")[1]
        for folder in (whole, killed)
    ]
    start, rest = last.split("\n", 1)
    assert first.startswith("0\n") and start > "0" and first.endswith(rest), last
    for name in ("new/a run.ckpt", "new/a run.pt"):
        assert equal(killed / name, whole / name)
    (killed / "new/a run.ckpt").write_bytes(saved)
    other = train(script, 3, *options, cwd=killed).output
    assert f"starting at epoch {start}\n" in other and "epoch 19  " in other
    (whole / "new/a run.ckpt").unlink()
    edit(script, "loss.backward()", "(loss * torch.nan).backward()")
    failed = train(script, 2, *options, cwd=whole, code=1)
    assert "a weight is NaN: nothing is saved" in failed.errors, failed
    assert not (whole / "new/a run.ckpt").exists()
