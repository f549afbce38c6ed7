"""07: on a real Slurm, whatever ends a job before its time loses nothing; and what run.sh decides, on any machine."""

import os
import re
import signal
import sys

import pytest
import torch
from cluster import Cluster, Job
from helpers import ROOT, WITNESS, copy_project, edit, equal, fewer_digits, load_script, run, with_dropout
from test_shell import bare_tools, fake_tools

FOLDER = ROOT / "07_slurm"
RUN = FOLDER / "run.sh"
OPTIONS = ["--epochs", 4, "--batch-size", 16, "--save-every", 3]  # 160 steps of two ranks, or 80 of four


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    """A real Slurm on two hosts; where that cannot be, what needs it is skipped."""
    try:
        return Cluster(hosts, tmp_path_factory.mktemp("slurm"))
    except OSError as error:
        pytest.skip(f"no Slurm on this machine: {error}")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy that trains on few digits, with random numbers in every step, and slowly if there is a file "slow"."""
    project = tmp_path_factory.mktemp("slurm") / "a project"
    copy_project(project, FOLDER / "train.py", "checkpoint.py", "slurm.py", "run.sh")
    fewer_digits(project)
    with_dropout(project)
    line, sleep = "indices = torch.frombuffer", "import time; time.sleep(0.5 if os.path.exists('slow') else 0)"
    edit(project, "common/data.py", (line, f"{sleep}\n        {line}"))
    return project


def submit(cluster, project, folder, *options, nproc=1, submit="sbatch", **settings):
    """Submit a job of so many processes on each of the two nodes."""
    folder.mkdir(exist_ok=True)
    command = [submit, project / "run.sh", "--data-dir", project / "common", *OPTIONS, *options]
    settings = {"NPROC": str(nproc), "OMP_NUM_THREADS": "1", **settings}
    return Job(cluster, folder, *command, **settings)


@pytest.fixture(scope="module")
def undisturbed(cluster, project, tmp_path_factory):
    """For each number of processes on a node, a finished job by torchrun and the file with its weights."""
    jobs = {}
    for nproc in (1, 2):
        folder = tmp_path_factory.mktemp("undisturbed")
        witness = {**WITNESS, "WITNESS": str(folder / "witness")}
        job = submit(cluster, project, folder, nproc=nproc, **witness)
        assert job.finish() == ("COMPLETED", 0), job
        jobs[nproc] = job, folder / "mnist.pt"
    return jobs


def epochs(job):
    """The epoch lines of a job without their times."""
    return re.findall(r"^epoch \d+/\d+  loss [\d.]+  accuracy [\d.]+ ", job.log(), re.M)


@pytest.mark.parametrize("nproc", [1, 2])
def test_both_launchers_train_the_same(nproc, cluster, project, undisturbed, tmp_path):
    by_torchrun, weights = undisturbed[nproc]
    witness = {**WITNESS, "WITNESS": str(tmp_path / "witness")}
    by_srun = submit(cluster, project, tmp_path, nproc=nproc, submit="bash", LAUNCHER="srun", **witness)
    assert by_srun.finish() == ("COMPLETED", 0), by_srun
    for job in (by_torchrun, by_srun):
        witnessed = [line.split()[:2] for line in (job.folder / "witness").read_text().splitlines()]
        ranks = [[str(rank), str(2 * nproc)] for rank in range(2 * nproc)]
        assert sorted(witnessed) == sorted(ranks * 4), job
        line = f"job {job.id}, SLURM_RESTART_COUNT=0: NPROC={nproc} on each of h[0-1], which meet at h0:"
        assert job.log().startswith(f"{line}{10000 + int(job.id)}\n"), job
    assert epochs(by_srun) == epochs(by_torchrun) and len(epochs(by_srun)) == 4
    assert equal(weights, tmp_path / "mnist.pt")


def test_plain_srun_by_hand(cluster, project, undisturbed, tmp_path):
    """As in the script's docstring, without run.sh and what it sets."""
    options = ["--data-dir", project / "common", *OPTIONS]
    tasks = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    command = map(str, ["srun", *tasks, "python", project / "train.py", *options])
    output = cluster.ask(*command, folder=tmp_path, OMP_NUM_THREADS="1")
    assert re.findall(r"^epoch (\d)/4 ", output, re.M) == ["1", "2", "3", "4"], output
    assert equal(undisturbed[1][1], tmp_path / "mnist.pt")


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_failing_rank_fails_the_job_and_is_not_queued_again(launcher, cluster, project, undisturbed, tmp_path):
    """Even if the checkpoint is that of a stop: it is not of this start."""
    state = torch.load(undisturbed[1][0].folder / "checkpoint.pt", weights_only=True)
    state |= {"stopped": True, "place": state["place"] | {"epoch": 2}}
    torch.save(state, tmp_path / "checkpoint.pt")
    faulty = {**WITNESS, "WITNESS": str(tmp_path / "witness"), "FAULTY_RANK": "1"}
    job = submit(cluster, project, tmp_path, LAUNCHER=launcher, **faulty)
    assert job.finish() == ("FAILED", 1), job
    assert job.log().count("RuntimeError: planted by the test") == 1, job
    assert job.record()["Restarts"] == "0" and "queued again" not in job.log(), job


