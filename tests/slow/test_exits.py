"""How jobs end: by themselves, by a signal, or because one of their processes fails."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers import (FOLDERS, TORCHRUN, Running, copy_project, equal, free_port, processes,
    wait_for, wait_until)

SPAWN = FOLDERS[1:3]  # 02 and 03
COUNTED = """
import atexit, contextlib, pathlib, weakref, {0}
import torch.distributed as dist
destroy, group = dist.destroy_process_group, []
def destroy_process_group():
    group[:] = [weakref.ref(dist.group.WORLD)]
    destroy()
def count_what_is_left():
    names = []
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(path.read_text())
    print("left of Gloo:", sum("gloo" in name for name in names), group[0](), flush=True)
dist.destroy_process_group = destroy_process_group
atexit.register(count_what_is_left)
{0}.main()
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a copied folder's run.sh; what still runs at the end is killed.

    Shells ignore SIGINT for a job in the background, and not for one in the foreground.
    """
    jobs = []

    def start(folder, *options, sigint="default", **settings):
        command = ["env", f"--{sigint}-signal=INT", "bash", "run.sh", *options]
        settings |= {"NPROC": "2", "OMP_NUM_THREADS": "1", "MASTER_PORT": free_port()}  # of 03
        project = copy_project(tmp_path / folder, folder, small="data")
        jobs.append(Running(command, project, **settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill_all()


@pytest.mark.parametrize("ctrl_c", [False, True])
def test_a_signal_ends_a_job(ctrl_c, start):
    """SIGTERM to run.sh in the background, to 02 and 03 SIGKILL; or Ctrl-C, three times for 06."""
    jobs = {folder: start(folder, "--epochs", 10**6, SCRIPT="pipeline.py",  # of 05
                          sigint="default" if ctrl_c else "ignore") for folder in FOLDERS[1:6]}
    for folder, job in jobs.items():
        wait_for("epoch 1/", job)
        if not ctrl_c:
            job.process.send_signal(signal.SIGKILL if folder in SPAWN else signal.SIGTERM)
        for _ in range(3 if folder == FOLDERS[5] else 1) if ctrl_c else ():
            os.killpg(job.process.pid, signal.SIGINT)
        result = job.finish()  # which raises if it leaves a process
        assert result.code != 0, result
    assert result.output.count("stopped at ") == 1, result


def test_a_failing_rank_ends_the_job_and_shows_its_traceback(start, tmp_path):
    """02 and 03, if it ends first, or that of the other one. 07 has such a rank on Slurm."""
    for job in [start(folder, IMAGE="5 0") for folder in SPAWN]:
        result = job.finish()
        error = "OSError: this image cannot be read|Connection (closed|reset) by peer"
        assert result.code == 1 and re.search(error, result.errors), result
    assert not list(tmp_path.glob("**/mnist.pt"))


@pytest.mark.parametrize("folder", SPAWN)
def test_killed_while_it_starts_it_leaves_nothing_to_the_next_run(folder, tmp_path):
    """Which is the same command, at once: it trains to its own end, with its own weights.

    It is killed by SIGKILL; KILLS=10 in the environment kills it ten times by each signal.
    """
    project = copy_project(tmp_path / "a project", folder, small="data")
    settings = {"OMP_NUM_THREADS": 1, "MASTER_PORT": free_port()}

    def start(place):
        (tmp_path / place).mkdir()
        return Running(["bash", project / "run.sh"], tmp_path / place, **settings)

    start("whole").finish()
    for kill in range(int(os.environ.get("KILLS", 1))):
        for name in ("SIGKILL", "SIGTERM", "SIGHUP") if "KILLS" in os.environ else ("SIGKILL",):
            killed = start(f"{name} {kill}")
            wait_until(lambda job=killed: len(processes(job.token, b"ing-fork")) == 2, killed)
            time.sleep(0.3)
            killed.process.send_signal(signal.Signals[name])
            result = start(f"after {name} {kill}").finish()
            assert result.code == 0 and len(result.epochs()) == 1, result
            assert equal(tmp_path / f"after {name} {kill}/mnist.pt", tmp_path / "whole/mnist.pt")
            assert not killed.finish().epochs()
            assert not list((tmp_path / f"{name} {kill}").iterdir())


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
    """And neither the process group nor a thread of it is left, but with DTensor.

    Such a thread may abort the process while Python finalizes. In torch 2.8 it has no name.
    EXITS=100: so many exits.
    """
    project = copy_project(tmp_path / "a project", path, small="data")
    (project / "counted.py").write_text(COUNTED.format(Path(path).stem))
    command = [*TORCHRUN, "--nproc-per-node=2", project / "counted.py", "--epochs", 1]
    for number in range(int(os.environ.get("EXITS", 1))):
        (tmp_path / str(number)).mkdir()
        result = Running(command, tmp_path / str(number)).finish()
        assert result.code == 0 and len(result.epochs()) == 1, result
        left = re.findall(r"^left of Gloo: (.*)$", result.output, re.M)
        assert left == ["0 None", "0 None"] or "05_" in path, result
