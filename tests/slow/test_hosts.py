"""03 and 04 on two separate hosts: they train, and failures end in time.

Each bound is far above what a case takes on an idle machine (README has the times), and far below
what it takes with the limits that torchrun and PyTorch have by default.
"""

import re
import time

import pytest
from helpers import ROOT, Running, copy_project, distance, free_port, run_ranks, wait_for
from hosts import ADDRESSES

WAYS = ("03", "static", "c10d")
ENDLESS = ("--epochs", 10**6, "--timeout", 8)
BOUND = 120  # seconds


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """Copies of 03 and 04 that train on few digits."""
    project = tmp_path_factory.mktemp("two hosts")
    copy_project(project / "03", ROOT / "03_ddp_multinode_spawn/train.py", "run.sh")
    copy_project(project / "04", ROOT / "04_ddp_torchrun/train.py", "selftest.py", "run.sh")
    return project


class Job:
    """A job on both hosts, started by the run.sh of 03 or in one of two ways by that of 04."""

    def __init__(self, hosts, project, way, *options, **settings):
        self.hosts, self.way, self.options = hosts, way, options
        self.folder = project / ("03" if way == "03" else "04")
        self.port = free_port()
        self.place = project / f"{way} {self.port}"
        self.place.mkdir()
        (self.place / "data").symlink_to(self.folder / "common")
        self.settings = {"NNODES": "2", "START_TIMEOUT": "60", "OMP_NUM_THREADS": "1", **settings}
        self.nodes = []

    def start(self, rank, address=ADDRESSES["h0"], port=None, nproc="1", hosts_file="hosts"):
        """Start one node, which connects to this address."""
        port = port or self.port
        if self.way == "c10d":
            settings = {"RDZV_ENDPOINT": f"{address}:{port}"}
        else:
            settings = {"NODE_RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        settings |= {"NPROC": nproc, **self.settings}
        command = ["bash", self.folder / "run.sh", *self.options]
        command = self.hosts.on(f"h{rank}", self.place, *command, hosts=hosts_file)
        self.nodes.append(Running(command, self.place, **settings))

    def start_three_processes(self):
        """Start both nodes, with two processes and one."""
        for rank, nproc in ((0, "2"), (1, "1")):
            self.start(rank, nproc="2,1" if self.way == "03" else nproc)

    def finish(self, *ranks):
        """The results of these nodes, or of all, which must end within the bound from now on."""
        end = time.monotonic() + BOUND
        nodes = [self.nodes[rank] for rank in ranks] or self.nodes
        return [node.finish(end - node.start) for node in nodes]


def test_three_processes_train_as_on_one_machine(hosts, project, tmp_path):
    jobs = [Job(hosts, project, way, "--epochs", 1) for way in WAYS]
    for job in jobs:
        job.start_three_processes()
    options = ["--data-dir", project / "04/common", "--epochs", 1]
    here = run_ranks(project / "04/train.py", 3, *options, cwd=tmp_path)
    for job in jobs:
        results = job.finish()
        assert [result.code for result in results] == [0, 0], results
        (epochs,) = [result.epochs() for result in results if result.epochs()]  # only rank 0 logs
        assert epochs[0]["accuracy"] == here.epochs()[0]["accuracy"], results
        assert distance(job.place / "mnist.pt", tmp_path / "mnist.pt") < 1e-4


def test_selftest_where_host_names_resolve_to_loopback(hosts, project):
    """As on Debian, each host has its own name at 127.0.1.1.

    Gloo then needs GLOO_SOCKET_IFNAME, and c10d the is_host that run.sh sets.
    """
    failing = Job(hosts, project, "c10d", "selftest.py")
    working = Job(hosts, project, "c10d", "selftest.py", GLOO_SOCKET_IFNAME="eth0")
    for rank, nproc in ((0, "2"), (1, "1")):
        file = f"of h{rank}"
        hosts.write_hosts(file, {**ADDRESSES, f"h{rank}": "127.0.1.1"})
        failing.start(rank, nproc=nproc, hosts_file=file)
        working.start(rank, nproc=nproc, hosts_file=file)
    failed = failing.finish()
    assert [result.code for result in failed] == [1, 1], failed
    output = "".join(result.output for result in failed)
    assert re.search("^FAILED: join: rank .*connectFullMesh failed", output, re.M), failed
    results = working.finish()
    assert [result.code for result in results] == [0, 0], results
    output = "".join(result.output for result in results)
    assert re.search("^OK: all checks passed on 3 ranks on (h0, h1|h1, h0)$", output, re.M), output
    hosts_of_ranks = re.findall(r"^rank \d on (h\d): cpu, gloo, world size 3$", output, re.M)
    assert sorted(hosts_of_ranks) == ["h0", "h0", "h1"], output


def test_nodes_that_cannot_connect(hosts, project):
    """In all three ways at once, as most of the time is waiting."""
    jobs = [Job(hosts, project, way, START_TIMEOUT="10") for way in WAYS]
    closed = free_port()
    for job in jobs:
        job.start(0)  # node 1 is absent, and the port is in use for the next one
        job.start(0)
        job.start(1, port=closed)  # node 0 is absent
        job.start(1, address="10.78.0.9")
        job.start(1, address="no.such.host")
    for job in jobs:
        results = job.finish()
        places = [f"{ADDRESSES['h0']}:{port}" for port in (job.port, job.port, closed)]
        places += [f"10.78.0.9:{job.port}", f"no.such.host:{job.port}"]
        for rank, place, result in zip((0, 0, 1, 1, 1), places, results, strict=True):
            assert result.code == 1, result
            lines = result.errors.splitlines()
            if job.way == "03":
                ours = f"error: node {rank} of 2 cannot connect to all nodes at {place} ("
                assert lines[-1].startswith(ours), result
            else:
                ours = f"run.sh: waiting up to 10 s for 2 nodes at {place}: "
                assert lines[0].startswith(ours), result
                assert re.match(r"torch\.distributed\..*Error", lines[-1]), result
        in_use = ["address already in use" in result.errors for result in results]
        assert sorted(in_use[:2]) == [False, True] and not any(in_use[2:]), results


def test_a_cut_link(hosts, project):
    """Every node ends, except the c10d agent without the store."""
    jobs = [Job(hosts, project, way, *ENDLESS) for way in WAYS]
    for job in jobs:
        job.start_three_processes()
    for job in jobs:
        wait_for("epoch 1/", *job.nodes, limit=BOUND)  # by rank 0, which may be on any node
    hosts.link("h1", "down")
    try:
        for job in jobs:
            for result in job.finish(*[0] if job.way == "c10d" else [0, 1]):
                assert result.code == 1, result
                assert re.search("Error|Exception", result.errors), result
    finally:
        hosts.link("h1", "up")
        for job in jobs:
            for node in job.nodes:
                node.kill_all()
