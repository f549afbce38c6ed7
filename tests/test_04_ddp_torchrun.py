"""04: processes started by torchrun."""

import contextlib
import fcntl
import os
import pty
import re
import socket
import struct
import subprocess
import termios

import pytest
from helpers import (
    DIGITS,
    ROOT,
    WITNESS,
    bare_accuracy,
    check_two_ranks,
    check_witness,
    copy_project,
    distance,
    edit,
    fewer_digits,
    parse,
    rejected,
    run,
    run_ranks,
    run_two_nodes,
    torchrun,
    without_batch_norm,
)

FOLDER = ROOT / "04_ddp_torchrun"
RUN = FOLDER / "run.sh"


def test_both_ranks_train_evaluate_and_save(tmp_path):
    check_two_ranks(RUN, tmp_path, "--epochs", 1, epochs=1)


def test_a_copy_trains_three_ranks_with_a_remainder(tmp_path):
    """Neither the test images nor the last batch can be split equally; --amp is for training."""
    project, witness = tmp_path / "my project", tmp_path / "witness"
    copy_project(project, FOLDER / "train.py")
    fewer_digits(project)
    decoy = tmp_path / "common"  # one level up, where the repository has it: the copy must win
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise ImportError('the wrong common')")
    options = ["--data-dir", "common", "--batch-size", 50, "--amp"]
    options = [*options, "--output", tmp_path / "weights.pt"]
    result = torchrun("train.py", 3, *options, cwd=project, WITNESS=str(witness), **WITNESS)
    assert result.code == 0, result
    epochs = result.epochs()
    assert len(epochs) == 3, result
    assert epochs[-1]["accuracy"] == f"{bare_accuracy(tmp_path / 'weights.pt'):.4f}", result
    check_witness(witness, epochs, world_size=3, images=140 * 9)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with few digits, a network whose batch may be split, and no clipping of gradients.

    Clipping would hide a wrong divisor: it gives every large gradient the same norm.
    """
    project = tmp_path_factory.mktemp("project")
    copy_project(project, FOLDER / "train.py")
    edit(project, "train.py", ("model.parameters(), 1.0)", "model.parameters(), 1e9)"))
    fewer_digits(project)
    without_batch_norm(project)
    return project


def trained(project, nproc, *options, script="train.py"):
    """The weights after two epochs."""
    name = f"weights-{len(list(project.glob('*.pt')))}.pt"
    options = ["--data-dir", "common", "--epochs", 2, "--lr", 0.01, "--output", name, *options]
    result = run_ranks(script, nproc, *options, cwd=project)
    assert result.code == 0, result
    return project / name


# The last of a rank's steps has 54 of 96 images: three micro-batches, of which the third is short
ACCUMULATE = ["--batch-size", 24, "--accumulate", 4]


@pytest.fixture(scope="module")
def whole(project):
    """The weights of one process with batches of 192."""
    return trained(project, 1, "--batch-size", 192)


def test_two_ranks_take_the_steps_of_one_with_the_whole_batch(project, whole):
    assert distance(whole, trained(project, 2, "--batch-size", 96)) < 1e-12


def test_accumulated_micro_batches_take_the_steps_of_a_whole_batch(project, whole):
    assert distance(whole, trained(project, 2, *ACCUMULATE)) < 1e-12


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("len(labels) / images_in_step)", "1 / args.accumulate)"),  # the last step has fewer
        ("part * args.batch_size >= images_in_step", "part == args.accumulate"),  # never, there
    ],
)
def test_a_mistake_in_the_last_step_would_be_seen(right, wrong, project, whole):
    text = (project / "train.py").read_text()
    assert right in text
    (project / "wrong.py").write_text(text.replace(right, wrong))
    different = distance(whole, trained(project, 2, *ACCUMULATE, script="wrong.py"))
    assert different > 1e-6


def test_one_progress_bar_with_the_loss_on_a_terminal(project):
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    command = ["timeout", "120", "torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    command += ["--epochs", "1", "--data-dir", "common"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.DEVNULL, stderr=end
    )
    os.close(end)
    seen = b""
    with contextlib.suppress(OSError):  # raised when the terminal has no more writers
        while part := os.read(terminal, 4096):
            seen += part
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert seen.count(b"epoch 1/1:   0%|") == 2, seen  # empty, then with the first loss
    assert re.search(rb"0/10 \[\d\d:\d\d<\?, \?it/s, loss=\d\.\d{4}\]", seen), seen


@pytest.mark.parametrize("script", ["train.py", "selftest.py"])
def test_needs_torchrun_and_a_gpu_per_process(script, monkeypatch, capsys):
    error = rejected(monkeypatch, capsys, FOLDER / script)
    assert error.endswith(f"torchrun --standalone --nproc-per-node=2 {script}")
    settings = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3}
    error = rejected(monkeypatch, capsys, FOLDER / script, gpus=2, **settings)
    assert error == "--device cuda needs a GPU per process, and PyTorch finds 2"
    assert parse(monkeypatch, FOLDER / script, gpus=3, **settings).device == "cuda"


def test_nodes_with_different_data_end_with_one_line(tmp_path):
    raw = tmp_path / "damaged/MNIST/raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (raw / f"{part}-{kind}-ubyte").write_bytes(b"not what it should be")
    options = [f"--data-dir '{folder}'" for folder in (DIGITS, tmp_path / "damaged")]
    result = run_two_nodes(RUN, options, tmp_path)
    assert result.output == "1 1\n", result
    printed = "".join((tmp_path / f"node{node}.err").read_text() for node in (0, 1))
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    host = socket.gethostname()
    found = f"a damaged MNIST on {host}, the bundled digits on {host}"
    data = f"copy MNIST to {DIGITS} on every node"
    assert errors == [f"error: the nodes have different data ({found}): {data}"], printed
    assert not (tmp_path / "mnist.pt").exists()


def test_selftest_passes(tmp_path):
    result = run(["bash", RUN, "selftest.py"], tmp_path, NPROC="3")
    assert result.code == 0, result
    lines = result.output.splitlines()
    for rank in range(3):
        assert len([line for line in lines if line.startswith(f"rank {rank} on ")]) == 1, result
    speeds = [line for line in lines if line.startswith("all_reduce ") and "GB/s" in line]
    assert len(speeds) == 3, result
    assert lines[-1] == f"OK: all checks passed on 3 ranks on {socket.gethostname()}"


def test_selftest_names_the_rank_and_the_check_that_failed(tmp_path):
    settings = {"WITNESS": os.devnull, "FAULTY_RANK": "1", **WITNESS}
    result = torchrun(FOLDER / "selftest.py", 2, "--timeout", 5, cwd=tmp_path, **settings)
    assert result.code == 1, result
    lines = [line for line in result.output.splitlines() if line.startswith("FAILED: ")]
    name = f"rank 1 on {socket.gethostname()}"
    failed = f"FAILED: all reduce sum on cpu: {name}: RuntimeError: planted by the test"
    assert failed in lines, result


def test_selftest_reports_a_rank_that_cannot_join(tmp_path):
    command = ["--timeout", 5]
    settings = {"GLOO_SOCKET_IFNAME": "nosuch0"}
    result = torchrun(FOLDER / "selftest.py", 2, *command, cwd=tmp_path, **settings)
    assert result.code == 1, result
    lines = [line for line in result.output.splitlines() if line.startswith("FAILED: ")]
    assert lines and all(line.startswith("FAILED: join: rank ") for line in lines), result
