"""03: processes spawned on several nodes, here as two nodes on this machine."""

import pytest
from helpers.checks import EXACT, check_as_one_process
from helpers.commands import WITNESS, Running, free_port
from helpers.paths import ROOT
from helpers.scripts import parse, rejected

SCRIPT = ROOT / "03_ddp_multinode_spawn/train.py"


def test_two_nodes_train_evaluate_and_save(exact, tmp_path):
    """Each with its own number of processes, of which both know."""
    settings = {"NNODES": "2", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    settings |= {**WITNESS, "WITNESS": str(tmp_path / "witness")}
    command = ["bash", exact / "03_ddp_multinode_spawn/run.sh", *EXACT, "-g", "2,1"]
    command += ["--data-dir", exact / "common"]
    nodes = [Running(command, tmp_path, NODE_RANK=str(rank), **settings) for rank in range(2)]
    results = [node.finish() for node in nodes]
    check_as_one_process(results[0], tmp_path, ranks=3, epochs=1)
    assert (results[1].code, results[1].output) == (0, ""), results[1]


@pytest.mark.parametrize(("given", "gpus"), [
    (["-n", 2, "-g", "8,2"], [8, 2]), (["-n", 3, "-g", 4], [4, 4, 4]), (["-n", 2], [5, 5]),
])
def test_the_processes_of_all_nodes(given, gpus, monkeypatch):
    assert parse(monkeypatch, SCRIPT, *given, gpus=5).gpus == gpus


def test_rejects_another_number_of_nodes(monkeypatch, capsys):
    error = rejected(monkeypatch, capsys, SCRIPT, "-n", 2, "-g", "8,2,2")
    assert error == "--gpus has 3 numbers, and there are 2 nodes"
