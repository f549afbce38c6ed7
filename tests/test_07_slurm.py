"""07 without Slurm: its run.sh and its script with fake tools, on this machine."""

import os
import signal
from pathlib import Path

import pytest
from helpers.checks import check_trained, launch
from helpers.commands import WITNESS, fake_tools, free_port, run
from helpers.paths import DIGITS, ROOT
from helpers.ranks import exit_codes, run_rank, run_ranks, start
from helpers.scripts import load_script, parse

FOLDER = ROOT / "07_slurm"
SCONTROL = """
case "$*" in
  "show hostnames"*) echo 127.0.0.1 ;;
  "show job --oneliner "*) kill -TERM $$; cat record ;;  # signals reach all processes of a job
  *) sleep 1; if [ -e ended ]; then echo too late; else echo "scontrol $*"; fi >> calls ;;
esac
"""
SRUN = """
while case $1 in --*) ;; *) false ;; esac; do shift; done
exec "$@"
"""
JOB = str(os.getpid())  # the job's port depends on it
NODE = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "h0", "NPROC": "2"}
NODE |= {"SLURM_CPUS_PER_TASK": "2"}
STOP = {"SIGNAL_AT_BATCH": f"1 {signal.SIGTERM:d} 3"}  # to rank 1 alone


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Run in a folder with a fake scontrol on the PATH, and restore the signals' handlers."""
    monkeypatch.chdir(tmp_path)
    Path("record").write_text(record())
    quick = SCONTROL.replace("sleep 1", ":")
    monkeypatch.setenv("PATH", fake_tools(tmp_path / "fake", scontrol=quick))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    stop_signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in stop_signals]
    yield
    for number, handler in zip(stop_signals, handlers, strict=True):
        signal.signal(number, handler)


def record(state="RUNNING", requeue=1, batch=1):
    return f"JobId=7 JobState={state} Requeue={requeue} Restarts=0 BatchFlag={batch} Reboot=0\n"


def test_a_stopped_job_is_requeued_resumes_and_saves(repository, tmp_path):
    """It is requeued before any of its processes ends. The slow tests run it on a real Slurm."""
    (tmp_path / "record").write_text(record())
    (tmp_path / "07_slurm").symlink_to(repository / "07_slurm")  # sbatch runs a copy of run.sh
    path = fake_tools(tmp_path / "fake", scontrol=SCONTROL, srun=SRUN)
    settings = {"PATH": path, "THREADS": "ended", **NODE, **STOP}  # a rank writes it as it exits
    stopped = launch(repository, "07_slurm", "--epochs", 2, cwd=tmp_path, **settings)
    progress = f"at {dict(epoch=1, images=384, best=None)}"
    output = f"stopped {progress}; rerun the same command to resume\nrequeueing job {JOB}\n"
    assert (stopped.code, stopped.output) == (0, output), stopped
    assert (tmp_path / "calls").read_text() == f"scontrol requeue {JOB}\n"
    assert (tmp_path / "ended").read_text().count("\n") == 2
    again = run_ranks(repository / "07_slurm/train.py", 2, "--epochs", 2, cwd=tmp_path)
    assert again.output.startswith(f"resuming from checkpoint.pt {progress}\n"), again
    check_trained(again, tmp_path, epochs=2, ranks=1)  # the witness saw another part


