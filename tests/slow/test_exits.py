"""How jobs end by a signal."""

import os
import signal

import pytest
from helpers import FOLDERS, Running, copy_project, free_port, torchrun, wait_for


@pytest.mark.parametrize("ctrl_c", [False, True])
def test_a_signal_ends_a_job(ctrl_c, tmp_path):
    """Ctrl-C to 03, 05, 07; in the background SIGTERM to 04 and 06, SIGKILL to 02."""
    way = "default" if ctrl_c else "ignore"
    jobs = {}
    for folder in FOLDERS[1 + ctrl_c : 7 : 2]:
        command = torchrun("train.py", 2) if folder > "07" else ["bash", "run.sh"]
        project = copy_project(tmp_path / folder, folder, small="data")
        (project / "slow").write_text("0.01")  # so that they do not use the CPU
        jobs[folder] = Running(
            ["env", f"--{way}-signal=INT", *command, "--epochs=99999"],
            project,
            SCRIPT="pipeline.py" if ctrl_c else "train.py",  # of 05, of 06
            MASTER_PORT=free_port(),
            OMP_NUM_THREADS=1,
        )
    for folder, job in jobs.items():
        wait_for("epoch 1/", job)
        if not ctrl_c:  # shells ignore SIGINT for a job in the background
            job.process.send_signal(signal.SIGKILL if folder < "04" else signal.SIGTERM)
        else:
            os.killpg(job.process.pid, signal.SIGINT)
        assert job.finish().code != 0  # finish() raises if it leaves a process
