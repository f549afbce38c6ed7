"""04: processes started by torchrun."""

import fcntl
import os
import pty
import re
import shutil
import socket
import struct
import termios
from pathlib import Path

import pytest
from helpers import (
    FEW,
    ROOT,
    WITNESS,
    check_trained,
    copy_project,
    distance,
    edit,
    parse,
    rejected,
    run_ranks,
    splittable,
    trained,
)

FOLDER = ROOT / "04_ddp_torchrun"


@pytest.mark.launch("04_ddp_torchrun", "--epochs", 3)
def test_both_ranks_train_evaluate_and_save(launched):
    launched.check()


def test_a_copy_trains_three_ranks_with_a_remainder(tmp_path):
    """Neither the test images nor the last batch can be split equally."""
    project = copy_project(tmp_path / "my project", FOLDER / "train.py")
    decoy = tmp_path / "common"  # one level up, where the repository has it: the copy must win
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise ImportError('the wrong common')")
    options = ["--data-dir", "common", "--batch-size", 50, "--epochs", 1]
    witness = {**WITNESS, "WITNESS": project / "witness"}
    result = run_ranks("train.py", 3, *options, cwd=project, **witness)
    check_trained(result, project, epochs=1, ranks=3, at_least=0)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return splittable(tmp_path_factory.mktemp("project"))


# The last of a rank's steps has 54 of 96 images: three micro-batches, of which the third is short
ACCUMULATE = ["--batch-size", 24, "--accumulate", 4]


@pytest.fixture(scope="module")
def whole(project):
    return trained(project, 1, "--batch-size", 192)


def test_two_ranks_take_the_steps_of_one_with_the_whole_batch(project, whole):
    assert distance(whole, trained(project, 2, "--batch-size", 96)) < 1e-12


def test_accumulated_micro_batches_take_the_steps_of_a_whole_batch(project, whole):
    assert distance(whole, trained(project, 2, *ACCUMULATE)) < 1e-12


def test_gradients_are_synchronised_once_per_step_and_epochs_differ(project):
    line = "loss = criterion(model(images), labels)"
    show = "print('batch', model.require_backward_grad_sync, *labels.tolist(), flush=True)"
    shutil.copy(project / "train.py", project / "show.py")
    edit(project, "show.py", (line, f"{show}; {line}"))
    options = ["--data-dir", "common", "--epochs", 2, *ACCUMULATE]
    result = run_ranks("show.py", 1, *options, cwd=project)
    assert result.code == 0, result
    shown = re.findall(r"^batch (\w+) (.*)", result.output, re.M)
    steps, rest = divmod(FEW, 4 * 24)
    assert 0 < rest <= 24  # the last step has one micro-batch
    epoch = ["False", "False", "False", "True"] * steps + ["True"]
    assert [synchronises for synchronises, _ in shown] == epoch * 2
    labels = [labels for _, labels in shown]
    assert labels[: len(epoch)] != labels[len(epoch) :]  # shuffled from scratch


def test_one_progress_bar_with_the_loss_on_a_terminal(project):
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    options = ["--epochs", 1, "--data-dir", "common"]
    result = run_ranks("train.py", 2, *options, cwd=project, errors=Path(os.ttyname(end)))
    assert result.code == 0, result
    os.set_blocking(terminal, False)
    seen = os.read(terminal, 65536)
    os.close(end)
    os.close(terminal)
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


@pytest.mark.launch("04_ddp_torchrun", "selftest.py")
def test_selftest_passes(launched):
    result = launched.finish()
    assert result.code == 0, result
    lines = result.output.splitlines()
    for rank in range(2):
        assert len([line for line in lines if line.startswith(f"rank {rank} on ")]) == 1, result
    speeds = [line for line in lines if line.startswith("all_reduce ") and "GB/s" in line]
    assert len(speeds) == 3, result
    assert lines[-1] == f"OK: all checks passed on 2 ranks on {socket.gethostname()}"


@pytest.mark.parametrize(("settings", "check", "error"), [
    ({"FAULTY_RANK": "1"}, "all reduce sum on cpu", "RuntimeError: planted by the test\n"),
    ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "join", ""),
])
def test_selftest_names_the_rank_and_the_check_that_failed(settings, check, error, tmp_path):
    settings = {"WITNESS": os.devnull, **WITNESS, **settings}
    result = run_ranks(FOLDER / "selftest.py", 2, "--timeout", 5, cwd=tmp_path, **settings)
    assert result.code == 1, result
    failed = [line for line in result.output.splitlines() if line.startswith("FAILED: ")]
    assert all(line.startswith(f"FAILED: {check}: rank ") for line in failed), result
    assert f"FAILED: {check}: rank 1 on {socket.gethostname()}: {error}" in result.output, result
