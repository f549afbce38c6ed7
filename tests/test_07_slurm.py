"""07 without Slurm: run.sh with fake tools, where srun starts the processes on this machine."""

import os
import signal
from pathlib import Path

import pytest
from helpers import ROOT, check_trained, fake_tools, free_port, load_script, parse, run, run_ranks

FOLDER = ROOT / "07_slurm"
RUN = FOLDER / "run.sh"
SBATCH = """
# Runs the job at once, and as Slurm does a copy of its script
cp "$1" slurm_script
echo "   Command=$*" > command
shift
export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=h0 SLURM_JOB_CPUS_PER_NODE=2
exec bash slurm_script "$@"
"""
SCONTROL = """
case "$*" in
  "show hostnames"*) echo 127.0.0.1 ;;
  "show job 7") cat command ;;
  "show job --oneliner 7") kill -TERM $$; cat record ;;  # signals reach all processes of a job
  *) sleep "${DELAY:-0}"; echo "scontrol $*" >> calls ;;
esac
"""
SRUN = """
echo "srun $*" >> calls
while case $1 in --*) ;; *) false ;; esac; do shift; done
[ "$1" = python ] || exec "$@"
export SLURM_STEP_ID=0 SLURM_NTASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
wait $second; code=$?
echo "rank 1 ends with $code" >> calls
wait $first && exit $code
"""


def fake_slurm(folder, **tools):
    """A PATH with tools that look like Slurm's, and run a job's processes on this machine."""
    tools = {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN, **tools}
    return fake_tools(folder / "fake", **tools)


def record(state="RUNNING", requeue=1, batch=1):
    return f"JobId=7 JobState={state} Requeue={requeue} Restarts=0 BatchFlag={batch} Reboot=0\n"


def stopped_job(folder):
    """Fake tools for a job whose rank 1 is signalled at its 3rd batch, with LAUNCHER=srun."""
    (folder / "record").write_text(record())
    stop = f"TORCHELASTIC_RUN_ID=any SIGNAL_AT_BATCH='1 {signal.SIGTERM:d} 3'"
    job = f"export LAUNCHER=srun DELAY=3 MASTER_PORT={free_port()} {stop}"
    return fake_slurm(folder, sbatch=job + SBATCH)


@pytest.mark.launch("07_slurm", "--epochs", 3, tools=stopped_job)
def test_a_stopped_job_is_requeued_resumes_and_saves(launched, repository):
    """It is requeued before any of its processes ends. The slow tests run it by torchrun."""
    stopped = launched.finish()
    progress = "after 0 of 3 epochs and 384 of 1260 images"
    assert stopped.output.endswith(
        f"\nstopped {progress}; rerun the same command to resume\nrequeueing job 7\n"
    ), stopped
    place = launched.place
    srun, *calls = (place / "calls").read_text().splitlines()
    assert srun.startswith("srun --kill-on-bad-exit=1 ")
    assert calls == ["scontrol requeue 7", "rank 1 ends with 0"]
    again = run_ranks(repository / "07_slurm/train.py", 2, "--epochs", 3, cwd=place)
    assert again.output.startswith(f"resuming from checkpoint.pt, {progress}\n"), again
    check_trained(again, place, ranks=1)  # the witness did not see the part before the stop


TORCHRUN = """--ntasks-per-node=1 --cpus-per-task=8 torchrun --nnodes=2 --nproc-per-node=4 \
--rdzv-backend=c10d --rdzv-id=7 --rdzv-endpoint=127.0.0.1:10007"""
TASKS = "--ntasks-per-node=4 --ntasks=8 --cpus-per-task=2 python"


@pytest.mark.parametrize(("launcher", "command"), [("torchrun", TORCHRUN), ("srun", TASKS)])
def test_the_launch_on_two_nodes_of_four_gpus(launcher, command, tmp_path):
    python = 'case "$*" in *device_count*) echo 4 ;; esac'
    srun = "echo $OMP_NUM_THREADS $MASTER_ADDR $MASTER_PORT $*"
    path = fake_slurm(tmp_path, python=python, srun=srun)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "h[0-1]"}
    job |= {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}
    settings = {"LAUNCHER": "srun"} if launcher == "srun" else {}
    result = run(["bash", RUN, "--amp"], tmp_path, PATH=path, **job, **settings)
    assert result.code == 0, result
    start = f"2 127.0.0.1 10007 --kill-on-bad-exit=1 {command}"
    assert result.output.splitlines()[-1] == f"{start} {FOLDER / 'train.py'} --amp", result


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Run requeue_job() in a folder with a fake scontrol, and restore the signals' handlers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", fake_slurm(tmp_path))
    stop_signals = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in stop_signals]
    yield
    for number, handler in zip(stop_signals, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("fields", "requeued"), [
    ({}, True),
    ({"batch": 2}, True),  # Slurm's first attempt to launch it failed
    ({"requeue": 0}, False),  # sbatch --no-requeue
    ({"batch": 0}, False),  # salloc
    ({"state": "CANCELLED"}, False),
    ({"state": "COMPLETING"}, False),  # Slurm ends it, and may requeue it itself
])
def test_which_jobs_are_requeued(fields, requeued, scontrol, monkeypatch):
    Path("record").write_text(record(**fields))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    load_script(FOLDER / "train.py").requeue_job()
    assert os.path.exists("calls") == requeued


def test_without_slurm_nothing_is_requeued(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", "")
    load_script(FOLDER / "train.py").requeue_job()


@pytest.mark.parametrize(
    ("torchrun", "ranks"),
    [({}, ["3", "1", "4"]), ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ["0", "0", "2"])],
    ids=["srun alone", "torchrun under srun"],
)
def test_ranks_under_srun(torchrun, ranks, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    parse(monkeypatch, FOLDER / "train.py", **task, **torchrun)
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ranks
