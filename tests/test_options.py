"""Options that would cost a run are errors at its start, where they matter."""

import os

import pytest
from helpers.paths import ROOT, label
from helpers.scripts import parse, rejected

SCRIPTS = [path for path in sorted(ROOT.glob("0*/*.py")) if path.name != "selftest.py"]


def launch(path, rank):
    """How one of two nodes calls a script: the options and the environment."""
    if path.parent.name[:2] in ("01", "02"):  # one node
        return [], {}
    if path.parent.name.startswith("03"):
        return ["-n", 2, "-i", rank], {}
    return [], {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_who_saves_needs_writable_folders(path, monkeypatch, capsys):
    """The other nodes may have no such folder."""
    (options, settings), (others, of_others) = launch(path, 0), launch(path, 1)
    for name in ("--output", "--checkpoint", "--best"):
        if f'"{name}"' in path.read_text():
            wrong = [name, "no/such/folder/file"]
            error = rejected(monkeypatch, capsys, path, *wrong, *options, **settings)
            assert error == "no/such/folder is not a writable folder"
            if (options, settings) != (others, of_others):
                parse(monkeypatch, path, *wrong, *others, **of_others)
    monkeypatch.setattr(os, "access", lambda folder, mode: mode != os.W_OK)  # others own it
    error = rejected(monkeypatch, capsys, path, *options, **settings)
    assert error == ". is not a writable folder"


TORCHRUN = "start it with torchrun, as the first lines of this file show"
DIFFERENT = "--output, --checkpoint and --best must be different files"


@pytest.mark.parametrize(("script", "nproc", "options", "error"), [
    ("03_ddp_multinode_spawn/train", 0, "-n 2 -g 8,2,2", "--gpus has 3 numbers, and there are 2 n"),
    ("04_ddp_torchrun/train", 0, "", TORCHRUN),
    ("04_ddp_torchrun/selftest", 0, "", TORCHRUN),
    ("05_model_parallel/train", 1, "--devices cuda:0", "--devices cuda:0: name 2 devices, two per"),
    ("05_model_parallel/train", 2, "--devices cpu,cpu", "--devices cpu,cpu: name 4 devices, "),
    ("05_model_parallel/pipeline", 2, "--chunks 5", "--batch-size 64 cannot be split into 5 --ch"),
    ("05_model_parallel/pipeline", 2, "--schedule 1f1b --chunks 1",
     "--schedule 1f1b needs at least 2 --chunks"),
    ("05_model_parallel/pipeline", 3, "", "the network has 2 stages: start 2 processes, not 3"),
    ("05_model_parallel/fsdp", 2, "--best mnist.pt", "--output and --best must be different files"),
    ("05_model_parallel/fsdp", 4, "--shards 3", "--shards 3 does not divide the 4 processes"),
    ("06_checkpointing/train", 0, "", TORCHRUN),
    ("06_checkpointing/train", 2, "--checkpoint a.pt --output b/../a.pt", DIFFERENT),
    ("06_checkpointing/train", 2, "--best mnist.pt", DIFFERENT),
])
def test_rejects_what_does_not_fit(script, nproc, options, error, monkeypatch, capsys):
    settings = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": nproc, "WORLD_SIZE": nproc}
    path, settings = ROOT / f"{script}.py", settings if nproc else {}
    found = rejected(monkeypatch, capsys, path, *options.split(), **settings)
    assert found.startswith(error)


@pytest.mark.parametrize(("given", "gpus"), [
    (["-n", 2, "-g", "8,2"], [8, 2]), (["-n", 3, "-g", 4], [4, 4, 4]), (["-n", 2], [5, 5]),
])
def test_03_knows_the_processes_of_all_nodes(given, gpus, monkeypatch):
    path = ROOT / "03_ddp_multinode_spawn/train.py"
    assert parse(monkeypatch, path, *given, gpus=5).gpus == gpus