def start(cluster, project, folder, *options, **settings):
    """Submit a job that trains slowly, and return when it has saved."""
    folder.mkdir(exist_ok=True)
    (folder / "slow").touch()
    job = submit(cluster, project, folder, *options, **settings)
    job.wait(lambda _: (folder / "checkpoint.pt.previous").exists())
    return job


def check_goes_on(job, weights):
    """Queued again, a job goes on where it was stopped, and ends as if it had not been."""
    (job.folder / "slow").unlink(missing_ok=True)
    job.start_again()
    assert job.finish() == ("COMPLETED", 0), job
    first, again = re.split(rf"^job {job.id}, SLURM_RESTART_COUNT=1: ", job.log(), flags=re.M)
    stop = re.search(r"^stopped in epoch (\d/4 after \d+ of 1260 images): the same command goes on$", first, re.M)
    assert f"\ngoing on from checkpoint.pt, in epoch {stop[1]}\n" in again, job
    assert "Traceback" not in job.log(), job
    assert equal(weights, job.folder / "mnist.pt")


def test_preempted(cluster, project, undisturbed, tmp_path):
    """With a grace time run.sh queues the job again, without one Slurm does it."""
    partitions = {"grace": "torchrun", "main": "srun"}
    jobs = [
        start(cluster, project, tmp_path / partition, LAUNCHER=launcher, SBATCH_PARTITION=partition)
        for partition, launcher in partitions.items()
    ]
    urgent = Job(cluster, tmp_path, "sbatch", "--partition=urgent", "--exclusive", "--nodes=2", "--wrap=true")
    assert urgent.finish() == ("COMPLETED", 0)
    assert ["is queued again" in job.log() for job in jobs] == [True, False], jobs
    (tmp_path / "main/slow").unlink()  # both go on together
    for job in jobs:
        check_goes_on(job, undisturbed[1][1])


def test_out_of_time_and_queued_again_by_its_user(cluster, project, undisturbed, tmp_path):
    # Slurm looks every 30 s, and sends the signal if it would be due before the next look: here after 20 to 50 s
    late = start(cluster, project, tmp_path / "late", SBATCH_TIMELIMIT="1", SBATCH_SIGNAL="USR1@10")
    other = start(cluster, project, tmp_path / "other", "--resume", "never", nproc=2, LAUNCHER="srun")
    cluster.ask("scontrol", "requeue", other.id)
    late.wait(lambda record: "is queued again" in late.log() and record["JobState"] == "PENDING")
    cluster.ask("scontrol", "update", f"jobid={late.id}", "TimeLimit=10")
    for job in (late, other):
        (job.folder / "slow").unlink()  # both go on together
    check_goes_on(late, undisturbed[1][1])
    check_goes_on(other, undisturbed[2][1])


def test_a_node_is_lost(cluster, project, undisturbed, tmp_path):
    job = start(cluster, project, tmp_path)
    cluster.ask("scontrol", "update", "nodename=h1", "state=down", "reason=test")
    try:
        job.wait(lambda record: record["JobState"] == "PENDING")
    finally:
        cluster.ask("scontrol", "update", "nodename=h1", "state=resume")
    check_goes_on(job, undisturbed[1][1])


def test_cancelled_it_is_not_queued_again_and_the_same_command_goes_on(cluster, project, undisturbed, tmp_path):
    job = start(cluster, project, tmp_path)
    cluster.ask("scancel", job.id)
    job.wait(lambda record: record["JobState"] == "CANCELLED")
    assert "\nstopped in epoch " in job.log() and "queued again" not in job.log(), job
    (tmp_path / "slow").unlink()
    again = submit(cluster, project, tmp_path)
    assert again.finish() == ("COMPLETED", 0), again
    assert "\ngoing on from checkpoint.pt, in epoch " in again.log(), again
    assert equal(undisturbed[1][1], tmp_path / "mnist.pt")


