"""04: processes started by torchrun."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import termios

import pytest
from helpers import (
    DIGITS,
    ROOT,
    WITNESS,
    Running,
    bare_accuracy,
    copy_project,
    distance,
    edit,
    fewer_digits,
    free_port,
    load_script,
    run,
    run_two_nodes,
    torchrun,
    wait_for,
    without_batch_norm,
)
from test_02_ddp_spawn import check_two_ranks, check_witness

FOLDER = ROOT / "04_ddp_torchrun"
RUN = FOLDER / "run.sh"


def test_both_ranks_train_evaluate_and_save(tmp_path):
    check_two_ranks(RUN, tmp_path, epochs=3, at_least=0.95)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A copy of the folder that trains on few digits, for what does not depend on how many there are."""
    small = tmp_path_factory.mktemp("small project")
    copy_project(small, FOLDER / "train.py", "selftest.py", "join.py", "run.sh")
    fewer_digits(small)
    return small


def test_three_ranks_with_a_remainder(small, tmp_path):
    # neither the 359 test images nor the last batches are divisible by 3 ranks; bfloat16 is for training alone
    weights, witness = tmp_path / "weights.pt", tmp_path / "witness"
    command = ["bash", small / "run.sh", "--epochs", 1, "--data-dir", small / "common", "--output", weights]
    command += ["--batch-size", 50, "--amp", "--no-sync-bn"]
    result = run(command, tmp_path, NPROC="3", WITNESS=str(witness), **WITNESS)
    assert result.code == 0, result
    epochs = result.epochs()
    assert epochs[0]["accuracy"] == f"{bare_accuracy(weights):.4f}", result
    check_witness(witness, epochs, world_size=3, images=1260)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the script with few digits, a network in which a batch may be cut, and no clipping of gradients.

    Clipping would hide a wrong divisor wherever it sets in, as it gives a gradient of any size the same one.
    """
    project = tmp_path_factory.mktemp("project")
    copy_project(project, FOLDER / "train.py")
    edit(project, "train.py", ("model.parameters(), 1.0)", "model.parameters(), 1e9)"))
    fewer_digits(project)
    without_batch_norm(project)
    return project


def trained(project, name, nproc, *options):
    """The weights after two epochs."""
    options = ["--data-dir", "common", "--epochs", 2, "--lr", 0.01, "--output", name, *options]
    result = torchrun("train.py", nproc, *options, cwd=project)
    assert result.code == 0, result
    return project / name


@pytest.fixture(scope="module")
def whole(project):
    """The weights of one process with batches of 192."""
    return trained(project, "whole.pt", 1, "--batch-size", 192)


# of a rank's 630 images the last window has 54: three batches instead of four, and the third of them is short
ACCUMULATE = ["--batch-size", 24, "--accumulate", 4]


def test_two_ranks_take_the_steps_of_one_with_the_whole_batch(project, whole):
    assert distance(whole, trained(project, "two.pt", 2, "--batch-size", 96)) < 1e-12


def test_accumulated_batches_take_the_steps_of_a_whole_one(project, whole):
    assert distance(whole, trained(project, "accumulated.pt", 2, *ACCUMULATE)) < 1e-12


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("len(train_sampler) - first * args.batch_size)", "10**9)"),  # divided by the size of a full window
        (" or step + 1 == len(train_loader)", ""),  # no step, and gradients left over for the next epoch
    ],
)
def test_a_wrong_window_would_be_seen(project, whole, right, wrong, tmp_path):
    copied = shutil.copytree(project, tmp_path / "wrong")
    edit(copied, "train.py", (right, wrong))
    assert distance(whole, trained(copied, "wrong.pt", 2, *ACCUMULATE)) > 1e-6


def test_a_copy_runs_in_another_project(tmp_path):
    # a stray package of the same name one level up must not win over the copied one
    stray = tmp_path / "common"
    stray.mkdir()
    (stray / "__init__.py").write_text("raise ImportError('the wrong common')")
    script = copy_project(tmp_path / "my project", FOLDER / "train.py")
    command = ["torchrun", "--standalone", "--nproc-per-node=2", script, "--epochs", 1, "--data-dir", DIGITS]
    result = run(command, tmp_path, OMP_NUM_THREADS="1")
    assert result.code == 0, result
    assert result.epochs()[0]["accuracy"] == f"{bare_accuracy(tmp_path / 'mnist.pt'):.4f}", result


def test_a_compiled_model_trains_and_its_weights_have_the_plain_names(small, tmp_path):
    # aot_eager takes all steps of a compilation but the last, which needs a C++ compiler and minutes
    weights = tmp_path / "weights.pt"
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py", "--data-dir", "common", "--compile"]
    command += ["--accumulate", 2, "--output", weights]
    result = run(command, small, COMPILE_BACKEND="aot_eager", OMP_NUM_THREADS="1", **WITNESS)
    assert result.code == 0, result
    assert float(result.epochs()[-1]["accuracy"]) > 0.5, result
    assert result.epochs()[-1]["accuracy"] == f"{bare_accuracy(weights):.4f}", result


def test_exits_cleanly_every_time(small):
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py", "--epochs", 1, "--data-dir", "common"]
    for _ in range(5):
        result = run(command, small, limit=60, OMP_NUM_THREADS="1")
        assert result.code == 0, result
        assert result.errors == "", result


def test_one_bar_with_the_loss_and_only_on_a_terminal(small):
    # every other test sees a pipe, and test_exits_cleanly_every_time that nothing at all is written there
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    launch = ["timeout", "120", "torchrun", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "train.py", "--epochs", "1", "--data-dir", "common"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=small, env=environment, stdout=subprocess.DEVNULL, stderr=end)
    os.close(end)
    seen = b""
    with contextlib.suppress(OSError):  # which is how the end of a terminal shows
        while part := os.read(terminal, 4096):
            seen += part
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert seen.count(b"epoch 1/1:   0%|") == 2, seen  # empty, then with the first loss
    assert re.search(rb"0/10 \[\d\d:\d\d<\?, \?it/s, loss=\d\.\d{4}\]", seen), seen


def test_a_failing_rank_ends_the_job(small, tmp_path):
    script, data = small / "train.py", small / "common"
    command = ["torchrun", "--standalone", "--nproc-per-node=2", script, "--epochs", 1, "--data-dir", data]
    result = run(command, tmp_path, limit=60, WITNESS=str(tmp_path / "witness"), FAULTY_RANK="1", **WITNESS)
    assert result.code == 1, result
    assert "RuntimeError: planted by the test" in result.errors
    assert not (tmp_path / "mnist.pt").exists()


def test_without_torchrun_it_says_the_command(tmp_path):
    result = run([sys.executable, FOLDER / "train.py"], tmp_path)
    assert result.code == 2, result
    assert f"start it with torchrun: torchrun --standalone --nproc-per-node=2 {FOLDER / 'train.py'}" in result.errors
    assert len(result.errors.splitlines()) == 2, result


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr("sys.argv", ["train.py"])
    for script in ("train.py", "selftest.py"):
        with pytest.raises(SystemExit):
            load_script(FOLDER / script).parse_args()
        assert "error: each process needs a GPU, torch finds 2: start fewer, or --device cpu" in capsys.readouterr().err


def test_selftest_passes(tmp_path):
    result = run(["bash", RUN, "selftest.py"], tmp_path, NPROC="3")
    assert result.code == 0, result
    lines = result.output.splitlines()
    for rank in range(3):
        assert sum(line.startswith(f"rank {rank} on ") and "gloo" in line for line in lines) == 1, result
    assert sum(line.startswith("all_reduce ") and line.endswith(" GB/s") for line in lines) == 3, result
    assert lines[-1] == f"OK: all checks passed on 3 ranks on {socket.gethostname()}"


@pytest.mark.parametrize("way", ["static", "c10d"])
def test_two_nodes_meet(way, tmp_path):
    settings = {"RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"} if way == "c10d" else {}
    result = run_two_nodes(RUN, ["selftest.py", "selftest.py"], tmp_path, **settings)
    assert result.output == "0 0\n", result
    lines = [line for rank in (0, 1) for line in (tmp_path / f"node{rank}.out").read_text().splitlines()]
    for rank in (0, 1):
        assert sum(line.startswith(f"rank {rank} on ") and line.endswith("world size 2") for line in lines) == 1, lines
    assert lines.count(f"OK: all checks passed on 2 ranks on {socket.gethostname()}") == 1


@pytest.mark.parametrize("script", ["train.py", "selftest.py"])
def test_no_thread_of_the_group_lives_on_at_the_exit(script, small, tmp_path):
    """One that does may need the interpreter's lock when there is none any more: then the process aborts, or hangs."""
    command = ["bash", small / "run.sh", script]
    command += ["--epochs", 1, "--data-dir", small / "common"] if script == "train.py" else []
    result = run(command, tmp_path, THREADS=str(tmp_path / "threads"), **WITNESS)
    assert result.code == 0, result
    assert (tmp_path / "threads").read_text() == "0\n0\n"


