"""07 on a real Slurm of two nodes: whatever ends a job early, nothing is lost."""

import copy
import functools
import os
import re
import shutil
import signal
import time

import pytest
from helpers import IGNORED, ROOT, copy_project, equal, processes, run_ranks, wait_until
from hosts import ADDRESSES, Daemons

FOLDER, FSDP = ROOT / "07_slurm", "05_model_parallel/fsdp.py"
OPTIONS = "--epochs 4 --batch-size 4 --save-every 3 --device cpu".split()  # 92 steps
ARRAY = (1, 2, 3)
CONFIGURATION = """
ClusterName=test
SlurmctldHost=h0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5 # a requeued job waits as long, not 120 s
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
    """Real munge, slurmctld and slurmd; this machine's own Slurm is neither read nor changed.

    The nodes have the cores and GPUs that run.sh asks for, but only in Slurm's books.
    """
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-11]\n")
    for number in range(12):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
    cluster = Daemons(hosts, folder, tools, SLURM_CONF=str(folder / "slurm.conf"))
    cluster.start("h0", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
                  *files)
    cluster.start("h0", "slurmctld", "-D", "-i")
    for host in ADDRESSES:
        (folder / f"spool-{host}").mkdir()
        cluster.start(host, "slurmd", "-D", "-N", host)
    states = "sinfo --noheader --format=%T --partition=main"
    cluster.wait_until_up(f'[ "$({states})" = idle ]')  # one line for both nodes
    return cluster


class Job:
    """A job of two nodes, whose folder is a copy of the project."""

    def __init__(self, cluster, project, folder, slow=False, options=OPTIONS, **settings):
        """Submit it with these settings. A slow one has saved a checkpoint after that.

        Of an array, `elements` has its jobs by their number.
        """
        self.cluster, self.folder = cluster, folder
        shutil.copytree(project, folder, dirs_exist_ok=True)
        settings = {"NPROC": "1", "OMP_NUM_THREADS": "1", "folder": folder, **settings}
        if slow:
            (folder / "slow").write_text("0.3")
        self.id = cluster.run("sbatch", "07_slurm/run.sh", *options, **settings).split()[-1]
        self.checkpoint, self.output, self.elements = "checkpoint", "mnist.pt", {}
        for number in map(int, settings.get("SBATCH_ARRAY_INX", "").split(",") if
                          "SBATCH_ARRAY_INX" in settings else ()):
            self.elements[number] = element = copy.copy(self)
            element.id = f"{self.id}_{number}"
            element.checkpoint, element.output = f"run{number}", f"last{number}.pt"
        for job in self.elements.values() or [self] if slow else ():
            job.wait_for_a_save()

    def __repr__(self):
        return f"{self.record()}\n{self.log()}"

    def record(self):
        """The fields of `scontrol show job`, by name."""
        words = self.cluster.run("scontrol", "show", "job", "--oneliner", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", words))

    def log(self):
        path = self.folder / f"mnist-{self.record()['JobId']}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, condition):
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, self
            time.sleep(0.2)

    def finish(self, state="COMPLETED", code="0:0"):
        """Wait for its end, which must be this one."""
        ways = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
        self.wait(lambda: self.record()["JobState"] in ways)
        assert (self.record()["JobState"], self.record()["ExitCode"]) == (state, code), self

    def wait_for_a_save(self, resumed=0):
        """Wait until it has resumed so often, and has saved a checkpoint after that."""
        self.wait(lambda: self.log().count("\nresuming from ") == resumed)
        now = time.time()
        self.wait(lambda: any(path.stat().st_mtime > now for pattern in (".pt", "/*/.metadata")
                              for path in self.folder.glob(f"{self.checkpoint}{pattern}")))

    def check_resumes(self, weights, stops=1, log=""):
        """It ends as if nothing had disturbed it, and resumed each time where it was stopped."""
        (self.folder / "slow").unlink(missing_ok=True)
        self.finish()
        log += self.log()
        stopped = re.findall(r"^stopped (at .*); rerun the same command to resume$", log, re.M)
        resumed = re.findall(rf"^resuming from {self.checkpoint}\S+ ?(.*)$", log, re.M)
        assert len(stopped) == stops and resumed in (stopped, [""]), log  # fsdp.py names its folder
        assert equal(weights, self.folder / self.output)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with a network that has dropout, and with small data."""
    project = copy_project(tmp_path_factory.mktemp("slurm") / "project", small=("data", "model"))
    for folder in ("04_ddp_torchrun", "05_model_parallel", "07_slurm"):
        shutil.copytree(ROOT / folder, project / folder, ignore=IGNORED)
    return project


