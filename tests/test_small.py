"""small.py, small_ddp.py and small_resume.py: exact, and resumed bit for bit."""

import re
import sys

import pytest
from helpers import ROOT, check_close, copy_repository, edit, equal, lines, run, train

RESUME = "06_checkpointing/small_resume.py"


def test_small_learns(tmp_path):
    result = run([sys.executable, ROOT / "04_ddp_torchrun/small.py"], tmp_path)
    assert re.search(r"^epoch 4  accuracy (0\.9|1)", result.output, re.M), result


@pytest.mark.parametrize(
    "path",
    [
        "04_ddp_torchrun/small_ddp.py",
        pytest.param(RESUME, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_compute_what_one_does(path, tmp_path):
    script = copy_repository(tmp_path / "a project") / path
    two = train(script, 2, cwd=tmp_path / "two", fault="float64")
    for rank in range(2):
        assert f"rank {rank} of 2 on cpu" in two.output
    edit(script, "(train, 16,", "(train, 32,")
    one = train(script, 1, cwd=tmp_path / "one", fault="float64")
    assert lines(one) == lines(two) and len(lines(two)) == 5
    check_close(tmp_path / "one/model.pt", tmp_path / "two/model.pt")


def test_small_resume_resumes_bit_for_bit(tmp_path):
    """With dropout, killed after the first save; options are those of 07's run.sh."""
    script = copy_repository(tmp_path / "a project") / RESUME
    edit(script, "nn.ReLU()", "nn.ReLU(), nn.Dropout(0.1)")
    options = ["--checkpoint", "new/a run.ckpt", "--output", "new/a run.pt"]
    whole = train(script, 2, *options, cwd=tmp_path / "whole")
    kill = {"fault": "signal_after:os.replace:1:9:0", "code": 1}
    train(script, 2, *options, cwd=tmp_path / "killed", **kill)
    rest = train(script, 2, *options, cwd=tmp_path / "killed")
    assert "starting at epoch 1\n" in rest.output, rest
    assert lines(rest) == lines(whole)[1:]
    for name in ("new/a run.ckpt", "new/a run.pt"):
        assert equal(tmp_path / "killed" / name, tmp_path / "whole" / name)


@pytest.mark.slow
def test_small_resume_does_not_save_nan(tmp_path):
    script = copy_repository(tmp_path / "a project") / RESUME
    edit(script, "loss.backward()", "(loss * torch.nan).backward()")
    failed = train(script, 2, cwd=tmp_path / "run", code=1)
    assert "a weight is NaN: nothing is saved" in failed.errors, failed
    assert not [*tmp_path.glob("run/*")]
