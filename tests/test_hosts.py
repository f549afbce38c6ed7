"""03 and 04 on two hosts that are really separate: they train as one machine does, and failures end soon and speak."""

import re
import sys
import time

import pytest
from helpers import ROOT, Running, copy_project, distance, fewer_digits, free_port, run, wait_for
from hosts import ADDRESSES

WAYS = ("03", "static", "c10d")
WITHOUT_END = ("--epochs", 10**6, "--timeout", 8)


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """Copies of 03 and 04 that train on few digits."""
    project = tmp_path_factory.mktemp("two hosts")
    copy_project(project / "03", ROOT / "03_ddp_multinode_spawn/train.py", "meet.py", "run.sh")
    copy_project(project / "04", ROOT / "04_ddp_torchrun/train.py", "join.py", "selftest.py", "run.sh")
    for folder in ("03", "04"):
        fewer_digits(project / folder)
    return project


class Job:
    """A job on both hosts, with 03 or with one of the ways of 04, and what is the same for its nodes."""

    def __init__(self, hosts, project, way, *options, nproc=("1", "1"), **settings):
        self.hosts, self.project, self.way, self.nproc, self.port = hosts, project, way, nproc, free_port()
        self.folder = project / ("03" if way == "03" else "04")
        self.options = [*options, *([] if "selftest.py" in options else ["--data-dir", self.folder / "common"])]
        self.settings = {"NNODES": "2", "START_TIMEOUT": "20", "OMP_NUM_THREADS": "1", **settings}
        self.nodes = []

    def start(self, rank, address=ADDRESSES["h0"], port=None, hosts_file="hosts"):
        """Start the share of one host, which looks for the others at this address."""
        port = port or self.port
        if self.way == "c10d":
            meeting = {"RDZV_ENDPOINT": f"{address}:{port}", "NPROC": self.nproc[rank]}
        else:
            meeting = {"NODE_RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            meeting["NPROC"] = ",".join(self.nproc) if self.way == "03" else self.nproc[rank]
        place = self.project / f"{self.way}, port {self.port}, node {len(self.nodes)}"
        place.mkdir()
        command = self.hosts.on(f"h{rank}", place, "bash", self.folder / "run.sh", *self.options, hosts=hosts_file)
        self.nodes.append(Running(command, place, **self.settings, **meeting))

    def start_both(self):
        self.start(0)
        self.start(1)
        return self

    def wait_for(self, text, times=1):
        """Wait until rank 0, which may be on any of the nodes, has printed this so often."""
        wait_for(text, *self.nodes, times=times)

    def finish(self, limit=120):
        return [node.finish(limit) for node in self.nodes]

    def name(self, rank):
        return f"node h{rank}" if self.way == "c10d" else f"node {rank} of 2"

    def end(self):
        """End all of it, in whatever state it is."""
        for node in self.nodes:
            node.kill_all()

    def stopped(self, rank):
        """How the last line of a node begins when one of its processes, or torchrun itself, has failed."""
        return rf"{self.name(rank)} has stopped because of the error above; if that is only a lost or silent rank, "

    def check_failure(self, *patterns, limit):
        """Within so many seconds each node ends, not well, and its last line is an error like its pattern."""
        start = time.monotonic()
        for result, pattern in zip(self.finish(), patterns, strict=True):
            assert result.code not in (0, None), result
            assert not pattern or re.match(f"error: {pattern}", result.errors.splitlines()[-1]), result
        assert time.monotonic() - start < limit


@pytest.fixture(scope="session")
def here(project):
    """The last line and the weights of three processes on one machine."""
    command = ["bash", project / "04/run.sh", "--data-dir", project / "04/common", "--output", project / "here.pt"]
    result = run(command, project, NPROC="3", OMP_NUM_THREADS="1")
    assert result.code == 0, result
    return result.epochs()[-1], project / "here.pt"


@pytest.mark.parametrize("way", WAYS)
def test_two_and_one_processes_train_as_three_on_one_machine(way, hosts, project, here):
    job = Job(hosts, project, way, nproc=("2", "1")).start_both()
    results = job.finish()
    assert [result.code for result in results] == [0, 0], results
    (epochs,) = [result.epochs() for result in results if result.epochs()]  # of the node with rank 0
    (weights,) = project.glob(f"{way}, port {job.port}, node ?/mnist.pt")
    assert [epochs[-1][name] for name in ("epoch", "accuracy")] == [here[0][name] for name in ("epoch", "accuracy")]
    assert distance(weights, here[1]) < 1e-4


@pytest.mark.parametrize("way", ["static", "c10d"])
def test_selftest_names_both_hosts_and_gloo_takes_the_interface_it_is_told(way, hosts, project):
    """Each host's own name leads to 127.0.1.1, as on Debian: Gloo would meet itself there, and c10d find no host."""
    untold = Job(hosts, project, way, "selftest.py", "--timeout", 3, nproc=("2", "1"))
    job = Job(hosts, project, way, "selftest.py", nproc=("2", "1"), GLOO_SOCKET_IFNAME="eth0")
    for rank, other in ((0, 1), (1, 0)):
        hosts.write_hosts(f"of h{rank}", {f"h{rank}": "127.0.1.1", f"h{other}": ADDRESSES[f"h{other}"]})
        job.start(rank, hosts_file=f"of h{rank}")
        untold.start(rank, hosts_file=f"of h{rank}")
    untold.wait_for("FAILED: join: rank ")
    untold.end()
    told = job.finish()
    assert [result.code for result in told] == [0, 0], told
    assert any(re.search(r"^OK: all checks passed on 3 ranks on (h0, h1|h1, h0)$", r.output, re.M) for r in told), told
    for rank, result in enumerate(told):
        assert len(re.findall(rf"^rank \d on h{rank}: cpu:\d, gloo, world size 3$", result.output, re.M)) == 2 - rank


@pytest.mark.parametrize("way", WAYS)
def test_nodes_that_never_meet(way, hosts, project):
    """The other node is absent, the address or the port is wrong, a name does not resolve, a program has the port."""
    holder = "import socket, time; s = socket.create_server(('', 29876)); print('here', flush=True); time.sleep(99)"
    program = Running(hosts.on("h0", project, sys.executable, "-c", holder), project)
    wait_for("here", program)
    job = Job(hosts, project, way, START_TIMEOUT="6")
    nowhere = free_port()
    job.start(0)
    job.start(1, port=nowhere)
    job.start(1, address="10.78.0.9")
    job.start(1, address="no.such.host")
    job.start(1, port=29876)
    job.start(0, port=29876)
    me, end = job.name(1), r": is the address right, the port open \(`nc -zv "
    if way == "03":
        absent, silent = "node 1 of 2 did not reach", "did not reach 10.78.0.1:29876 within 6 s (no answer from what "
        in_use = "node 0 of 2 cannot use 10.78.0.1:29876: .* address already in use"
    else:
        silent = "did not meet the others at 10.78.0.1:29876 within 6 s: "
        absent = f"{job.name(0)} did not meet the others at"
        in_use = {"static": "node 0 of 2 could not start", "c10d": f"node h0 {silent}"}[way]
    job.check_failure(
        rf"{absent} 10\.78\.0\.1:{job.port} within 6 s{end}10\.78\.0\.1 {job.port}`\)",
        rf"{me} did not reach 10\.78\.0\.1:{nowhere} within 6 s \(Connection refused\){end}",
        rf"{me} did not reach 10\.78\.0\.9:{job.port} within 6 s \(.*\){end}",
        rf"{me} did not reach no\.such\.host:{job.port} within 6 s \(.*name.*\){end}",
        rf"{me} {re.escape(silent)}",
        in_use,
        limit=40,
    )
    program.kill_all()


def test_a_cut_link(hosts, project):
    jobs = [Job(hosts, project, way, *WITHOUT_END, START_TIMEOUT="15").start_both() for way in WAYS]
    for job in jobs:
        job.wait_for("epoch 1/")
    hosts.link("h1", "down")
    try:
        for job in jobs:
            ends = [f"({job.stopped(rank)}|{job.name(rank)} has no process any more)" for rank in (0, 1)]
            job.check_failure(*ends, limit=8 + 15 + 10)
    finally:
        hosts.link("h1", "up")


@pytest.mark.parametrize("what", ["process", "parent"])
def test_killed(what, hosts, project):
    """SIGKILL for a training process on h1, or for what has started it there: the script of 03, or torchrun."""
    jobs = [Job(hosts, project, way, *WITHOUT_END).start_both() for way in WAYS]
    for job in jobs:
        job.wait_for("epoch 1/")
    for job in jobs:
        if what == "process":
            job.nodes[1].kill("spawn_main" if job.way == "03" else "train.py", "-c" if job.way == "03" else "-u")
            job.check_failure(job.stopped(0), job.stopped(1), limit=20)
        elif job.way == "03":  # nothing is left to print the line
            job.nodes[1].kill("train.py", "--nodes=2")
            job.check_failure(job.stopped(0), "", limit=20)
        else:
            job.nodes[1].kill("bin/torchrun")
            job.check_failure(job.stopped(0), f"{job.name(1)}: torchrun was ended by SIGKILL", limit=20)


def test_a_process_killed_more_often_than_it_may_start_again(hosts, project):
    job = Job(hosts, project, "c10d", *WITHOUT_END, MAX_RESTARTS="1").start_both()
    for times in (1, 2):
        job.wait_for("epoch 1/", times)
        job.nodes[1].kill("-u", "train.py")
    job.check_failure(job.stopped(0), job.stopped(1), limit=30)


def test_a_node_comes_later_and_is_lost_again(hosts, project):
    """With NNODES=1:2 training starts anew when h1 comes, and again without it when its torchrun is killed."""
    job = Job(hosts, project, "c10d", "--epochs", 70, NNODES="1:2", MAX_RESTARTS="1", START_TIMEOUT="30")
    job.start(0)
    job.wait_for("epoch 1/")
    job.start(1)
    job.wait_for("epoch 1/", times=2)
    job.nodes[1].kill("bin/torchrun")
    stays, lost = job.finish()
    assert lost.code == 1 and lost.errors.splitlines()[-1].startswith("error: node h1: torchrun was ended by SIGKILL")
    assert stays.code == 0 and stays.epochs()[-1]["epoch"] == "70", stays
    assert len(re.findall("^epoch 1/", stays.output + lost.output, re.M)) == 3
