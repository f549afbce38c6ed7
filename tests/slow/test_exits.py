"""How jobs end: by themselves, by a signal, or because one of their processes fails."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers import (FOLDERS, TORCHRUN, Running, copy_project, equal, free_port, processes, run,
    wait_for, wait_until)

SPAWN = FOLDERS[1:3]  # 02 and 03
COUNTED = """
import atexit, pathlib
def count_what_is_left():
    names = []
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(path.read_text())
    print("threads of Gloo:", sum("gloo" in name for name in names), flush=True)
atexit.register(count_what_is_left)
"""


def start(place, folder, *options, sigint="default", **settings):
    """Start a copied folder's run.sh. Shells ignore SIGINT for a job in the background."""
    settings |= {"NPROC": "2", "OMP_NUM_THREADS": "1", "MASTER_PORT": free_port()}  # of 03
    command = ["env", f"--{sigint}-signal=INT", "bash", "run.sh", *options]
    return Running(command, copy_project(place / folder, folder, small="data"), **settings)


@pytest.mark.parametrize("ctrl_c", [False, True])
def test_a_signal_ends_a_job(ctrl_c, tmp_path):
    """SIGTERM to run.sh in the background, to 02 and 03 SIGKILL; or Ctrl-C."""
    settings = {"SCRIPT": "pipeline.py", "sigint": "default" if ctrl_c else "ignore"}  # of 05
    jobs = {folder: start(tmp_path, folder, "--epochs", 10**6, **settings)
            for folder in FOLDERS[1:6]}
    for folder, job in jobs.items():
        wait_for("epoch 1/", job)
        if not ctrl_c:
            job.process.send_signal(signal.SIGKILL if folder in SPAWN else signal.SIGTERM)
        else:
            os.killpg(job.process.pid, signal.SIGINT)
        result = job.finish()  # which raises if it leaves a process
        assert result.code != 0, result


def test_a_failing_rank_ends_the_job_and_shows_its_traceback(tmp_path):
    """02 and 03, if it ends first, or that of the other one. 07 has such a rank on Slurm."""
    for job in [start(tmp_path, folder, IMAGE="5 0") for folder in SPAWN]:
        result = job.finish()
        error = "OSError: this image cannot be read|Connection (closed|reset) by peer"
        assert result.code == 1 and re.search(error, result.errors), result
    assert not list(tmp_path.glob("**/mnist.pt"))


@pytest.mark.parametrize("folder", SPAWN)
def test_killed_while_it_starts_it_leaves_nothing_to_the_next_run(folder, tmp_path):
    """Which is the same command, at once: it trains to its own end, with its own weights."""
    project = copy_project(tmp_path / "a project", folder, small="data")
    command = ["bash", project / "run.sh"]
    settings = {"OMP_NUM_THREADS": 1, "MASTER_PORT": free_port()}
    run(command, tmp_path / "whole", **settings)
    killed = Running(command, tmp_path / "killed", **settings)
    wait_until(lambda: len(processes(killed.token, b"ing-fork")) == 2, killed)
    time.sleep(0.3)
    killed.process.kill()
    result = run(command, tmp_path / "next", **settings)
    assert result.code == 0 and len(result.epochs()) == 1, result
    assert equal(tmp_path / "next/mnist.pt", tmp_path / "whole/mnist.pt")
    assert not killed.finish().epochs()
    assert not list((tmp_path / "killed").iterdir())


def test_the_selftest_names_a_check_that_gets_no_answer(tmp_path):
    """Rank 1 stops while the bandwidth is measured."""
    project = copy_project(tmp_path, "04_ddp_torchrun", small="data")
    job = Running([*TORCHRUN, "--nproc-per-node=2", "selftest.py", "--timeout", 5], project)
    while " 1 MiB " not in job.printed()[0]:  # without a pause: the next takes milliseconds
        assert job.process.poll() is None and time.monotonic() < job.start + 100, job.printed()
    [rank_1] = [process for process in processes(job.token, b"selftest.py")
                if b"\0RANK=1\0" in Path(f"/proc/{process}/environ").read_bytes()]
    os.kill(rank_1, signal.SIGSTOP)
    wait_for("FAILED: ", job)
    os.kill(rank_1, signal.SIGCONT)  # or torchrun waits 30 s for it
    result = job.finish()
    failed = r"^FAILED: (8|64) MiB on cpu: rank 0 on \S+: no answer within 5 s$"
    assert result.code == 1 and re.search(failed, result.output, re.M), result


@pytest.mark.parametrize("path", [
    "04_ddp_torchrun/train.py", "06_checkpointing/train.py",
    "05_model_parallel/tensor_parallel.py", "05_model_parallel/fsdp.py"])
def test_each_exit_has_the_code_0(path, tmp_path):
    """And no thread of Gloo is left, which might abort it, but with DTensor."""
    project = copy_project(tmp_path / "a project", path, small="data")
    with open(project / "common/data.py", "a") as file:
        file.write(COUNTED)
    result = run([*TORCHRUN, "--nproc-per-node=2", Path(path).name, "--epochs", 1], project)
    assert result.code == 0 and len(result.epochs()) == 1, result
    left = re.findall(r"^threads of Gloo: (.*)$", result.output, re.M)
    assert left == ["0", "0"] or "05_" in path, result
