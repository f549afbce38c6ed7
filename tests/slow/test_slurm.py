"""07 on a real Slurm of two nodes: whatever ends a job early, nothing is lost."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from helpers.checks import equal
from helpers.commands import WITNESS, processes, wait_until
from helpers.paths import ROOT
from helpers.projects import IGNORED, edit, fewer_digits, with_dropout
from helpers.ranks import run_ranks
from hosts import ADDRESSES, Daemons

FOLDER = ROOT / "07_slurm"
OPTIONS = "--data-dir common --epochs 2 --batch-size 16 --save-every 3".split()  # 80 steps
CONFIGURATION = """
ClusterName=test
SlurmctldHost=h0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5 # a requeued job waits as long, not 120 s
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=h0,h1 CPUs=4 RealMemory=6000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10
"""


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    """Real munge, slurmctld and slurmd; this machine's own Slurm is neither read nor changed."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
    try:
        cluster = Daemons(hosts, folder, tools, SLURM_CONF=str(folder / "slurm.conf"))
        cluster.start("h0", *munged)
        cluster.start("h0", "slurmctld", "-D", "-i")
        for host in ADDRESSES:
            (folder / f"spool-{host}").mkdir()
            cluster.start(host, "slurmd", "-D", "-N", host)
        states = "sinfo --noheader --format=%T --partition=main"
        cluster.wait_until_up(f'[ "$({states})" = idle ]')  # one line for both nodes
    except OSError as error:
        pytest.skip(f"no Slurm on this machine: {error}")
    return cluster


class Job:
    def __init__(self, cluster, folder, *arguments, **settings):
        """Submit a job from a folder, with these settings in the environment."""
        self.cluster, self.folder = cluster, folder
        self.id = cluster.run("sbatch", *arguments, folder=folder, **settings).split()[-1]

    def __repr__(self):
        return f"{self.record()}\n{self.log()}"

    def record(self):
        """The fields of `scontrol show job`, by name."""
        words = self.cluster.run("scontrol", "show", "job", "--oneliner", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", words))

    def log(self):
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.id}.log"))

    def wait(self, condition):
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, self
            time.sleep(0.2)

    def wait_for_state(self, *states):
        self.wait(lambda: self.record()["JobState"] in states)

    def finish(self, state="COMPLETED"):
        """Wait for its end, which must be this one."""
        self.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
        record = self.record()
        assert record["JobState"] == state and (state != "COMPLETED" or record["ExitCode"] == "0:0")

    def wait_for_a_save(self, resumed=0):
        """Wait until it has resumed so often, and has saved a checkpoint after that."""
        self.wait(lambda: self.log().count("\nresuming from ") == resumed)
        now = time.time()
        self.wait(lambda: any(path.stat().st_mtime > now
                              for path in self.folder.glob("checkpoint*")))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with dropout and few digits, which trains slowly where there is a file "slow".

    Its batch script is edited as its user does, for nodes with two cores and no GPU.
    """
    project = tmp_path_factory.mktemp("slurm") / "a project"
    for folder in ("04_ddp_torchrun", "05_model_parallel", "07_slurm", "common"):
        shutil.copytree(ROOT / folder, project / folder, ignore=IGNORED)
    fewer_digits(project)
    with_dropout(project)
    line = "            nn.utils.clip_grad_norm_("
    sleep = "            time.sleep(1.2 if os.path.exists('slow') else 0)\n"
    for script in ("07_slurm/train.py", "05_model_parallel/fsdp.py"):
        edit(project, script, (line, f"{sleep}{line}"))
    (gpus,) = re.findall("#SBATCH --gpus-per-node.*\n", (FOLDER / "run.sh").read_text())
    changes = [(gpus, ""), ("--cpus-per-task=16", "--cpus-per-task=2"), ("NPROC:-gpu", "NPROC:-1")]
    edit(project, "07_slurm/run.sh", *changes)
    return project


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory):
    """The weights of two ranks that nothing disturbs, without Slurm, under the script's name."""
    folder = shutil.copytree(project, tmp_path_factory.mktemp("undisturbed") / "project")
    for script in ("07_slurm/train.py", "05_model_parallel/fsdp.py"):
        name = Path(script).name
        output = ["--output", name, "--checkpoint", f"of {name}"]
        run_ranks(script, 2, *OPTIONS, *output, cwd=folder)
    return folder


def submit(cluster, project, folder, *options, **settings):
    """Submit a job of two nodes from a folder, which becomes a copy of the project."""
    shutil.copytree(project, folder, dirs_exist_ok=True)
    return Job(cluster, folder, "07_slurm/run.sh", *options, OMP_NUM_THREADS="1", **settings)


def test_by_hand_in_an_allocation(cluster, project, tmp_path):
    """The commands of the script's docstring: four ranks by torchrun, and the same four by srun."""
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    docstring = (FOLDER / "train.py").read_text().split('"""')[1]
    allocate = re.search(r"\((salloc .*)\)", docstring)[1].split()
    commands = docstring.split("process:\n")[1]
    for name in ("torchrun", "srun"):
        options = " ".join([*OPTIONS, "--output", f"{name}.pt", "--checkpoint", f"{name}-run.pt"])
        commands = commands.replace("train.py\n", f"train.py {options}\n", 1)
    settings = {"OMP_NUM_THREADS": "1", "WITNESS": str(tmp_path / "witness"), **WITNESS}
    output = cluster.run(*allocate, "bash", "-euc", commands, folder=tmp_path, **settings)
    epochs = re.findall(r"^epoch \d/2  loss [\d.]+  accuracy [\d.]+ ", output, re.M)
    assert len(epochs) == 4 and epochs[:2] == epochs[2:], output
    assert equal(tmp_path / "torchrun.pt", tmp_path / "srun.pt")
    witness = [line.split()[:2] for line in (tmp_path / "witness").read_text().splitlines()]
    assert {tuple(ranks) for ranks in witness} == {(rank, "4") for rank in "0123"}