def test_selftest_runs_under_the_same_batch_script(cluster, tmp_path):
    settings = {"SCRIPT": "04_ddp_torchrun/selftest.py", "NPROC": "2", "OMP_NUM_THREADS": "1"}
    job = Job(cluster, ROOT, "sbatch", f"--output={tmp_path}/%x-%j.log", "07_slurm/run.sh", **settings)
    job.folder = tmp_path
    assert job.finish() == ("COMPLETED", 0), job
    assert re.search(r"^OK: all checks passed on 4 ranks on (h0, h1|h1, h0)$", job.log(), re.M), job


def test_a_bad_option_is_refused_before_and_in_the_job(cluster, project, tmp_path):
    job = Job(cluster, tmp_path, "sbatch", project / "run.sh", "--epochs", 0)
    before = run(["bash", project / "run.sh", "--epochs", 0], tmp_path)
    assert before.code == 2 and before.errors.endswith("\ntrain.py: error: --epochs must be above 0\n"), before
    assert job.finish() == ("FAILED", 2), job
    assert job.log() == before.errors, job


# On any machine


def test_the_header_is_read_by_slurm(tmp_path):
    lines = RUN.read_text().splitlines()
    header = [line for line in lines if re.match(r"#+ *SBATCH", line)]
    assert lines.index(header[-1]) < lines.index("set -euo pipefail")  # sbatch reads no further than a command
    options = {}
    for line in header:
        # no space before SBATCH, or Slurm does not see it; two # for what not every site has
        match = re.fullmatch(r"(##?)SBATCH --([a-z-]+)(?:=(\S+))?(  # EDIT.*)?", line)
        assert match, line
        if match[1] == "#":
            options[match[2]] = match[3]
        site = match[2] in ("nodes", "cpus-per-task", "gpus-per-node", "mem", "time", "partition", "account")
        assert bool(match[4]) == site, line
    assert options["open-mode"] == "append" and "requeue" in options and options["ntasks-per-node"] == "1"
    name, seconds = re.fullmatch(r"([A-Z1]+)@(\d+)", options["signal"]).groups()
    assert signal.Signals[f"SIG{name}"] in load_script(FOLDER / "checkpoint.py").SIGNALS
    (shutdown,) = re.findall(r"--shutdown-timeout=(\d+)", RUN.read_text())
    assert 30 < int(shutdown) < int(seconds)


def decide(folder, code, state="RUNNING", preempted="None", batch=1, stopped=False, changes=True, requeue="exit 0"):
    """Run run.sh as in a job of two nodes, but with all that it starts faked; return the result and what was asked."""
    (folder / "checkpoint.pt").write_text("old")
    record = f"   JobState={state}\\n   BatchFlag={batch}\\n   PreemptEligibleTime=1 PreemptTime={preempted}"
    path = fake_tools(
        folder / "fake",
        python=['case "$*" in', "  *find_spec*) exit 0 ;;", "  *parse_args*) echo checkpoint.pt; exit 100 ;;",
                f"  *stopped*) exit {0 if stopped else 1} ;;", "esac"],
        scontrol=['case "$*" in', "  *hostnames*) echo h0 ;;", f'  "show job 7") printf "{record}\\n" ;;',
                  f'  *) echo "$@" >> asked; {requeue} ;;', "esac"],
        srun=['printf "%s\\n" "$@" > started', "echo new > new; mv new checkpoint.pt" if changes else ":",
              f"exit {code}"],
    )  # fmt: skip
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "h[0-1]", "SLURM_CPUS_ON_NODE": "8"}
    result = run(["bash", RUN, "--amp"], folder, PATH=path, **job)
    asked = folder / "asked"
    return result, asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize(
    ("settings", "code", "again"),
    [
        ({"code": 0}, 0, False),
        ({"code": 0, "stopped": True}, 0, False),
        ({"code": 1}, 1, False),
        ({"code": 2}, 2, False),
        ({"code": 75}, 1, False),  # a torchrun that srun has ended, as another one had failed
        ({"code": 137}, 1, False),
        ({"code": 1, "stopped": True}, 75, True),
        ({"code": 143, "stopped": True}, 75, True),
        ({"code": 1, "stopped": True, "changes": False}, 1, False),  # failed before it saved anything new
        ({"code": 143, "preempted": "2026-01-01T00:00:00"}, 75, True),  # before there was anything to save
        ({"code": 75, "stopped": True, "state": "CANCELLED"}, 75, False),
        ({"code": 75, "stopped": True, "state": "PENDING"}, 75, False),  # Slurm has queued it already
        ({"code": 75, "stopped": True, "batch": 0}, 75, False),  # in an allocation of salloc
    ],
)
def test_what_is_queued_again(settings, code, again, tmp_path):
    result, asked = decide(tmp_path, **settings)
    assert result.code == code, result
    assert asked == ("requeue 7\n" if again else ""), result
    assert ("job 7 is queued again, and goes on when its turn comes" in result.output) == again


