"""07 on a real Slurm of two nodes: what ends early is requeued and resumes."""

import os
import re
import shutil
import time

import pytest
from helpers import (
    IGNORED,
    ROOT,
    copy_project,
    equal,
    order_of,
    processes,
    run_ranks,
    wait_until,
)
from hosts import ADDRESSES, Daemons
from places import stopped_and_resumed

TRAIN, FSDP = "07_slurm/train.py", "05_model_parallel/fsdp.py"
OPTIONS = "--epochs 4 --batch-size 4 --save-every 3 --device cpu".split()  # 92 steps
CONFIGURATION = """
ClusterName=test
SlurmctldHost=h0
# a requeued job waits as long as cred_expire, which is 120 s
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=h0,h1 CPUs=48 Gres=gpu:12 RealMemory=6000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10
"""


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    """Real daemons, apart from this machine's own; only Slurm believes in the GPUs."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-11]\n")
    for number in range(12):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = [
        f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")
    ]
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
    cluster = Daemons(hosts, folder, tools, SLURM_CONF=str(folder / "slurm.conf"))
    cluster.start(
        "h0",
        "munged",
        "--foreground",
        "--force",
        f"--socket={folder}/munge.socket",
        *files,
    )
    cluster.start("h0", "slurmctld", "-D", "-i")
    for host in ADDRESSES:
        (folder / f"spool-{host}").mkdir()
        cluster.start(host, "slurmd", "-D", "-N", host)
    states = "sinfo --noheader --format=%T --partition=main"
    cluster.wait_until_up(f'[ "$({states})" = idle ]')  # one line for both nodes
    return cluster


class Job:
    """A job of two nodes, or an element of an array, and the name of its files."""

    def __init__(self, cluster, folder, number, run="run"):
        self.cluster, self.folder, self.id, self.run = cluster, folder, number, run

    def __repr__(self):
        return f"{self.record()}\n{self.log()}"

    def record(self):
        """The fields of `scontrol show job`, by name."""
        words = self.cluster.run("scontrol", "show", "job", "--oneliner", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", words))

    def log(self):
        """What it has printed. The log of an element of an array has another number."""
        logs = [path.read_text() for path in self.folder.glob("mnist-*.log")]
        return next((log for log in logs if log.startswith(f"job {self.id}: ")), "")

    def wait(self, condition):
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, self
            time.sleep(0.2)

    def finish(self, state="COMPLETED", restarts=0):
        """Wait for this state and check how often it was restarted."""
        self.wait(lambda: self.record()["JobState"] == state)
        assert int(self.record()["Restarts"]) == restarts, self

    def wait_for_a_save(self, resumed=0):
        """Wait until it has resumed so often, and has saved a checkpoint after that."""
        self.wait(lambda: self.log().count("\nresuming from ") == resumed)
        lines = self.log().count("%  loss")
        self.wait(lambda: self.log().count("%  loss") > lines)

    def check_resumes(self, undisturbed, restarts=1, stops=0, log=""):
        """It ends as if nothing had disturbed it.

        If it was stopped so often, it has resumed each time where it was stopped.
        """
        (self.folder / "slow").unlink(missing_ok=True)
        self.finish(restarts=restarts)
        log += self.log()
        stopped, resumed = stopped_and_resumed(log)
        assert len(stopped) == stops and len(resumed) == (stops or restarts), log
        assert not stops or stopped == resumed, log
        assert log.count(f"\nresuming from {self.run}.pt") == len(resumed), log
        for name in ("last", "best"):
            file = undisturbed.with_name(f"{undisturbed.name}-{name}.pt")
            assert equal(file, self.folder / f"{self.run}-{name}.pt")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with a network that has dropout, small data, and own_slurm.py."""
    project = copy_project(
        tmp_path_factory.mktemp("slurm") / "project", small=("data", "model")
    )
    for folder in ("04_ddp_torchrun", "05_model_parallel", "07_slurm"):
        shutil.copytree(ROOT / folder, project / folder, ignore=IGNORED)
    shutil.copy(ROOT / "tests/small/own_slurm.py", project)
    return project