def test_a_failing_rank_fails_the_job(cluster, project, tmp_path):
    faulty = {**WITNESS, "WITNESS": str(tmp_path / "witness"), "FAULTY_RANK": "1"}
    job = submit(cluster, project, tmp_path, *OPTIONS, **faulty)
    job.finish("FAILED")
    assert "RuntimeError: planted by the test" in job.log(), job
    assert job.record()["Restarts"] == "0" and "requeueing" not in job.log(), job


def test_the_selftest_by_the_same_batch_script(cluster, project, tmp_path):
    """Slurm's record of the job has what the script's header says, in spite of its comments."""
    job = submit(cluster, project, tmp_path, SCRIPT="04_ddp_torchrun/selftest.py", NPROC="2")
    job.finish()
    assert re.search(r"^OK: all checks passed on 4 ranks on (h0, h1|h1, h0)$", job.log(), re.M), job
    header = {"JobName": "mnist", "Requeue": "1", "NumNodes": "2", "CPUs/Task": "2"}
    header |= {"TimeLimit": "01:00:00", "NtasksPerN:B:S:C": "1:0:*:*"}
    header |= {"StdOut": str(tmp_path / f"mnist-{job.id}.log")}
    assert job.record().items() >= header.items(), job


def start(cluster, project, folder, **settings):
    """Submit a job that trains slowly, and return when it has saved a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "slow").touch()
    job = submit(cluster, project, folder, *OPTIONS, **settings)
    job.wait_for_a_save()
    return job


def check_resumes(job, undisturbed, script="train.py", stops=1, log=""):
    """It ends as if nothing had disturbed it, and resumed each time where it was stopped."""
    (job.folder / "slow").unlink()
    job.finish()
    log += job.log()
    progress = r"at {'epoch': .*}"
    stopped = re.findall(f"^stopped ({progress}); rerun the same command to resume$", log, re.M)
    resumed = re.findall(rf"^resuming from checkpoint\S+ ({progress})$", log, re.M)
    assert len(stopped) == stops and resumed == stopped, log
    assert equal(undisturbed / script, job.folder / "mnist.pt")


def preempt(cluster, folder):
    urgent = ["--partition=urgent", "--exclusive", "--nodes=2", "--wrap=true"]
    Job(cluster, folder, *urgent).finish()


def test_preempted(cluster, project, undisturbed, tmp_path):
    """With a grace time rank 0 requeues the job, without one Slurm does."""
    jobs = [start(cluster, project, tmp_path / partition, SBATCH_PARTITION=partition)
            for partition in ("grace", "main")]
    preempt(cluster, tmp_path)
    requeued_by_rank_0 = [f"\nrequeueing job {job.id}\n" in job.log() for job in jobs]
    assert requeued_by_rank_0 == [True, False], jobs
    for job in jobs:
        check_resumes(job, undisturbed)


def test_fsdp_is_preempted(cluster, project, undisturbed, tmp_path):
    """Slurm requeues it, and it resumes from sharded checkpoints on two hosts."""
    job = start(cluster, project, tmp_path, SCRIPT="05_model_parallel/fsdp.py")
    preempt(cluster, tmp_path)
    check_resumes(job, undisturbed, "fsdp.py")


def test_the_commands_that_show_what_a_cluster_allows(cluster):
    commands = re.findall(r"^(?:sinfo|scontrol show) .*", (FOLDER / "README.md").read_text(), re.M)
    shown = "".join(cluster.run("bash", "-c", command) for command in commands)
    fields = r"(?ms)^main\* infinite 2 4 6000 .*GraceTime=60.*KillWait.*PreemptMode"
    assert re.search(fields, shown), shown


def test_out_of_time(cluster, project, undisturbed, tmp_path):
    """Slurm looks every 30 s, and sends the signal early rather than late: after 20 to 50 s."""
    job = start(cluster, project, tmp_path, SBATCH_TIMELIMIT="1", SBATCH_SIGNAL="TERM@10")
    job.wait_for_state("PENDING")
    assert f"\nrequeueing job {job.id}\n" in job.log(), job
    cluster.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=10")
    check_resumes(job, undisturbed)


def test_requeued_by_its_user_then_without_a_node_then_cancelled(
    cluster, project, undisturbed, tmp_path
):
    """After a stop as README rehearses it, which rank 0 requeues; the next two Slurm requeues.

    Cancelled, it is not requeued, and the same command resumes it.
    """
    (stop,) = re.findall("^(scancel --signal.*) JOB$", (FOLDER / "README.md").read_text(), re.M)
    job = start(cluster, project, tmp_path)
    cluster.run(*stop.split(), job.id)
    job.wait_for_a_save(resumed=1)
    cluster.run("scontrol", "requeue", job.id)
    job.wait_for_a_save(resumed=2)
    cluster.run("scontrol", "update", "nodename=h1", "state=down", "reason=test")
    try:
        job.wait_for_state("PENDING")
        wait_until(lambda: not processes(str(tmp_path)))  # of the run before, on both nodes
    finally:
        cluster.run("scontrol", "update", "nodename=h1", "state=resume")
    job.wait_for_a_save(resumed=3)
    cluster.run("scancel", job.id)
    job.wait_for_state("CANCELLED")
    wait_until(lambda: not processes(str(tmp_path)))
    assert job.log().count(f"\nrequeueing job {job.id}\n") == 1, job
    again = submit(cluster, project, tmp_path, *OPTIONS)
    check_resumes(again, undisturbed, stops=4, log=job.log())
