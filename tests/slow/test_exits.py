"""How jobs end: by themselves, or by a signal."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers import FOLDERS, TORCHRUN, Running, copy_project, free_port, run, wait_for

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


@pytest.mark.parametrize("ctrl_c", [False, True])
def test_a_signal_ends_a_job(ctrl_c, tmp_path):
    """SIGTERM to run.sh in the background, to 02 and 03 SIGKILL; or Ctrl-C."""
    command = ["env", f"--{'default' if ctrl_c else 'ignore'}-signal=INT", "bash", "run.sh"]
    settings = {"SCRIPT": "pipeline.py", "NPROC": 2, "OMP_NUM_THREADS": 1}  # of 05
    jobs = {folder: Running([*command, "--epochs", 10**6], MASTER_PORT=free_port(), **settings,
                            cwd=copy_project(tmp_path / folder, folder, small="data"))
            for folder in FOLDERS[1:6]}
    for folder, job in jobs.items():
        wait_for("epoch 1/", job)
        if not ctrl_c:  # shells ignore SIGINT for a job in the background
            job.process.send_signal(signal.SIGKILL if folder < "04" else signal.SIGTERM)
        else:
            os.killpg(job.process.pid, signal.SIGINT)
        assert job.finish().code != 0  # finish() raises if it leaves a process


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
