"""03: processes spawned on several nodes, here as two nodes on this machine."""

import sys

import pytest
from helpers import ROOT, Running, free_port, parse, rejected

SCRIPT = ROOT / "03_ddp_multinode_spawn/train.py"


@pytest.mark.launch("03_ddp_multinode_spawn", "--epochs", 3)
def test_two_nodes_train_evaluate_and_save(launched):
    launched.check()


@pytest.mark.parametrize(("options", "line"), [
    ("-g 8,x", "argument -g/--gpus: invalid process_counts value: '8,x'"),
    ("-g 8,0", "argument -g/--gpus: must be above 0, not 0"),
    ("-g 8,2,2", "--gpus: name one number of processes, or one for each of 2 nodes"),
    ("-i 2", "--node-rank must be from 0 to 1, not 2"),
    ("-g 2", "--device cuda needs a GPU per process, and PyTorch finds 1"),
])
def test_rejects_nodes_and_processes_that_do_not_fit(options, line, monkeypatch, capsys):
    options = ["-n", 2, *options.split()]
    assert rejected(monkeypatch, capsys, SCRIPT, *options, gpus=1) == line


def test_settings_come_from_the_environment(monkeypatch):
    settings = {"NODE_RANK": 1, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 1234}
    args = parse(monkeypatch, SCRIPT, "-n", 3, **settings)
    assert (args.node_rank, args.master_addr, args.master_port) == (1, "10.0.0.1", 1234)
    assert args.gpus == [2, 2, 2]


def test_nodes_with_different_gpus_end_with_one_line_each(tmp_path):
    command = [sys.executable, SCRIPT, "-n", 2, "--master-port", free_port()]
    given = [["-i", 0, "-g", "2,1"], ["-i", 1, "-g", 1]]
    nodes = [Running([*command, *options], tmp_path) for options in given]
    for node in nodes:
        result = node.finish()
        assert result.code == 1, result
        assert result.errors == "error: the nodes have different --gpus: [2, 1], [1, 1]\n"