@pytest.fixture
def submit(cluster, project, tmp_path):
    return functools.partial(Job, cluster, project, tmp_path / "job")


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory):
    """The weights of two ranks that nothing disturbs, without Slurm: train.pt and fsdp.pt.

    seed1.pt to seed3.pt are of 07 with other seeds.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    runs = {"train": (0, "07_slurm/train.py"), "fsdp": (0, FSDP)}
    for name, (seed, script) in (runs | {f"seed{n}": (n, runs["train"][1]) for n in ARRAY}).items():
        files = ["--output", f"{name}.pt", "--checkpoint", f"of {name}", "--seed", seed]
        run_ranks(project / script, 2, *OPTIONS, *files, cwd=folder)
    return folder


def test_by_hand_in_an_allocation(cluster, project, tmp_path):
    """The page's commands: four ranks by torchrun, and the same four by srun."""
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    page = (FOLDER / "README.md").read_text()
    allocate, commands = re.search(r"\n(salloc .*)\n([^`]*)", page).groups()
    options = f"{' '.join(OPTIONS)} --output $((++n)).pt"
    commands = "n=0\n" + re.sub("train.py ", f"train.py {options} ", commands)
    output = cluster.run(*allocate.split(), "bash", "-euc", commands, folder=tmp_path,
                         OMP_NUM_THREADS="1")
    assert output.count("epoch 4/4 ") == 2 and equal(tmp_path / "1.pt", tmp_path / "2.pt"), output


def test_a_failing_rank_fails_the_job(submit):
    job = submit(IMAGE="5 0")
    job.wait(lambda: job.record()["JobState"] == "FAILED")
    assert "OSError: this image cannot be read" in job.log(), job
    assert job.record()["Restarts"] == "0" and "requeueing" not in job.log(), job


def test_preempted(cluster, project, undisturbed, tmp_path):
    """With a grace time run.sh requeues the job, without one Slurm does; so with fsdp.py."""
    ways = (("grace", "07_slurm/train.py"), ("grace", FSDP), ("main", FSDP))
    jobs = [Job(cluster, project, tmp_path / str(n), True, SBATCH_PARTITION=way[0], SCRIPT=way[1])
            for n, way in enumerate(ways)]
    urgent = "sbatch --wait --partition=urgent --exclusive --nodes=2 --wrap=true"
    cluster.run(*urgent.split(), folder=tmp_path)
    requeued_by_run_sh = [f"\nrequeueing job {job.id}\n" in job.log() for job in jobs]
    assert requeued_by_run_sh == [True, True, False], jobs
    for job, weights in zip(jobs, ("train.pt", "fsdp.pt", "fsdp.pt"), strict=True):
        job.check_resumes(undisturbed / weights)


@pytest.mark.parametrize(("stopped", "cancelled"), [(1, 3), (3, 2)])
def test_an_element_of_an_array_is_stopped_and_another_one_cancelled(
        stopped, cancelled, cluster, submit, undisturbed):
    """The third element has the array's own id. Each does what it would alone."""
    jobs = submit(slow=True, SBATCH_ARRAY_INX=",".join(map(str, ARRAY))).elements
    own_ids = [job.record()["JobId"] for job in jobs.values()]
    assert own_ids[2] == jobs[3].id.split("_")[0] and len({*own_ids}) == 3
    cluster.run("scancel", jobs[cancelled].id)
    cluster.run("scancel", "--signal=TERM", jobs[stopped].id)
    jobs[cancelled].wait(lambda: jobs[cancelled].record()["JobState"] == "CANCELLED")
    jobs[stopped].wait_for_a_save(resumed=1)
    for number in {*ARRAY} - {cancelled}:
        stops = int(number == stopped)
        jobs[number].check_resumes(undisturbed / f"seed{number}.pt", stops)
        assert jobs[number].record()["Restarts"] == str(stops), jobs
    assert jobs[cancelled].record()["JobState"] == "CANCELLED", jobs
    assert "\nrequeueing job " not in jobs[cancelled].log(), jobs


