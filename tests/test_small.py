"""small.py, small_ddp.py and small_resume.py: exact, and resumed bit for bit."""

import re
import sys

import pytest
from helpers import (
    ROOT,
    Running,
    check_close,
    copy_project,
    edit,
    equal,
    run,
    torchrun,
    train,
    wait_until,
)

RESUME = "06_checkpointing/small_resume.py"


def accuracies(result):
    found = re.findall(r"^epoch \d  accuracy (\d\.\d{4})$", result.output, re.M)
    assert len(found) == 5 and float(found[-1]) > 0.9, result
    return found


def test_small_learns(tmp_path):
    accuracies(run([sys.executable, ROOT / "04_ddp_torchrun/small.py"], tmp_path))


@pytest.mark.parametrize("path", ["04_ddp_torchrun/small_ddp.py", RESUME])
def test_two_ranks_compute_what_one_does(path, tmp_path):
    script = copy_project(tmp_path / "a project", path) / path.split("/")[1]
    two = train(script, 2, cwd=tmp_path / "two", fault="float64")
    for rank in range(2):
        assert f"rank {rank} of 2 on cpu" in two.output
    edit(script, "(train, 16,", "(train, 32,")
    one = train(script, 1, cwd=tmp_path / "one", fault="float64")
    assert accuracies(one) == accuracies(two)
    check_close(tmp_path / "one/model.pt", tmp_path / "two/model.pt")


def test_small_resume_resumes_bit_for_bit(tmp_path):
    """With dropout, killed after the first save; options are those of 07's run.sh."""
    script = copy_project(tmp_path / "a project", RESUME) / "small_resume.py"
    edit(script, "range(first, 5)", "range(first, 20)")
    edit(script, "nn.ReLU()", "nn.ReLU(), nn.Dropout(0.1)")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = ["--checkpoint", "new/a run.ckpt", "--output", "new/a run.pt"]
    running = Running(torchrun(script, 2, *options), killed, OMP_NUM_THREADS=1)
    wait_until((killed / "new/a run.ckpt").exists, running)
    running.kill_all()
    first, last = [
        train(script, 2, *options, cwd=folder).output.split("starting at epoch ")[1]
        for folder in (whole, killed)
    ]
    start, rest = last.split("\n", 1)
    assert first.startswith("0\n") and start > "0" and first.endswith(rest), last
    for name in ("new/a run.ckpt", "new/a run.pt"):
        assert equal(killed / name, whole / name)


@pytest.mark.slow
def test_small_resume_does_not_save_nan(tmp_path):
    script = copy_project(tmp_path / "a project", RESUME) / "small_resume.py"
    edit(script, "loss.backward()", "(loss * torch.nan).backward()")
    failed = train(script, 2, cwd=tmp_path, code=1)
    assert "a weight is NaN: nothing is saved" in failed.errors, failed
    assert not [*tmp_path.glob("*.pt")]
