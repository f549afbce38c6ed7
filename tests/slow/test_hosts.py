"""03, 04 and 06 on two separate hosts, which have names and addresses of their own."""

import re
import subprocess
import time

import pytest
from helpers import ROOT, Running, copy_project, distance, free_port, run_ranks
from hosts import ADDRESSES, PATH, Hosts, require

TORCHRUN = ["torchrun", "--nnodes=2", "--nproc-per-node={nproc}"]
STATIC = [*TORCHRUN, "--node-rank={rank}"]
STATIC += ["--master-addr={address}", "--master-port={port}"]
C10D = [*TORCHRUN, "--rdzv-backend=c10d", "--rdzv-endpoint={address}:{port}"]
SELFTEST = "{project}/04/selftest.py"
ADMIN = {"PATH": PATH}
RULES = "'-i lo' '-m state --state ESTABLISHED' '-p tcp --dport 20000:20100'"
FIREWALL = (
    f"iptables -P INPUT DROP; for r in {RULES}; do iptables -A INPUT $r -j ACCEPT; done"
)
RUN_SH = [["bash", "{project}/03/run.sh", "-g", "2,1"], ["bash", "{project}/04/run.sh"]]


class Job:
    """Three processes, two on the first host; {rank}, {nproc}, ... are filled in."""

    def __init__(
        self, hosts, project, *command, names=(ADDRESSES,) * 2, port=0, **settings
    ):
        port, address = port or free_port(), ADDRESSES["h0"]
        self.place, self.nodes = project / f"job {port}", []
        settings |= {"NNODES": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
        settings["OMP_NUM_THREADS"] = 1
        for rank, known in enumerate(names):  # the names that each host knows
            nproc = 2 - rank
            given = {"project": project, "address": address, "port": port}
            given |= {"rank": rank, "nproc": nproc}
            filled = [part.format(**given) for part in command]
            there = hosts.on(f"h{rank}", self.place, *filled, names=known)
            settings |= {"NODE_RANK": rank, "NPROC": nproc}
            self.nodes.append(Running(there, self.place, **settings))

    def finish(self, code=0):
        """The results, with this code within two minutes, and all that is printed."""
        end = time.monotonic() + 120
        results = [node.finish(end - node.start) for node in self.nodes]
        assert {result.code for result in results} == {code}, results
        return results, "".join(result.output + result.errors for result in results)


@pytest.fixture
def job(hosts, tmp_path):
    """Starts a job of 03 or 04 with the small data."""
    for folder in ("03_ddp_multinode_spawn", "04_ddp_torchrun"):
        copy_project(tmp_path / folder[:2], folder, small="data")
    return lambda *command, **settings: Job(hosts, tmp_path, *command, **settings)


def test_three_processes_train_as_on_one_machine(job, tmp_path):
    jobs = [job(*way) for way in RUN_SH]
    here = run_ranks("04/train.py", 3, cwd=tmp_path)
    for each in jobs:
        (on_first, on_second), _ = each.finish()
        assert on_second.output == "", on_second  # only rank 0 logs
        [there], [alone] = on_first.epochs(), here.epochs()
        assert there["accuracy"] == alone["accuracy"], on_first
        assert distance(each.place / "mnist.pt", tmp_path / "mnist.pt") < 1e-10


def test_selftest(job):
    """Also where each host has its own name at 127.0.1.1, as on Debian.

    Gloo then needs an interface.
    """
    names = [{**ADDRESSES, host: "127.0.1.1"} for host in ADDRESSES]
    failing = job(*STATIC, SELFTEST, names=names)
    with_interface = job(*STATIC, SELFTEST, names=names, GLOO_SOCKET_IFNAME="eth0")
    for each in (with_interface, job(*C10D, SELFTEST)):
        printed = each.finish()[1]
        ok = "^OK: all checks passed on 3 ranks on (h0, h1|h1, h0)$"
        assert re.search(ok, printed, re.M), printed
        hosts_of_ranks = re.findall(
            r"^rank \d on (h\d): cpu, gloo, world size 3$", printed, re.M
        )
        assert sorted(hosts_of_ranks) == ["h0", "h0", "h1"], printed
    symptom = "^FAILED: join: .* connectFullMesh failed"
    assert re.search(symptom, failing.finish(code=1)[1], re.M)


def test_behind_a_firewall(tmp_path):
    """The self-test and 06 with the command of the page, without which it fails."""
    require("iptables", "sysctl")
    hosts = Hosts(tmp_path)  # of its own; it ends with this process
    for folder in ("04_ddp_torchrun", "06_checkpointing"):
        copy_project(tmp_path / folder[:2], folder, small="data")
    page = (ROOT / "tests/errors.md").read_text()
    open_ports = re.search(r"^sudo (sysctl .*=.*)$", page, re.M)[1]
    failed = (
        "FAILED: join: connect to all ranks, on free ports: .*: no answer within 20"
    )
    for setup, command, text in (
        (FIREWALL, [SELFTEST, "--timeout=20"], f"{failed} s"),
        (open_ports, [SELFTEST], "OK: all checks passed on 3 ranks"),
        ("", ["{project}/06/train.py"], "epoch 1/1  loss "),
    ):
        for host in ADDRESSES:
            subprocess.run(
                hosts.on(host, tmp_path, "bash", "-euc", setup), check=True, env=ADMIN
            )
        each = Job(hosts, tmp_path, *STATIC, *command, port=20000)
        assert re.search(text, each.finish(code=int("FAILED" in text))[1])
