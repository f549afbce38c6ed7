"""07 on a real Slurm with two nodes: a job that ends early is requeued and resumes."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from helpers import copy_repository, equal, train
from hosts import HOSTS, Daemons

TRAIN, FSDP = "07_slurm/train.py", "07_slurm/fsdp.py"
# 23 steps an epoch
OPTIONS = "--epochs 2 --batch-size 4 --save-every 3 --device cpu".split()
STOP = re.compile(
    r"^epoch (\d)/2 +(\d+%).*\nstopped: the same command resumes\n"
    r"(?s:.*?)^starting at {'epoch': (\d), 'done': (\d+)} on 2 ranks, cpu\n",
    re.M,
)
CONFIGURATION = """
ClusterName=test
SlurmctldHost=h0
# a requeued job waits as long as cred_expire, which is 120 s
AuthInfo=socket={folder}/munge.socket,cred_expire=9
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
MessageTimeout=60
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=h0,h1 CPUs=256 Gres=gpu:32 RealMemory=6000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10
"""


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    """Real daemons, separate from those of this machine; the GPUs are not real."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-31]\n")
    for number in range(32):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = [
        f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")
    ]
    tools = "munged slurmctld slurmd sbatch scontrol"
    cluster = Daemons(hosts, folder, tools, SLURM_CONF=f"{folder}/slurm.conf")
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    cluster.start("h0", *munged, *files)
    cluster.start("h0", "slurmctld", "-D", "-i")
    for host in HOSTS:
        (folder / f"spool-{host}").mkdir()
        cluster.start(host, "slurmd", "-D", "-N", host)
    states = "sinfo --noheader --format=%T --partition=main"
    cluster.wait_until_up(f'[ "$({states})" = idle ]')  # one line for both nodes
    return cluster


class Job:
    """A job on two nodes, with files in its own folder."""

    def __init__(self, cluster, folder, number, weights):
        self.cluster, self.folder, self.id = cluster, folder, number
        self.weights = weights  # of an undisturbed run

    def __repr__(self):
        return f"{self.record()}\n{self.log()}"

    def record(self):
        """The fields of `scontrol show job`, by name."""
        words = self.cluster.run("scontrol", "show", "job", "--oneliner", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", words))

    def log(self):
        """What it and the earlier jobs in this folder have printed."""
        return "".join(
            log.read_text() for log in sorted(self.folder.glob("mnist-*.log"))
        )

    def wait(self, condition):
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, self
            time.sleep(1)

    def slow(self, seconds):
        """For each image."""
        (self.folder / "slow").write_text(f"{seconds}")

    def check(self, state="COMPLETED", restarts=0):
        """It ends in this state, after so many requeues."""
        self.wait(lambda: self.record()["JobState"] == state)
        assert self.record()["Restarts"] == f"{restarts}", self

    def check_resumes(self, file="mnist-*.pt", restarts=1, stops=0):
        """It ends as if nothing had disturbed it, and no stop has lost a step."""
        self.slow(0)
        self.check(restarts=restarts)
        places = STOP.findall(self.log())
        assert len(places) == stops, self
        for epoch, percent, again, done in places:
            assert (epoch, percent) == (again, f"{int(done) / 181:.0%}"), self
        [weights] = self.folder.glob(file)
        assert equal(weights, self.weights)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with small data, and the weights of undisturbed runs."""
    folder = tmp_path_factory.mktemp("slurm")
    project = copy_repository(folder / "project", small=True)
    for script in (TRAIN, FSDP):
        options = [*OPTIONS, f"--output={project}/{Path(script).stem}.weights"]
        train(project / script, 2, *options, cwd=folder / Path(script).stem)
    return project


@pytest.fixture
def submit(cluster, project, tmp_path):
    """Submits a job in a copy of the project; a slow one has saved a checkpoint."""

    def submit(script=TRAIN, *options, name="job", slow=False, **settings):
        name = f"{name} {Path(script).stem}"
        shutil.copytree(project, tmp_path / name, dirs_exist_ok=True)
        settings = {"NPROC": "1", "OMP_NUM_THREADS": "1", "SCRIPT": script} | settings
        command = ["sbatch", "--parsable", "07_slurm/run.sh", *options]
        command += OPTIONS if script in (TRAIN, FSDP) else []
        job = Job(
            cluster, tmp_path / name, "", project / f"{Path(script).stem}.weights"
        )
        job.slow(float(slow))
        job.id = cluster.run(*command, folder=job.folder, **settings).strip()
        if slow:
            job.wait(lambda: "%  loss" in job.log())
        return job

    return submit


def test_failed(submit, tmp_path):
    """A rank fails or is killed: a job that has saved is requeued, no other one.

    One with an error that remains is requeued once.
    """
    failed, killed = submit(READ="1 75 0"), submit(FSDP, READ="1 75 9")
    early = submit(name="early", READ="1 1 9")
    (tmp_path / "remain fsdp/a run.pt").mkdir(parents=True)  # so --output is an error
    remain = submit(FSDP, name="remain", RUN="a run")
    for job in (failed, killed):
        job.check_resumes()
    assert "OSError: this image cannot be read" in failed.log()
    early.check("FAILED")
    remain.check("FAILED", restarts=1)


def test_out_of_time_and_cancelled_and_submitted_again(cluster, submit):
    """Slurm looks every 30 s, and sends the signal early: after 50 to 80 s."""
    limit = {"SBATCH_TIMELIMIT": "2", "SBATCH_SIGNAL": "TERM@40"}
    job = submit(FSDP, slow=True, RUN="a run", **limit)
    job.wait(lambda: job.log().count("starting at") == 2)
    cluster.run("scancel", job.id)
    job.check("CANCELLED", restarts=1)
    submit(FSDP, RUN="a run").check_resumes("a run.pt", restarts=0, stops=2)


def test_an_element_of_an_array_is_requeued_alone(cluster, submit):
    """The last one, which has the number of the array; each has its own files."""
    array = submit(slow=True, RUN="a run", SBATCH_ARRAY_INX="1-2")
    array.wait(lambda: len([*array.folder.glob("a run_?.ckpt")]) == 2)
    elements = [
        Job(cluster, array.folder, f"{array.id}_{number}", array.weights)
        for number in (1, 2)
    ]
    cluster.run("scancel", "--signal=TERM", elements[1].id)
    elements[1].wait(lambda: elements[1].record()["Restarts"] == "1")
    array.slow(0)
    for restarts, job in enumerate(elements):
        job.check(restarts=restarts)
        assert equal(array.folder / f"a run_{restarts + 1}.pt", array.weights)


def test_preempted(cluster, submit):
    """With a grace time run.sh requeues the job; without one, Slurm does."""
    jobs = [
        submit(FSDP, slow=True, SBATCH_PARTITION="grace"),
        submit(TRAIN, slow=True, SBATCH_PARTITION="main"),
    ]
    urgent = "sbatch --wait --partition=urgent --exclusive --nodes=2 --wrap=true"
    cluster.run(*urgent.split())
    for job in jobs:
        job.check_resumes(stops=1)
