"""03: processes spawned on several nodes, here as two nodes on this machine."""

from helpers.checks import check_trained
from helpers.commands import WITNESS, Running, free_port


def test_two_nodes_train_evaluate_and_save(repository, tmp_path):
    """Each with its own number of processes, of which it tells the other."""
    settings = {"NNODES": "2", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    settings |= {**WITNESS, "WITNESS": str(tmp_path / "witness")}
    command = ["bash", repository / "03_ddp_multinode_spawn/run.sh", "--epochs", 1]
    command += ["--data-dir", repository / "common"]
    nodes = [Running([*command, "-g", gpus], tmp_path, NODE_RANK=str(rank), **settings)
             for rank, gpus in enumerate((2, 1))]
    results = [node.finish() for node in nodes]
    check_trained(results[0], tmp_path, epochs=1, ranks=3, at_least=0)
    assert (results[1].code, results[1].output) == (0, ""), results[1]
