"""03 and 04 on two separate hosts: they train as on one machine, and failures end in time.

Each bound is far above what a case takes on an idle machine (README has the times), and far below
what it takes with the limits that torchrun and PyTorch have by default.
"""

import re
import time

import pytest
from helpers import (
    ROOT,
    Running,
    copy_project,
    distance,
    free_port,
    run,
    wait_for,
)
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

    def __init__(self, hosts, project, way, *options, nproc=("1", "1"), **settings):
        self.hosts, self.project, self.way, self.nproc = hosts, project, way, nproc
        self.port = free_port()
        self.folder = project / ("03" if way == "03" else "04")
        self.script = [name for name in options if str(name).endswith(".py")]
        self.options = [option for option in options if option not in self.script]
        if not self.script:
            self.options += ["--data-dir", self.folder / "common"]
        self.settings = {"NNODES": "2", "START_TIMEOUT": "60", "OMP_NUM_THREADS": "1", **settings}
        if way == "03":
            self.options += ["--start-timeout", self.settings["START_TIMEOUT"]]
        self.nodes = []

    def start(self, rank, address=ADDRESSES["h0"], port=None, hosts_file="hosts"):
        """Start one node, which connects to this address."""
        port = port or self.port
        place = self.project / f"{self.way} {self.port} {len(self.nodes)}"
        place.mkdir()
        if self.way == "c10d":
            where = {"RDZV_ENDPOINT": f"{address}:{port}", "NPROC": self.nproc[rank]}
        else:
            where = {"NODE_RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            where["NPROC"] = ",".join(self.nproc) if self.way == "03" else self.nproc[rank]
        command = ["bash", self.folder / "run.sh", *self.script, *self.options]
        command = self.hosts.on(f"h{rank}", place, *command, hosts=hosts_file)
        self.nodes.append(Running(command, place, **self.settings, **where))

    def start_both(self):
        self.start(0)
        self.start(1)
        return self

    def wait_for(self, text, times=1):
        """Wait until rank 0, which may be on any node, has printed this so often."""
        wait_for(text, *self.nodes, times=times, limit=BOUND)

    def kill_worker(self):
        """Kill a training process on h1."""
        words = ("spawn_main", "-c") if self.way == "03" else ("train.py", "-u")
        self.nodes[1].kill(*words)

    def finish(self, *ranks):
        """The results of these nodes, or of all, which must end within the bound from now on."""
        end = time.monotonic() + BOUND
        nodes = [self.nodes[rank] for rank in ranks] or self.nodes
        return [node.finish(end - node.start) for node in nodes]

    def check_failure(self, *ranks):
        """These nodes, or all, must end with an error within the bound from now on."""
        for result in self.finish(*ranks):
            assert result.code == 1, result
            assert re.search("Error|Exception", result.errors), result

    def kill_all(self):
        for node in self.nodes:
            node.kill_all()


@pytest.fixture(scope="session")
def here(project):
    """The last epoch and the weights of three processes on one machine."""
    weights = project / "here.pt"
    options = ["--data-dir", project / "04/common", "--output", weights]
    command = ["bash", project / "04/run.sh", *options]
    result = run(command, project, NPROC="3", OMP_NUM_THREADS="1")
    assert result.code == 0, result
    return result.epochs()[-1], weights


@pytest.mark.parametrize("way", WAYS)
def test_two_and_one_processes_train_as_three_on_one_machine(way, hosts, project, here):
    job = Job(hosts, project, way, nproc=("2", "1")).start_both()
    results = job.finish()
    assert [result.code for result in results] == [0, 0], results
    (epochs,) = [result.epochs() for result in results if result.epochs()]  # only rank 0 logs
    (weights,) = project.glob(f"{way} {job.port} ?/mnist.pt")  # only rank 0 saves
    last, weights_here = here
    assert epochs[-1]["epoch"] == last["epoch"]
    assert epochs[-1]["accuracy"] == last["accuracy"]
    assert distance(weights, weights_here) < 1e-4


@pytest.mark.parametrize("way", ["static", "c10d"])
def test_selftest_where_host_names_resolve_to_loopback(way, hosts, project):
    """As on Debian, each host has its own name at 127.0.1.1.

    Gloo then needs GLOO_SOCKET_IFNAME, and c10d the is_host that run.sh sets.
    """
    failing = Job(hosts, project, way, "selftest.py", nproc=("2", "1"))
    working = Job(hosts, project, way, "selftest.py", nproc=("2", "1"), GLOO_SOCKET_IFNAME="eth0")
    for rank, other in ((0, 1), (1, 0)):
        names = {f"h{rank}": "127.0.1.1", f"h{other}": ADDRESSES[f"h{other}"]}
        hosts.write_hosts(f"of h{rank}", names)
        failing.start(rank, hosts_file=f"of h{rank}")
        working.start(rank, hosts_file=f"of h{rank}")
    failed = failing.finish()
    assert [result.code for result in failed] == [1, 1], failed
    output = "".join(result.output for result in failed)
    assert re.search("^FAILED: join: rank .*connectFullMesh failed", output, re.M), failed
    results = working.finish()
    assert [result.code for result in results] == [0, 0], results
    output = "".join(result.output for result in results)
    assert re.search("^OK: all checks passed on 3 ranks on (h0, h1|h1, h0)$", output, re.M), output
    for result, host, count in zip(results, ("h0", "h1"), (2, 1), strict=True):
        line = rf"^rank \d on {host}: cpu, gloo, world size 3$"
        assert len(re.findall(line, result.output, re.M)) == count, result


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
        places = [f"10.78.0.1:{job.port}"] * 2 + [f"10.78.0.1:{closed}"]
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
    """Every node ends, except one: the c10d agent that cannot reach the store any more."""
    jobs = {way: Job(hosts, project, way, *ENDLESS).start_both() for way in WAYS}
    for job in jobs.values():
        job.wait_for("epoch 1/")
    hosts.link("h1", "down")
    try:
        jobs["03"].check_failure()
        jobs["static"].check_failure()
        jobs["c10d"].check_failure(0)
    finally:
        hosts.link("h1", "up")
        for job in jobs.values():
            job.kill_all()


def test_a_killed_process(hosts, project):
    jobs = [Job(hosts, project, way, *ENDLESS).start_both() for way in WAYS]
    for job in jobs:
        job.wait_for("epoch 1/")
        job.kill_worker()
        job.check_failure()
