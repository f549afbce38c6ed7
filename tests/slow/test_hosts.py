"""03 and 04 on two separate hosts, each with its own name and address."""

import re

from helpers import Running, check_close, copy_project, free_port, train
from hosts import ADDRESSES

# as on Debian, a host's own name is 127.0.1.1; only h1 knows both names
DEBIAN = {"h0": "127.0.1.1"}, {"h0": ADDRESSES["h0"], "h1": "127.0.1.1"}
BY_NAME = {"MASTER_ADDR": "h0", "names": DEBIAN}
SELFTEST = (
    "torchrun --nnodes=2 --nproc-per-node=$NPROC --node-rank=$NODE_RANK "
    "--master-addr=h0 --master-port=$MASTER_PORT selftest.py"
)


def start(hosts, folder, command, names=(ADDRESSES,) * 2, code=0, **settings):
    """Three processes, two on the first host. Returns what they print."""
    settings = {"MASTER_ADDR": ADDRESSES["h0"], "MASTER_PORT": free_port()} | settings
    settings |= {"NNODES": 2, "OMP_NUM_THREADS": 1}
    nodes = []
    for rank, known in enumerate(names):  # the names that each host knows
        shell = ["bash", "-c", command]
        there = hosts.on(f"h{rank}", folder, *shell, names=known)
        settings |= {"NODE_RANK": rank, "NPROC": 2 - rank}
        nodes.append(Running(there, folder, **settings))
    results = [node.finish() for node in nodes]
    assert {result.code for result in results} == {code}, results
    return "".join(result.output + result.errors for result in results)


def test_three_processes_train_as_on_one_machine(hosts, tmp_path):
    """By address, and by a name that each host resolves in its own way."""
    spawn, torchrun = [
        copy_project(tmp_path / folder, folder, small=True)
        for folder in ("03_ddp_multinode_spawn", "04_ddp_torchrun")
    ]
    train("train.py", 3, "--output=alone.pt", cwd=torchrun)
    start(hosts, spawn, "bash run.sh -g 2,1")
    start(hosts, torchrun, "bash run.sh", GLOO_SOCKET_IFNAME="eth0", **BY_NAME)
    for folder in (spawn, torchrun):
        check_close(folder / "mnist.pt", torchrun / "alone.pt", 1e-10)


def test_selftest(hosts, tmp_path):
    """It names the hosts, even that of a rank that cannot connect to 127.0.1.1."""
    project = copy_project(tmp_path / "a project", "04_ddp_torchrun")
    printed = start(hosts, project, SELFTEST, GLOO_SOCKET_IFNAME="eth0", **BY_NAME)
    ok = "^OK: all checks passed on 3 ranks on (h0, h1|h1, h0)$"
    assert re.search(ok, printed, re.M), printed
    printed = start(hosts, project, SELFTEST, code=1, **BY_NAME)
    failed = r"^FAILED: join: .*rank \d on h\d: .*onnect"
    assert re.search(failed, printed, re.M), printed
