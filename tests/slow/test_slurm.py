"""07 on a real Slurm with two nodes: a job that ends early is requeued and resumes."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from helpers import IGNORED, ROOT, copy_project, equal, order_of, train
from hosts import ADDRESSES, Daemons

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
    for host in ADDRESSES:
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
        logs = sorted(self.folder.glob("mnist-*.log"))
        return "".join(log.read_text() for log in logs)

    def wait(self, condition):
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, self
            time.sleep(1)

    def finish(self, state="COMPLETED", restarts=0):
        """Wait for this state and check how often it was requeued."""
        self.wait(lambda: self.record()["JobState"] == state)
        assert self.record()["Restarts"] == str(restarts), self

    def wait_for_a_save(self, start=1):
        """Wait until it has saved a checkpoint after this start."""
        self.wait(lambda: "%  loss" in "".join(self.log().split("starting at")[start:]))

    def check_resumes(self, name=None, restarts=1, stops=0):
        """It ends as if nothing had disturbed it, and no stop has lost a step."""
        (self.folder / "slow").unlink(missing_ok=True)
        self.finish(restarts=restarts)
        places = STOP.findall(self.log())
        assert len(places) == stops, self
        for epoch, percent, again, done in places:
            assert (epoch, percent) == (again, f"{int(done) / 181:.0%}"), self
        assert self.log().count("{'epoch': 1, 'done': 0}") == 1, self
        assert equal(self.folder / f"{name or f'mnist-{self.id}'}.pt", self.weights)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with small data and networks, one of which has dropout."""
    folder = tmp_path_factory.mktemp("slurm") / "project"
    project = copy_project(folder, small=("data", "model"))
    for folder in ("04_ddp_torchrun", "07_slurm"):
        shutil.copytree(ROOT / folder, project / folder, ignore=IGNORED)
    return project


@pytest.fixture(scope="module")
def undisturbed(project):
    """The weights of each script without Slurm."""
    weights = {}
    for script in (TRAIN, FSDP):
        place = project / f"{script} alone"
        train(project / script, 2, *OPTIONS, cwd=place)
        weights[script] = place / "mnist.pt"
    return weights


@pytest.fixture
def submit(cluster, project, undisturbed, tmp_path):
    """Submits jobs in copies of the project; a slow one has saved a checkpoint."""

    def submit(script=TRAIN, *options, name="job", slow=False, **settings):
        folder = tmp_path / f"{name} {Path(script).stem}"
        shutil.copytree(project, folder, dirs_exist_ok=True)
        settings = {"NPROC": "1", "OMP_NUM_THREADS": "1", "SCRIPT": script} | settings
        if slow:
            (folder / "slow").write_text("1")  # seconds for each image
        command = ["sbatch", "--parsable", "07_slurm/run.sh", *options]
        if script in (TRAIN, FSDP):
            command += OPTIONS
        number = cluster.run(*command, folder=folder, **settings).strip()
        job = Job(cluster, folder, number, undisturbed.get(script))
        if slow:
            job.wait_for_a_save()
        return job

    return submit


def test_by_hand_in_an_allocation(cluster, project, tmp_path):
    """The page's commands: four ranks by torchrun, and the same four by srun."""
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    page = (ROOT / "07_slurm/README.md").read_text()
    _, page = page.split("## Without sbatch")
    allocate, *commands = re.findall(r"```sh\n([^`]*)", page)
    options = f"{' '.join(OPTIONS)} --output $((++n)).pt"
    commands = "n=0\n" + "".join(commands).replace("train.py ", f"train.py {options} ")
    command = [*allocate.split(), "bash", "-euc", commands]
    cluster.run(*command, folder=tmp_path, OMP_NUM_THREADS="1")
    assert equal(tmp_path / "1.pt", tmp_path / "2.pt")


