"""03 and 04 on two separate hosts, each with its own name and address."""

import re

from helpers import Running, check_close, copy_repository, free_port, train
from hosts import HOSTS

# as on Debian, a host's own name is 127.0.1.1
DEBIAN = """name=$(hostname)
sed "s/.* $name/127.0.1.1 $name/" /etc/hosts >/run/$name
mount --bind /run/$name /etc/hosts
"""
SELFTEST = (
    "torchrun --nnodes=2 --nproc-per-node=$NPROC --node-rank=$NODE_RANK "
    "--master-addr=h0 --master-port=$MASTER_PORT selftest.py"
)


def start(hosts, folder, command, code=0, **settings):
    """Three processes, two on the first host. Returns what they print."""
    settings |= {"NNODES": 2, "OMP_NUM_THREADS": 1, "MASTER_PORT": free_port()}
    nodes = []
    for rank, host in enumerate(HOSTS):
        settings |= {"NODE_RANK": rank, "NPROC": 2 - rank}
        there = hosts.on(host, folder, "bash", "-c", command)
        nodes.append(Running(there, folder, **settings))
    results = [node.finish() for node in nodes]
    assert {result.code for result in results} == {code}, results
    return "".join(result.output + result.errors for result in results)


def test_three_processes_train_as_on_one_machine(hosts, tmp_path):
    """By address, and by a name that each host resolves in its own way."""
    project = copy_repository(tmp_path / "a project", small=True)
    spawn, torchrun = project / "03_ddp_multinode_spawn", project / "04_ddp_torchrun"
    train("train.py", 3, "--output=alone.pt", cwd=torchrun)
    start(hosts, spawn, "bash run.sh -g 2,1", MASTER_ADDR="10.78.0.1")
    names = {"MASTER_ADDR": "h0", "GLOO_SOCKET_IFNAME": "eth0"}
    start(hosts, torchrun, DEBIAN + "bash run.sh", **names)
    for folder in (spawn, torchrun):
        check_close(folder / "mnist.pt", torchrun / "alone.pt", 1e-10)


def test_selftest(hosts, tmp_path):
    """It names the hosts, even that of a rank that cannot connect to 127.0.1.1."""
    folder = copy_repository(tmp_path / "a project") / "04_ddp_torchrun"
    printed = start(hosts, folder, DEBIAN + SELFTEST, GLOO_SOCKET_IFNAME="eth0")
    ok = "^OK: all checks passed on 3 ranks on (h0, h1|h1, h0)$"
    assert re.search(ok, printed, re.M), printed
    printed = start(hosts, folder, DEBIAN + SELFTEST, code=1)
    failed = r"^FAILED: join: .*rank \d on h\d: .*onnect"
    assert re.search(failed, printed, re.M), printed
