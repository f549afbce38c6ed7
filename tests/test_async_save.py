"""add_async_save.diff: a run that saves in a thread is interrupted in its saves."""

from functools import partial

import pytest
from helpers import equal, train
from test_copies import patched

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """Start it in a folder of its own. Each save takes a second, a step much less."""
    project = patched(tmp_path, "07_slurm/fsdp.py", "add_async_save.diff")
    options = ["--epochs=2", "--batch-size=16", "--width=16", "--depth=1"]
    given = {"cwd": tmp_path / "run", "fault": "slow_saves"}
    return partial(train, project / "fsdp.py", 2, *options, **given, FLOAT32=1)


def checkpoints(tmp_path):
    """For each, in order, whether it is complete."""
    folders = sorted((tmp_path / "run/checkpoint").iterdir())
    return [(folder / ".metadata").exists() for folder in folders]


def test_killed_and_stopped_while_it_saves(start, tmp_path):
    """The run resumes from the newest complete checkpoint, bit for bit."""
    start("--save-every=99", cwd=tmp_path / "whole")
    start("--save-every=1", READ="0 20 9", code=1)  # in the very first save
    assert checkpoints(tmp_path) == [False]
    start("--save-every=1", READ="0 80 9", code=1)
    assert checkpoints(tmp_path) == [True, True, False]
    stopped = start("--save-every=1", READ="1 40 15", code=1)
    assert "'done': 96}" in stopped.output and "\nstopped: " in stopped.output
    assert checkpoints(tmp_path) == [True, True]
    start("--save-every=1", "--workers=1")  # forked while a thread writes
    assert equal(tmp_path / "run/mnist.pt", tmp_path / "whole/mnist.pt")


def test_a_save_that_fails_is_an_error_at_the_next(start, tmp_path):
    """On all ranks, and the one before stays complete."""
    failed = start("--save-every=1", fault="slow_saves:2", code=1)
    assert failed.errors.count("OSError: the disk is full") > 1, failed
    assert checkpoints(tmp_path) == [True, False]
