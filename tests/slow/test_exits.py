"""How jobs end: by themselves, by a signal, or because one of their processes fails."""

import os
import signal

import pytest
from helpers import (
    FOLDERS,
    ROOT,
    WITNESS,
    Running,
    bare_accuracy,
    copy_project,
    free_port,
    run,
    torchrun,
    wait_for,
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A function that copies a folder into a project with few digits."""

    def copied(folder):
        project = tmp_path_factory.mktemp(folder)
        others = [path.name for path in (ROOT / folder).glob("*.py")]
        copy_project(project, ROOT / folder / "train.py", "run.sh", *others)
        return project

    return copied


def endless(project, *options, **settings):
    """Start a job in the background, where shells ignore SIGINT, and wait for its first epoch."""
    command = ["bash", "run.sh", *options, "--epochs", 10**6, "--data-dir", "common"]
    settings = {"NPROC": "2", "OMP_NUM_THREADS": "1", **settings}
    running = Running(command, project, ignore_sigint=True, **settings)
    wait_for("epoch 1/", running)
    return running


@pytest.mark.parametrize("folder", FOLDERS[1:6])
def test_a_job_in_the_background_ends_when_run_sh_is_killed(folder, project):
    running = endless(project(folder), *["pipeline.py"] if folder[:2] == "05" else [])
    running.process.terminate()
    result = running.finish()  # which raises if it leaves a process
    assert result.code == 75 if folder == "06_checkpointing" else result.code != 0, result


@pytest.mark.parametrize("folder", ["02_ddp_spawn", "03_ddp_multinode_spawn", "04_ddp_torchrun"])
def test_ctrl_c_ends_a_job(folder, project):
    command = ["bash", "run.sh", "--epochs", 10**6, "--data-dir", "common"]
    running = Running(command, project(folder), OMP_NUM_THREADS="1")
    wait_for("epoch 1/", running)
    os.killpg(running.process.pid, signal.SIGINT)  # a terminal sends it to all processes
    assert running.finish().code != 0


@pytest.mark.parametrize("folder", ["02_ddp_spawn", "03_ddp_multinode_spawn"])
def test_a_failing_rank_ends_the_job_and_shows_its_traceback(folder, project, tmp_path):
    """07 has such a rank under torchrun, on Slurm."""
    project = project(folder)
    command = ["bash", project / "run.sh", "--epochs", 1, "--data-dir", project / "common"]
    settings = {"WITNESS": os.devnull, "FAULTY_RANK": "1", "OMP_NUM_THREADS": "1", **WITNESS}
    result = run(command, tmp_path, **settings)
    assert result.code != 0, result
    assert "RuntimeError: planted by the test" in result.errors
    assert not (tmp_path / "mnist.pt").exists()


def test_a_process_killed_twice_with_one_restart(project):
    settings = {"RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "MAX_RESTARTS": "1"}
    running = endless(project("04_ddp_torchrun"), **settings)
    running.kill("-u", "train.py")
    wait_for("epoch 1/", running, times=2)
    running.kill("-u", "train.py")
    result = running.finish()
    assert result.code == 1 and "ChildFailedError" in result.errors, result


@pytest.mark.parametrize("script", ["train.py", "selftest.py"])
def test_no_thread_of_the_process_group_is_left_at_the_exit(script, project, tmp_path):
    """Such a thread may need the interpreter's lock when it is gone: an abort, or a hang."""
    project = project("04_ddp_torchrun")
    options = ["--epochs", 1, "--data-dir", "common"] if script == "train.py" else []
    threads = tmp_path / "threads"
    result = torchrun(script, 2, *options, cwd=project, THREADS=str(threads), **WITNESS)
    assert result.code == 0, result
    assert threads.read_text() == "0\n0\n"


@pytest.mark.parametrize(
    ("folder", "script"),
    [
        ("04_ddp_torchrun", "train.py"),
        ("05_model_parallel", "fsdp.py"),
        ("05_model_parallel", "tensor_parallel.py"),
    ],
)
def test_exits_without_a_word(folder, script, project):
    """EXITS=50 in the environment repeats it as often."""
    project = project(folder)
    for _ in range(int(os.environ.get("EXITS", 3))):
        result = torchrun(script, 2, "--epochs", 1, "--data-dir", "common", cwd=project)
        assert result.code == 0, result
        assert result.errors == "", result


def test_a_compiled_model_is_saved_with_the_plain_names(project, tmp_path):
    """aot_eager takes all steps of a compilation but the last, which needs a C++ compiler."""
    weights = tmp_path / "weights.pt"
    options = ["--data-dir", "common", "--compile", "--accumulate", 2, "--output", weights]
    settings = {"COMPILE_BACKEND": "aot_eager", **WITNESS}
    result = torchrun("train.py", 2, *options, cwd=project("04_ddp_torchrun"), **settings)
    assert result.code == 0, result
    assert float(result.epochs()[-1]["accuracy"]) > 0.5, result
    assert result.epochs()[-1]["accuracy"] == f"{bare_accuracy(weights):.4f}", result