def test_the_controller_does_not_answer(cluster, submit):
    """A process gets the signal, the job saves and ends, and its log says what to do."""
    job = submit(slow=True)
    log = job.folder / f"mnist-{job.id}.log"  # as Slurm cannot tell it now
    cluster.run("bash", "-c", f"kill -STOP $(cat {cluster.folder}/slurmctld.pid)")
    try:
        os.kill(processes(str(job.folder), b"\0-u\0")[0], signal.SIGTERM)
        wait_until(lambda: "\nnot requeued: submit the same command again\n" in log.read_text())
    finally:
        cluster.started[1].send_signal(signal.SIGCONT)  # nsenter stops with it, and continues it
    job.finish()
    assert "\nstopped at " in job.log() and "\nrequeueing" not in job.log(), job


def test_out_of_time(cluster, submit, undisturbed):
    """Slurm looks every 30 s, and sends the signal early rather than late: after 20 to 50 s."""
    job = submit(slow=True, SBATCH_TIMELIMIT="1", SBATCH_SIGNAL="TERM@10")
    job.wait(lambda: job.record()["JobState"] == "PENDING")
    assert f"\nrequeueing job {job.id}\n" in job.log(), job
    cluster.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=10")
    job.check_resumes(undisturbed / "train.pt")


def test_stopped_then_requeued_then_without_a_node_then_cancelled(cluster, submit, undisturbed):
    """After the stop run.sh requeues it; the next two Slurm requeues.

    Cancelled, it is not requeued, and the same command resumes it.
    """
    job = submit(slow=True)
    cluster.run("scancel", "--signal=TERM", job.id)
    job.wait_for_a_save(resumed=1)
    cluster.run("scontrol", "requeue", job.id)
    job.wait_for_a_save(resumed=2)
    log, ended = cluster.folder / "daemons.log", f"slurmd-h1: debug:  JobId={job.id}: sent epilog"
    before = log.read_text().count(ended)
    cluster.run("scontrol", "update", "nodename=h1", "state=down", "reason=test")
    try:
        job.wait(lambda: job.record()["JobState"] == "PENDING")
        wait_until(lambda: log.read_text().count(ended) > before)  # or it kills the next run
    finally:
        cluster.run("scontrol", "update", "nodename=h1", "state=resume")
    job.wait_for_a_save(resumed=3)
    cluster.run("scancel", job.id)
    job.wait(lambda: job.record()["JobState"] == "CANCELLED")
    wait_until(lambda: not processes(str(job.folder)))
    assert job.log().count(f"\nrequeueing job {job.id}\n") == 1, job
    submit().check_resumes(undisturbed / "train.pt", stops=4, log=job.log())


def test_the_selftest_by_the_same_batch_script(submit):
    """Slurm's record of the job has what the script's header says, in spite of its comments."""
    job = submit(options=["--device=cpu"], SCRIPT="04_ddp_torchrun/selftest.py", NPROC="2")
    job.finish()
    assert re.search(r"^OK: all checks passed on 4 ranks on (h0, h1|h1, h0)$", job.log(), re.M), job
    header = {"JobName": "mnist", "Requeue": "1", "NumNodes": "2", "CPUs/Task": "16"}
    header |= {"TimeLimit": "01:00:00", "NtasksPerN:B:S:C": "1:0:*:*", "TresPerNode": "gres:gpu:4"}
    assert job.record().items() >= header.items(), job