def test_a_stop_ends_a_node_of_several(small, tmp_path):
    command = ["bash", small / "run.sh", "--epochs", 10**6, "--data-dir", small / "common"]
    running = Running(command, tmp_path, RDZV_ENDPOINT=f"127.0.0.1:{free_port()}")
    wait_for("epoch 1/", running)
    running.process.terminate()
    result = running.finish(60)
    assert result.code == 1, result
    assert result.errors.splitlines()[-1] == f"error: node {socket.gethostname()} was stopped by SIGTERM"


def test_a_killed_process_starts_again(small, tmp_path):
    command = ["bash", small / "run.sh", "--epochs", 60, "--data-dir", small / "common"]
    running = Running(command, tmp_path, MAX_RESTARTS="1")
    wait_for("epoch 1/", running)
    running.kill("-u", "train.py")
    result = running.finish()
    assert result.code == 0, result
    assert [line["epoch"] for line in result.epochs()].count("1") == 2
    assert result.epochs()[-1]["epoch"] == "60"


def test_selftest_names_the_rank_and_the_check(tmp_path):
    command = ["bash", RUN, "selftest.py", "--timeout", 3]
    result = run(command, tmp_path, WITNESS="/dev/null", FAULTY_RANK="1", **WITNESS)
    assert result.code == 1, result
    last = result.output.splitlines()[-1]
    assert last.startswith("FAILED: all_reduce sum: ") and "rank 1 on " in last, result
    assert "planted by the test" in last


def test_selftest_says_that_the_ranks_cannot_meet(tmp_path):
    result = run(["bash", RUN, "selftest.py", "--timeout", 3], tmp_path, GLOO_SOCKET_IFNAME="nosuch0")
    assert result.code == 1, result
    last = result.output.splitlines()[-1]
    assert last.startswith("FAILED: join: rank 0 on ") and "rank 1 on " in last, result
