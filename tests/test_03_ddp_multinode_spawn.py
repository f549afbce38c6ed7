"""03: processes spawned on several nodes, here as two nodes on this machine."""

from helpers.checks import EXACT, check_as_one_process
from helpers.commands import WITNESS, Running, free_port


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
