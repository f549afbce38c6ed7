"""03 and 04 on two separate hosts, each with its own name and address."""

import re

import pytest
from helpers import Running, copy_project, distance, free_port, train
from hosts import ADDRESSES

ADDRESS = ADDRESSES["h0"]
# as on Debian, a host's own name is 127.0.1.1; only h1 knows both names
DEBIAN = {"h0": "127.0.1.1"}, {"h0": ADDRESS, "h1": "127.0.1.1"}
TORCHRUN = "torchrun --nnodes=2 --nproc-per-node=$NPROC "
STATIC = (
    f"{TORCHRUN} --node-rank=$NODE_RANK --master-addr=h0 --master-port=$MASTER_PORT "
)
SELFTEST = "../04/selftest.py"


class Job:
    """Three processes, two on the first host, started by a command from the pages."""

    def __init__(self, hosts, project, command, names=(ADDRESSES,) * 2, **settings):
        settings = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": free_port()} | settings
        settings |= {"NNODES": 2, "OMP_NUM_THREADS": 1}
        self.place = project / f"job {settings['MASTER_PORT']}"
        self.nodes = []
        for rank, known in enumerate(names):  # the names that each host knows
            shell = ["bash", "-c", command]
            there = hosts.on(f"h{rank}", self.place, *shell, names=known)
            settings |= {"NODE_RANK": rank, "NPROC": 2 - rank}
            self.nodes.append(Running(there, self.place, **settings))

    def finish(self, code=0):
        """What they print. Both must end with this code."""
        results = [node.finish() for node in self.nodes]
        assert {result.code for result in results} == {code}, results
        return "".join(result.output + result.errors for result in results)


@pytest.fixture
def project(tmp_path):
    """Copies with the small data."""
    for folder in ("03_ddp_multinode_spawn", "04_ddp_torchrun"):
        copy_project(tmp_path / folder[:2], folder, small="data")
    return tmp_path


def test_three_processes_train_as_on_one_machine(hosts, project):
    """By address, and by a name that each host resolves in its own way."""
    by_name = {"MASTER_ADDR": "h0", "names": DEBIAN, "GLOO_SOCKET_IFNAME": "eth0"}
    spawn, torchrun = "bash ../03/run.sh -g 2,1", "bash ../04/run.sh"
    ways = (spawn, {}), (torchrun, by_name)
    train("04/train.py", 3, cwd=project)
    for command, settings in ways:
        job = Job(hosts, project, command, **settings)
        job.finish()
        assert distance(job.place / "mnist.pt", project / "mnist.pt") < 1e-10


def test_selftest(hosts, project):
    """It names the hosts, even that of a rank that cannot connect to 127.0.1.1."""
    interface = {"names": DEBIAN, "GLOO_SOCKET_IFNAME": "eth0"}
    job = Job(hosts, project, STATIC + SELFTEST, **interface)
    printed = job.finish()
    ok = "^OK: all checks passed on 3 ranks on (h0, h1|h1, h0)$"
    assert re.search(ok, printed, re.M), printed
    job = Job(hosts, project, STATIC + SELFTEST, names=DEBIAN)
    printed = job.finish(code=1)
    failed = r"^FAILED: join: .*rank \d on h\d: .*onnect"
    assert re.search(failed, printed, re.M), printed