@pytest.mark.parametrize(("stopped", "epoch", "code"), [(True, 2, 0), (False, 2, 1), (False, 4, 0), (None, 2, 1)])
def test_what_the_checkpoint_says(stopped, epoch, code, tmp_path):
    """Work is left after a stop; and after the last epoch, as a process that does not end well may lack the weights."""
    (snippet,) = re.findall(r"work_is_left='(.*?)'", RUN.read_text(), re.S)
    state = {"run": {"--epochs": 3}, "place": {"epoch": epoch}} | ({} if stopped is None else {"stopped": stopped})
    torch.save(state, tmp_path / "checkpoint.pt")
    assert run([sys.executable, "-c", snippet, tmp_path / "checkpoint.pt"], tmp_path).code == code


def test_what_is_submitted(tmp_path):
    """Where there is no GPU: there will be one in the job."""
    path = fake_tools(tmp_path / "fake", sbatch=['printf "%s\\n" "$@"'])
    result = run(["bash", RUN, "--device", "cuda", "--epochs", 1], tmp_path, PATH=path)
    assert result.output.splitlines() == [str(RUN), "--device", "cuda", "--epochs", "1"], result


def test_it_says_that_it_cannot_be_queued_again(tmp_path):
    result, _ = decide(tmp_path, 75, stopped=True, requeue="echo 'Requested operation is disabled' >&2; exit 1")
    assert result.code == 75, result
    assert result.errors == "Requested operation is disabled\nrun.sh: not queued again; the same command goes on\n"


def test_what_is_started(tmp_path):
    decide(tmp_path, 0)
    started = (tmp_path / "started").read_text().splitlines()
    assert started[:5] == ["--kill-on-bad-exit=1", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "python"]
    for option in ("--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=h0:10007", "--rdzv-id=7"):
        assert option in started
    assert started[-2:] == [str(FOLDER / "train.py"), "--amp"]


def test_without_slurm_it_says_so(tmp_path):
    python = ['case "$*" in', "  *find_spec*) exit 0 ;;", "  *parse_args*) echo checkpoint.pt; exit 100 ;;", "esac"]
    result = run(["bash", RUN], tmp_path, PATH=bare_tools(tmp_path / "bare", python=python))
    assert result.code == 1, result
    line = "run.sh: no sbatch here, so this is no Slurm cluster; on one machine: bash 06_checkpointing/run.sh"
    assert result.errors == f"{line}\n", result


TASK = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "123456", "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
TASK |= {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "a[1-2],b7"}


@pytest.fixture
def set_environment(monkeypatch, tmp_path):
    """Call it with these variables in the environment; return those of torchrun, or the refusal."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}

    def call(**variables):
        monkeypatch.setattr(os, "environ", environment | variables)
        refused = []
        load_script(FOLDER / "slurm.py").set_environment(refused.append)
        return refused or [os.environ.get(name) for name in names]

    return call


def test_who_is_who_under_srun(set_environment, tmp_path):
    scontrol = ['[ "$*" = "show hostnames a[1-2],b7" ] && printf "a1\\na2\\nb7\\n"']
    path = fake_tools(tmp_path / "fake", scontrol=scontrol)
    assert set_environment(**TASK, PATH=path) == ["4", "0", "5", "1", "a1", str(10000 + 123456 % 20000)]
    other = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "MASTER_ADDR": "b", "MASTER_PORT": "9"}
    assert set_environment(**TASK | other) == ["3", "1", "5", "2", "b", "9"]


def test_torchrun_and_the_batch_script_know_better(set_environment):
    assert set_environment(**TASK, LOCAL_RANK="1") == [None, "1", None, None, None, None]
    batch = {name: value for name, value in TASK.items() if not name.startswith("SLURM_STEP")}
    assert set_environment(**batch) == [None] * 6


def test_no_scontrol_says_what_to_set(set_environment, tmp_path):
    (line,) = set_environment(**TASK, PATH=str(tmp_path))
    assert line.startswith("set MASTER_ADDR to the host of rank 0: scontrol show hostnames a[1-2],b7 does not say it (")
