"""03: processes spawned on several nodes, here as two nodes on this machine. test_hosts.py has separate ones."""

import os
import re
import signal
import sys

import pytest
from helpers import DIGITS, ROOT, Running, bare_accuracy, copy_project, free_port, load_script, run, wait_for
from test_02_ddp_spawn import check_two_ranks

FOLDER = ROOT / "03_ddp_multinode_spawn"
RUN = FOLDER / "run.sh"


def test_two_nodes_here_train_evaluate_and_save(tmp_path):
    result = check_two_ranks(RUN, tmp_path, "--epochs", 1, epochs=1)
    nodes = sorted(line for line in result.output.splitlines() if line.startswith("node "))
    assert nodes == [f"node {node} of 2: 1 of 2 processes, from rank {node} on" for node in (0, 1)]


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_a_stop_ends_both_nodes(how, tmp_path):
    running = Running(["bash", RUN, "--epochs", 1000, "--data-dir", DIGITS], tmp_path)
    wait_for("epoch 1/", running)
    if how == "Ctrl-C":
        os.killpg(running.process.pid, signal.SIGINT)  # a terminal sends it to all
    else:
        running.process.terminate()
    assert running.finish(60).code != 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("-g 8,x", "argument -g/--gpus: invalid counts value: '8,x'"),
        ("-g 8,", "argument -g/--gpus: invalid counts value: '8,'"),
        ("-g 8,0", "argument -g/--gpus: each number of processes must be above 0, not 8,0"),
        ("-g 8,2,2", "--nodes 2 needs --gpus, one for all or one each, a --node-rank below 2"),
        ("-n 3 -g 8,2", "--nodes 3 needs --gpus, one for all or one each, a --node-rank below 3"),
        ("-i 2", "--nodes 2 needs --gpus, one for all or one each, a --node-rank below 2"),
        ("-i -1", "--nodes 2 needs --gpus, one for all or one each, a --node-rank below 2"),
        ("-i two", "argument -i/--node-rank: invalid int value: 'two'"),
        ("-n 0", "--nodes must be above 0"),
        ("--start-timeout 0", "--start-timeout must be above 0"),
        ("--device cuda -g 2", "each process needs a GPU, torch finds 1: start fewer, or --device cpu"),
    ],
)
def test_bad_options(options, line, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("sys.argv", ["train.py", "-n", "2", *options.split()])
    with pytest.raises(SystemExit) as error:
        load_script(FOLDER / "train.py").parse_args()
    assert error.value.code == 2
    assert capsys.readouterr().err == f"usage: train.py [options]\ntrain.py: error: {line}\n"


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    for name, value in {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("sys.argv", ["train.py", "-n", "3"])
    args = load_script(FOLDER / "train.py").parse_args()
    assert (args.node_rank, args.master_addr, args.master_port) == (1, "10.0.0.1", 1234)
    assert args.gpus == [2, 2, 2]


def two_nodes(tmp_path, *options):
    """Start node 0 and node 1 with these options, give both 10 seconds to start."""
    port = free_port()
    command = [sys.executable, FOLDER / "train.py", "-n", 2, "--master-port", port, "--start-timeout", 10]
    nodes = [Running([*command, "--data-dir", DIGITS, *given], tmp_path) for given in options]
    return [node.finish(60) for node in nodes]


def test_nodes_that_disagree(tmp_path):
    for result in two_nodes(tmp_path, ["-i", 0, "-g", "2,1"], ["-i", 1, "-g", 1]):
        assert result.code == 1, result
        assert result.errors == "error: the nodes disagree on --gpus: node 0 has 2,1; node 1 has 1,1\n"


def test_a_node_rank_given_twice(tmp_path):
    results = two_nodes(tmp_path, ["-i", 0, "-n", 3, "-g", 1], ["-i", 1, "-n", 3, "-g", 1], ["-i", 1, "-n", 3, "-g", 1])
    assert all(result.code == 1 for result in results)
    twice = "error: there are two of node 1 of 3: give each its own --node-rank\n"
    assert [result.errors for result in results].count(twice) == 1
    assert "error: node 2 of 3 did not reach 127.0.0.1:" in results[0].errors


def test_rank_tables():
    """Each row of README's tables, `node | processes | ranks`, follows from the rows above it."""
    text = (FOLDER / "README.md").read_text()
    tables = re.findall(r"(?:^\| \d+ \| \d+ \| \d+ to \d+ \|\n)+", text, re.M)
    rows = [[[int(number) for number in re.findall(r"\d+", row)] for row in table.splitlines()] for table in tables]
    assert [[row[1] for row in table] for table in rows] == [[4, 4], [8, 2]]
    for table in rows:
        first = 0
        for number, (node, processes, low, high) in enumerate(table):
            assert (node, low, high) == (number, first, first + processes - 1)
            first += processes


def test_a_copy_runs_in_another_project(tmp_path):
    script = copy_project(tmp_path / "my project", FOLDER / "train.py", "meet.py")
    command = [sys.executable, script, "--epochs", 1, "--data-dir", DIGITS, "--master-port", free_port()]
    result = run(command, tmp_path, OMP_NUM_THREADS="1")
    assert result.code == 0, result
    assert result.epochs()[0]["accuracy"] == f"{bare_accuracy(tmp_path / 'mnist.pt'):.4f}", result