@pytest.fixture
def submit(cluster, project, tmp_path):
    """Submits a job in a copy of the project.

    It returns when a slow job, if it is no array, has saved a checkpoint.
    """

    def submit(name="job", slow=False, options=OPTIONS, **settings):
        folder = shutil.copytree(
            project, tmp_path / name, dirs_exist_ok=True, symlinks=True
        )
        settings = {"NPROC": "1", "OMP_NUM_THREADS": "1", "folder": folder, **settings}
        if slow:
            (folder / "slow").write_text("0.3")
        printed = cluster.run("sbatch", "07_slurm/run.sh", *options, **settings)
        job = Job(cluster, folder, printed.split()[-1])
        if slow and "SBATCH_ARRAY_INX" not in settings:
            job.wait_for_a_save()
        return job

    return submit


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory):
    """Weights without Slurm: of fsdp.py, and of 07 with two rates; 0.6 is its default.

    Such as 0.6-last.pt and 0.6-best.pt.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    ways = {"0.2": (TRAIN, "--lr", 0.2), "0.6": (TRAIN,), "fsdp": (FSDP,)}
    for name, (script, *options) in ways.items():
        files = ["--output", f"{name}-last.pt", "--best", f"{name}-best.pt"]
        files += ["--checkpoint", f"{name}.pt"]
        run_ranks(project / script, 2, *OPTIONS, *options, *files, cwd=folder)
    return folder


def test_by_hand_in_an_allocation(cluster, project, tmp_path):
    """The page's commands: four ranks by torchrun, and the same four by srun."""
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    page = (ROOT / "07_slurm/README.md").read_text()
    allocate, commands = re.search(r"\n(salloc .*)\n([^`]*)", page).groups()
    options = f"{' '.join(OPTIONS)} --output $((++n)).pt"
    commands = "n=0\n" + re.sub("train.py ", f"train.py {options} ", commands)
    output = cluster.run(
        *allocate.split(),
        "bash",
        "-euc",
        commands,
        folder=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert output.count("epoch 4/4  loss") == 2
    assert equal(tmp_path / "1.pt", tmp_path / "2.pt")


def test_a_rank_fails_or_is_killed(submit, undisturbed):
    """After the first checkpoint the job is requeued, before it it has failed."""
    early, *_, late = order_of(1, 181, 2, seed=0)[3:150]
    ways = ((f"{early} 9", TRAIN), (f"{late} 0", TRAIN), (f"{late} 9", FSDP))
    early, *late = [submit(image, IMAGE=image, SCRIPT=script) for image, script in ways]
    early.finish("FAILED")
    for job, weights in zip(late, ("0.6", "fsdp"), strict=True):
        job.check_resumes(undisturbed / weights)
    assert "OSError: this image cannot be read" in late[0].log()


def test_what_is_requeued_because_there_is_less_left_to_do(submit):
    """Not what has saved nothing, nor what is finished, whatever it prints."""
    changes = ["half_a_file", "early_stopping", "error_after_an_epoch"]
    half, early, late = [
        submit(change, SCRIPT="own_slurm.py", CHANGE=change) for change in changes
    ]
    wrong = [
        submit(option[0], options=option)
        for option in (["--epoch=x"], ["--checkpoint", "a"])
    ]
    early.finish()
    for job in (half, *wrong):
        job.finish("FAILED")
    late.finish("FAILED", restarts=1)
    assert late.log().count("%  loss") == 8  # of one epoch


def test_two_nodes_wait_for_a_save_of_55_seconds(
    cluster, submit, undisturbed, tmp_path
):
    """Slurm's KillWait is 30 s. The checkpoint's path is a symlink, and stays one."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/run.pt").symlink_to("elsewhere")
    job = submit(slow=True, SCRIPT="own_slurm.py", CHANGE="slow_saves")
    (job.folder / "slow saves").touch()
    cluster.run("scancel", "--signal=TERM", job.id)
    job.wait(lambda: job.record()["JobState"] == "PENDING")
    (job.folder / "slow saves").unlink()
    job.check_resumes(undisturbed / "0.6", stops=1)
    assert (job.folder / "run.pt").is_symlink()


def test_preempted(cluster, submit, undisturbed):
    """With a grace time run.sh requeues the job, without one Slurm does."""
    ways = (("grace", TRAIN), ("grace", FSDP), ("main", FSDP))
    jobs = [
        submit(str(n), True, SBATCH_PARTITION=partition, SCRIPT=script)
        for n, (partition, script) in enumerate(ways)
    ]
    urgent = "sbatch --wait --partition=urgent --exclusive --nodes=2 --wrap=true"
    cluster.run(*urgent.split())
    requeued_by_run_sh = [f"\nrequeueing job {job.id}\n" in job.log() for job in jobs]
    assert requeued_by_run_sh == [True, True, False], jobs
    for job, weights in zip(jobs, ("0.6", "fsdp", "fsdp"), strict=True):
        job.check_resumes(undisturbed / weights, stops=1)


def test_an_element_of_an_array_is_stopped_and_another_one_cancelled(
    cluster, submit, undisturbed
):
    """The third element has the array's own id. Each does what it would alone."""
    array = submit(slow=True, SBATCH_ARRAY_INX="1-3")
    jobs = [Job(cluster, array.folder, f"{array.id}_{n}", f"run{n}") for n in (1, 2, 3)]
    for job in jobs:
        job.wait_for_a_save()
    alone, cancelled, stopped = jobs
    assert stopped.record()["JobId"] == array.id
    cluster.run("scancel", cancelled.id)
    cluster.run("scancel", "--signal=TERM", stopped.id)
    stopped.wait_for_a_save(resumed=1)
    alone.check_resumes(undisturbed / "0.2", restarts=0)
    stopped.check_resumes(undisturbed / "0.6", stops=1)
    cancelled.finish("CANCELLED")
    assert "\nrequeueing job " not in cancelled.log(), jobs


def test_out_of_time(cluster, submit, undisturbed):
    """Slurm looks every 30 s, and sends the signal early: after 20 to 50 s."""
    limit = {"SBATCH_TIMELIMIT": "1", "SBATCH_SIGNAL": "TERM@10"}
    ways = {"0.6": TRAIN, "fsdp": FSDP}
    jobs = {name: submit(name, True, SCRIPT=ways[name], **limit) for name in ways}
    for job in jobs.values():
        job.wait(lambda job=job: f"\nrequeueing job {job.id}\n" in job.log())
        cluster.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=10")
    for name, job in jobs.items():
        job.check_resumes(undisturbed / name, stops=1)


def test_stopped_then_requeued_then_without_a_node_then_cancelled(
    cluster, submit, undisturbed
):
    """By run.sh, then twice by Slurm. After scancel the same command resumes it."""
    job = submit(slow=True)
    cluster.run("scancel", "--signal=TERM", job.id)
    job.wait_for_a_save(resumed=1)
    cluster.run("scontrol", "requeue", job.id)
    job.wait_for_a_save(resumed=2)
    log = cluster.folder / "daemons.log"
    ended = f"slurmd-h1: debug:  JobId={job.id}: sent epilog"
    before = log.read_text().count(ended)
    cluster.run("scontrol", "update", "nodename=h1", "state=down", "reason=test")
    try:
        job.wait(lambda: job.record()["JobState"] == "PENDING")
        # or it kills the next run
        wait_until(lambda: log.read_text().count(ended) > before)
    finally:
        cluster.run("scontrol", "update", "nodename=h1", "state=resume")
    job.wait_for_a_save(resumed=3)
    cluster.run("scancel", job.id)
    job.wait(lambda: job.record()["JobState"] == "CANCELLED")
    wait_until(lambda: not processes(str(job.folder)))
    assert job.log().count(f"\nrequeueing job {job.id}\n") == 1, job
    submit().check_resumes(undisturbed / "0.6", restarts=0, stops=4, log=job.log())


def test_the_selftest_by_the_same_batch_script(submit):
    """Slurm's record has what the script's header says, in spite of its comments."""
    job = submit(
        options=["--device=cpu"],
        SCRIPT="04_ddp_torchrun/selftest.py",
        NPROC="2",
        RUN="",
    )
    job.finish()
    ok = r"^OK: all checks passed on 4 ranks on (h0, h1|h1, h0)$"
    assert re.search(ok, job.log(), re.M), job
    header = {"JobName": "mnist", "Requeue": "1", "NumNodes": "2", "CPUs/Task": "16"}
    header |= {
        "TimeLimit": "01:00:00",
        "NtasksPerN:B:S:C": "1:0:*:*",
        "TresPerNode": "gres:gpu:4",
    }
    assert job.record().items() >= header.items(), job
