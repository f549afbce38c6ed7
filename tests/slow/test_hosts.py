"""03 and 04 on two separate hosts: they train, and failures end in time.

PyTorch's own limits are 5 minutes and more; the tests set shorter ones, where a reader would.
"""

import re
import time

import pytest
from helpers.checks import distance
from helpers.commands import Running, free_port, wait_for
from helpers.paths import ROOT
from helpers.projects import copy_project, edit
from helpers.ranks import run_ranks
from hosts import ADDRESSES

RUN_03 = ["bash", "{project}/03/run.sh", "--data-dir", "{project}/03/common", "-g", "2,1"]
RUN_04 = ["bash", "{project}/04/run.sh", "--data-dir", "{project}/04/common"]
TORCHRUN = ["torchrun", "--nnodes=2", "--nproc-per-node={nproc}"]
STATIC = [*TORCHRUN, "--node-rank={rank}", "--master-addr={address}", "--master-port={port}"]
C10D = [*TORCHRUN, "--rdzv-backend=c10d", "--rdzv-endpoint={address}:{port}"]
SELFTEST = "{project}/04/selftest.py"
BOUND = 120  # seconds


@pytest.fixture
def project(tmp_path):
    """Copies of 03 and 04 with few digits."""
    copy_project(tmp_path / "03", ROOT / "03_ddp_multinode_spawn/train.py", "run.sh")
    copy_project(tmp_path / "04", ROOT / "04_ddp_torchrun/train.py", "run.sh", "selftest.py")
    return tmp_path


@pytest.fixture
def impatient(project):
    """In which a rank waits 40 s for another, and a node of 03 waits 20 s for another."""
    for name in ("03", "04"):
        edit(project / name, "train.py",
             ("import argparse\n", "import argparse\nfrom datetime import timedelta\n"),
             ('init_process_group("nccl"',
              'init_process_group(timeout=timedelta(0, 40), backend="nccl"'))
    store = "args.master_port, args.nodes, is_master"
    edit(project / "03", "train.py", (store, f"{store}, timedelta(0, 20)"))
    return project


class Job:
    """A job on both hosts, by a command in which {rank}, {nproc}, ... are filled in."""

    def __init__(self, hosts, project, *command, **settings):
        self.hosts, self.project, self.command, self.port = hosts, project, command, free_port()
        self.settings = {"NNODES": "2", "OMP_NUM_THREADS": "1", **settings}
        self.place, self.nodes = project / f"job {self.port}", []
        self.place.mkdir()

    def start(self, rank, nproc=1, address=ADDRESSES["h0"], names=ADDRESSES):
        """Start one node, which connects to this address and knows these names of hosts."""
        given = {"project": self.project, "rank": rank, "nproc": nproc, "address": address,
                 "port": self.port, "own": ADDRESSES[f"h{rank}"]}
        command = [str(part).format(**given) for part in self.command]
        command = self.hosts.on(f"h{rank}", self.place, *command, names=names)
        settings = self.settings | {"NODE_RANK": str(rank), "NPROC": str(nproc),
                                    "MASTER_ADDR": address, "MASTER_PORT": str(self.port)}
        self.nodes.append(Running(command, self.place, **settings))

    def start_three_processes(self, names=(ADDRESSES, ADDRESSES)):
        """Start both nodes, with two processes and one."""
        for rank in (0, 1):
            self.start(rank, 2 - rank, names=names[rank])
        return self

    def finish(self, code=0):
        """The results of the nodes, which must end with this code within the bound from now on."""
        end = time.monotonic() + BOUND
        results = [node.finish(end - node.start) for node in self.nodes]
        assert {result.code for result in results} == {code}, results
        return results


def test_three_processes_train_as_on_one_machine(hosts, project, tmp_path):
    jobs = [Job(hosts, project, *way, "--epochs", 1).start_three_processes()
            for way in (RUN_03, RUN_04)]
    options = ["--data-dir", project / "04/common", "--epochs", 1]
    here = run_ranks(project / "04/train.py", 3, *options, cwd=tmp_path)
    for job in jobs:
        results = job.finish()
        assert results[1].output == "", results  # only rank 0 logs
        assert results[0].epochs()[0]["accuracy"] == here.epochs()[0]["accuracy"], results
        assert distance(job.place / "mnist.pt", tmp_path / "mnist.pt") < 1e-4


def check_selftest(job):
    results = job.finish()
    output = "".join(result.output for result in results)
    ok = "^OK: all checks passed on 3 ranks on (h0, h1|h1, h0)$"
    assert re.search(ok, output, re.M), results
    hosts_of_ranks = re.findall(r"^rank \d on (h\d): cpu, gloo, world size 3$", output, re.M)
    assert sorted(hosts_of_ranks) == ["h0", "h0", "h1"], results


def test_selftest(hosts, project):
    """Also where each host has its own name at 127.0.1.1, as on Debian: Gloo needs an interface."""
    names = [{**ADDRESSES, host: "127.0.1.1"} for host in ADDRESSES]
    failing = Job(hosts, project, *STATIC, SELFTEST).start_three_processes(names)
    with_interface = Job(hosts, project, *STATIC, SELFTEST, GLOO_SOCKET_IFNAME="eth0")
    check_selftest(with_interface.start_three_processes(names))
    check_selftest(Job(hosts, project, *C10D, SELFTEST).start_three_processes())
    results = failing.finish(code=1)
    output = "".join(result.output for result in results)
    assert re.search("^FAILED: join: rank .*connectFullMesh failed", output, re.M), results


def test_c10d_where_each_host_knows_only_its_own_name(hosts, project):
    """The node of rank 0 tells the others its name, or with --local-addr an address."""
    names = [{host: address} for host, address in ADDRESSES.items()]
    failing = Job(hosts, project, *C10D, SELFTEST, "--timeout", 20).start_three_processes(names)
    working = Job(hosts, project, *C10D, "--local-addr={own}", SELFTEST)
    check_selftest(working.start_three_processes(names))
    results = failing.finish(code=1)
    assert "FAILED: join: " in results[0].output, results
    symptom = r"network addresses of \(h0, \d+\) cannot be retrieved"
    assert re.search(symptom, results[1].errors), results


def test_nodes_that_cannot_connect(hosts, impatient):
    """Each is alone, and ends with an error; a reader of 04 sets the limit by --rdzv-conf."""
    static = [*STATIC, "--rdzv-conf=timeout=20", "{project}/04/train.py"]
    jobs = []
    for way in (RUN_03, static):
        for rank, address in ((0, "h0"), (1, "h0"), (1, "no.such.host")):
            jobs.append(Job(hosts, impatient, *way))
            jobs[-1].start(rank, address=ADDRESSES.get(address, address))
    for job in jobs:
        (result,) = job.finish(code=1)
        assert re.search(r"^torch\.distributed\.Dist\w+Error: ", result.errors, re.M), result


def test_a_cut_link(hosts, impatient):
    jobs = [Job(hosts, impatient, *way, "--epochs", 10**6).start_three_processes()
            for way in (RUN_03, RUN_04)]
    for job in jobs:
        wait_for("epoch 1/", *job.nodes)
    hosts.link("h1", "down")
    try:
        for result in [result for job in jobs for result in job.finish(code=1)]:
            assert re.search("Error|Exception", result.errors), result
    finally:
        hosts.link("h1", "up")
        for node in [node for job in jobs for node in job.nodes]:
            node.kill_all()