def test_a_stopped_job_whose_save_failed_is_not_requeued(tmp_path):
    """Two tasks of `srun python`, stopped in their third step."""
    (tmp_path / "record").write_text(record())
    (tmp_path / "checkpoint.pt.tmp").mkdir()  # nothing can be written to it
    settings = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": 2, "MASTER_ADDR": "127.0.0.1", **WITNESS}
    settings |= {"MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "any", **STOP}
    settings["PATH"] = fake_tools(tmp_path / "fake", scontrol=SCONTROL)
    tasks = [settings | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(2)]
    files = [tmp_path / "output", tmp_path / "errors"]
    given = [(FOLDER / "train.py", ["--data-dir", DIGITS], tmp_path, task, files) for task in tasks]
    codes = exit_codes(start(run_rank, given))
    output, errors = [file.read_text() for file in files]
    assert codes == [1, 1], errors
    assert "IsADirectoryError: [Errno 21] Is a directory: " in errors, errors
    assert output == "" and not (tmp_path / "calls").exists(), output


def test_the_launch_on_two_nodes(tmp_path):
    """One torchrun per node, with the address and the port of the first.

    And run.sh waits while the processes save after a signal, which reaches it as well.
    """
    srun = 'kill -TERM $PPID; sleep 0.1; echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*"'
    path = fake_tools(tmp_path / "fake", scontrol=SCONTROL, srun=srun)
    job = NODE | {"SLURM_JOB_ID": "20123", "SLURM_JOB_NUM_NODES": "2", "NPROC": ""}
    result = run(["bash", FOLDER / "run.sh", "--amp"], tmp_path, PATH=path, **job)
    assert result.code == 0, result
    words = "110 --kill-on-bad-exit=1 --cpus-per-task=2 torchrun --nnodes=2 --nproc-per-node=gpu "
    words += "--rdzv-backend=c10d --rdzv-id=20123 --rdzv-endpoint=127.0.0.1:10123"
    assert result.output == f"{words} 07_slurm/train.py --amp\n", result
    options = set((FOLDER / "run.sh").read_text().split("\nset -eu\n")[0].splitlines())
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= options
    assert any(line.startswith("#SBATCH --signal=TERM@120 ") for line in options)


@pytest.mark.parametrize(("fields", "settings", "requeued"), [
    ({}, {}, True),
    ({"batch": 2}, {}, True),  # Slurm's first attempt to launch it failed
    ({"requeue": 0}, {}, False),  # sbatch --no-requeue
    ({"batch": 0}, {}, False),  # salloc
    ({"state": "CANCELLED"}, {}, False),
    ({"state": "COMPLETING"}, {}, False),  # Slurm ends it, and may requeue it itself
    ({}, {"SLURM_JOB_ID": ""}, False),  # no job
    ({}, {"PATH": "/nowhere"}, False),  # no scontrol, as in a container
])
def test_which_jobs_are_requeued(fields, settings, requeued, scontrol, monkeypatch):
    Path("record").write_text(record(**fields))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    load_script(FOLDER / "train.py").requeue_job()
    assert os.path.exists("calls") == requeued


@pytest.mark.parametrize(("failure", "reason"), [
    ("exit 1", "]' returned non-zero exit status 1.\n"),
    ("exec sleep 60", "]' timed out after 1 seconds\n"),
])
def test_a_controller_that_does_not_answer_is_asked_again(
        failure, reason, scontrol, monkeypatch, capfd):
    tool = Path("fake/scontrol")
    fails_once = f"[ -e failed ] || {{ touch failed; echo Unable to contact >&2; {failure}; }}"
    tool.write_text(tool.read_text().replace("\n", f"\n{fails_once}\n", 1))
    script = load_script(FOLDER / "train.py")
    real_run = script.subprocess.run
    monkeypatch.setattr(script.subprocess, "run",
                        lambda *words, timeout, **given: real_run(*words, timeout=1, **given))
    monkeypatch.setattr(script.time, "sleep", lambda seconds: None)
    script.requeue_job()
    assert Path("calls").read_text() == "scontrol requeue 7\n"
    log = capfd.readouterr()
    assert reason in log.out and "Unable to contact" in log.err


@pytest.mark.parametrize(("torchrun", "ranks"), [
    ({}, "3 1 4"), ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "0 0 2"),
], ids=["srun alone", "torchrun under srun"])
def test_ranks_under_srun(torchrun, ranks, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    task = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    parse(monkeypatch, FOLDER / "train.py", **task, **torchrun)
    assert " ".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) == ranks