def test_failed_with_progress(submit):
    """A rank fails or is killed; the job is requeued."""
    *_, image = order_of(1, 181, 2, seed=0)[:150]
    failed = submit(IMAGE=f"{image} 0")
    killed = submit(FSDP, IMAGE=f"{image} 9")
    for job in (failed, killed):
        job.check_resumes()
    assert "OSError: this image cannot be read" in failed.log()


def test_failed_without_progress(submit, tmp_path):
    """The job is not requeued; one with an error that remains is requeued once."""
    *_, image = order_of(1, 181, 2, seed=0)[:4]
    killed = submit(IMAGE=f"{image} 9")
    wrong = submit(TRAIN, "--checkpoint", "x", name="wrong")
    (tmp_path / "remain fsdp/a run.pt").mkdir(parents=True)  # so --output is an error
    remain = submit(FSDP, name="remain", RUN="a run")
    killed.finish("FAILED")
    wrong.finish("FAILED")
    assert "set RUN=name instead of --checkpoint" in wrong.log()
    remain.finish("FAILED", restarts=1)


def test_out_of_time(cluster, submit):
    """Slurm looks every 30 s, and sends the signal early: after 50 to 80 s."""
    limit = {"SBATCH_TIMELIMIT": "2", "SBATCH_SIGNAL": "TERM@40"}
    job = submit(FSDP, slow=True, **limit)
    job.wait(lambda: job.record()["Restarts"] == "1")
    cluster.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=10")
    job.check_resumes(stops=1)


def test_an_element_of_an_array_is_requeued_alone(cluster, submit):
    """The last one, which has the number of the array; each has its own files."""
    array = submit(slow=True, RUN="a run", SBATCH_ARRAY_INX="1-2")
    array.wait(lambda: len([*array.folder.glob("a run_?.ckpt")]) == 2)
    one, last = [
        Job(cluster, array.folder, f"{array.id}_{number}", array.weights)
        for number in (1, 2)
    ]
    cluster.run("scancel", "--signal=TERM", last.id)
    last.wait(lambda: last.record()["Restarts"] == "1")
    (array.folder / "slow").unlink()
    for number, job in enumerate((one, last), start=1):
        job.finish(restarts=number - 1)
        assert equal(array.folder / f"a run_{number}.pt", array.weights)


def test_preempted(cluster, submit):
    """With a grace time run.sh requeues the job; without one, Slurm does."""
    jobs = [
        submit(script, slow=True, SBATCH_PARTITION=partition)
        for script, partition in ((FSDP, "grace"), (TRAIN, "main"))
    ]
    urgent = "sbatch --wait --partition=urgent --exclusive --nodes=2 --wrap=true"
    cluster.run(*urgent.split())
    for job in jobs:
        job.check_resumes(stops=1)


def test_stopped_then_cancelled_then_submitted_again(cluster, submit):
    """The stop takes longer than Slurm's KillWait and torchrun's own limit, 30 s."""
    job = submit(slow=True, RUN="a run")
    (job.folder / "slow").write_text("9")  # 36 s a step
    cluster.run("scancel", "--signal=TERM", job.id)
    job.wait(lambda: "stopped" in job.log())
    (job.folder / "slow").write_text("0.6")
    job.wait_for_a_save(start=2)
    cluster.run("scancel", job.id)
    job.finish("CANCELLED", restarts=1)
    submit(RUN="a run").check_resumes("a run", restarts=0, stops=2)


def test_the_selftest_by_the_same_batch_script(submit):
    """Slurm reads the header of the script correctly in spite of its comments."""
    job = submit("04_ddp_torchrun/selftest.py", NPROC="2")
    job.finish()
    ok = r"^OK: all checks passed on 4 ranks on (h0, h1|h1, h0)$"
    assert re.search(ok, job.log(), re.M), job
    header = {"JobName": "mnist", "CPUs/Task": "32", "TimeLimit": "01:00:00"}
    assert job.record().items() >= header.items(), job
