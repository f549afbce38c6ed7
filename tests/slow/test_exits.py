"""How jobs end: by themselves, by a signal, or because one of their processes fails."""

import os
import signal

import pytest
from helpers.commands import WITNESS, Running, free_port, torchrun, wait_for
from helpers.paths import FOLDERS, ROOT
from helpers.projects import copy_project, edit

ENDLESS = ["--epochs", 10**6]


def copied(place, folder):
    """Copy a folder into a project with few digits."""
    scripts = [path.name for path in (ROOT / folder).glob("*.py")]
    return copy_project(place / folder, ROOT / folder / "train.py", "run.sh", *scripts)


@pytest.fixture
def start(tmp_path):
    """A function that starts a copied folder's run.sh; what still runs at the end is killed.

    Shells ignore SIGINT for a job in the background, and not for one in the foreground.
    """
    jobs = []

    def start(folder, *options, sigint="default", **settings):
        command = ["env", f"--{sigint}-signal=INT", "bash", "run.sh", *options]
        settings |= {"NPROC": "2", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}  # of 03
        project = copied(tmp_path, folder)
        jobs.append(Running([*command, "--data-dir", "common"], project, **settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill_all()


def test_a_job_in_the_background_ends_when_run_sh_is_killed(start):
    """All folders at once, as much of their start is waiting. 02 and 03 also end by SIGKILL."""
    settings = {"sigint": "ignore", "SCRIPT": "pipeline.py"}  # of 05
    jobs = {folder: start(folder, *ENDLESS, **settings) for folder in FOLDERS[1:6]}
    for folder, job in jobs.items():
        wait_for("epoch 1/", job)
        job.process.send_signal(signal.SIGKILL if folder in FOLDERS[1:3] else signal.SIGTERM)
        result = job.finish()  # which raises if it leaves a process
        assert result.code != 0, result


def test_ctrl_c_ends_a_job(start):
    """A terminal sends SIGINT to all processes of the job, here three times to 06's."""
    jobs = [start(folder, *ENDLESS) for folder in [*FOLDERS[1:4], FOLDERS[5]]]
    for job in jobs:
        wait_for("epoch 1/", job)
        for _ in range(3 if job is jobs[-1] else 1):
            os.killpg(job.process.pid, signal.SIGINT)
        result = job.finish()
        assert result.code != 0, result
    assert result.output.count("stopped at ") == 1, result


def test_a_failing_rank_ends_the_job_and_shows_its_traceback(start, tmp_path):
    """02 and 03. 07 has such a rank under torchrun, on Slurm."""
    faulty = {"WITNESS": os.devnull, "FAULTY_RANK": "1", **WITNESS}
    for job in [start(folder, "--epochs", 1, **faulty) for folder in FOLDERS[1:3]]:
        result = job.finish()
        assert result.code and "RuntimeError: planted by the test" in result.errors, result
    assert not list(tmp_path.glob("*/mnist.pt"))


def test_no_thread_of_the_process_group_is_left_at_the_exit(tmp_path):
    """Such a thread may need the interpreter's lock when it is gone: an abort, or a hang."""
    project = copied(tmp_path, "04_ddp_torchrun")

    def threads_left(script, *options):  # by each of two ranks
        threads = project / "threads"
        threads.unlink(missing_ok=True)
        torchrun(script, 2, *options, cwd=project, THREADS=str(threads), **WITNESS)
        return threads.read_text().split()

    options = ["train.py", "--epochs", 1, "--data-dir", "common"]
    assert threads_left("selftest.py") == threads_left(*options) == ["0", "0"]
    # Without Python's cyclic garbage collection neither, but for the import at the top
    no_gc = "    __import__('gc').disable()\n    train(parse"
    edit(project, "train.py", ("    train(parse", no_gc))
    assert threads_left(*options) == ["0", "0"]
    edit(project, "train.py", ("import torch._dynamo  #", "#"))
    assert threads_left(*options) != ["0", "0"]
