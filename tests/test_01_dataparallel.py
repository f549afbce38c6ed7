"""01: one process; and what the options of 01 to 04 have in common."""

import os

import pytest
from helpers.paths import DIGITS, ROOT
from helpers.scripts import load_script, parse, rejected

SCRIPT = ROOT / "01_dataparallel/train.py"


# One thread: two are slow where a core is busy
@pytest.mark.launch("01_dataparallel", "--epochs", 3, OMP_NUM_THREADS="1")
def test_trains_evaluates_and_saves(launched):
    launched.check(ranks=1)


@pytest.mark.parametrize(("folder", "writes", "does_not"), [
    ("01_dataparallel", ([], {}), None),
    ("02_ddp_spawn", ([], {}), None),
    ("03_ddp_multinode_spawn", (["-n", 2], {}), (["-n", 2, "-i", 1], {})),
    ("04_ddp_torchrun", ([], {"RANK": 0}), ([], {"RANK": 1})),
])
def test_who_saves_needs_the_folder_of_its_output(folder, writes, does_not, monkeypatch, capsys):
    """The other nodes may have no such folder."""
    script, missing = ROOT / folder / "train.py", ["--output", "no/such/folder/mnist.pt"]
    options, settings = writes
    error = rejected(monkeypatch, capsys, script, *missing, *options, **settings)
    assert error == "no/such/folder is not a writable folder"
    with monkeypatch.context() as patch:  # a folder that others own, or on a read-only disk
        patch.setattr("os.access", lambda folder, mode: mode != os.W_OK)
        error = rejected(patch, capsys, script, *options, **settings)
        assert error == ". is not a writable folder"
    if does_not:
        options, settings = does_not
        parse(monkeypatch, script, *missing, *options, **settings)


def test_several_gpus_reject_amp(monkeypatch):
    """The threads of DataParallel would compute in float16."""
    options = ["--amp", "--data-dir", DIGITS]
    script, args = load_script(SCRIPT), parse(monkeypatch, SCRIPT, *options, gpus=2)
    assert args.device == "cuda"
    monkeypatch.setattr("torch.nn.Module.to", lambda self, *args, **kwargs: self)  # there is no GPU
    with pytest.raises(ValueError, match="^--amp needs one GPU"):
        script.train(args)
