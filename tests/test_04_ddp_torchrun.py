"""04: processes started by torchrun."""

import fcntl
import os
import pty
import re
import shutil
import signal
import socket
import struct
import termios
from pathlib import Path

import pytest
import torch
from helpers.checks import check_trained, distance
from helpers.commands import WITNESS, Running, processes, wait_for, wait_until
from helpers.paths import ROOT
from helpers.projects import copy_project, edit, fewer_digits, splittable, trained
from helpers.ranks import run_ranks
from helpers.scripts import load_script

FOLDER = ROOT / "04_ddp_torchrun"
DATA = ["--data-dir", "common"]


@pytest.mark.launch("04_ddp_torchrun", "--epochs", 3)
def test_both_ranks_train_evaluate_and_save(launched):
    launched.check()


def test_a_copy_trains_three_ranks_with_a_remainder(tmp_path):
    """Neither the test images nor the last batch can be split equally."""
    project = copy_project(tmp_path / "my project", FOLDER / "train.py")
    decoy = tmp_path / "common"  # one level up, where the repository has it: the copy must win
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise ImportError('the wrong common')")
    options = [*DATA, "--batch-size", 50, "--epochs", 1]
    witness = {**WITNESS, "WITNESS": project / "witness"}
    result = run_ranks("train.py", 3, *options, cwd=project, **witness)
    check_trained(result, project, epochs=1, ranks=3, at_least=0)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = splittable(tmp_path_factory.mktemp("project"))
    fewer_digits(project, now=140, digits=60)
    return project


def test_two_ranks_take_the_steps_of_one_with_the_whole_batch(project):
    one, two = [trained(project, nproc, "--batch-size", 192 // nproc) for nproc in (1, 2)]
    assert distance(one, two) < 1e-12


def test_epochs_are_shuffled_differently(project):
    line = "loss = criterion(model(images), labels)"
    shutil.copy(project / "train.py", project / "show.py")
    edit(project, "show.py", (line, f"print('labels', *labels.tolist(), flush=True); {line}"))
    options = [*DATA, "--epochs", 2, "--batch-size", 10**6]  # one step per epoch
    result = run_ranks("show.py", 1, *options, cwd=project)
    first, second = re.findall("^labels (.*)", result.output, re.M)
    assert first != second and sorted(first) == sorted(second)


# What people change in a copy: groups with own rates, a frozen layer, tensors kept by evaluate
ADAPTED = [
    ("SGD(model.parameters(), lr, ", """SGD(
        [{"params": net.layer2.parameters(), "lr": lr / 10}, {"params": net.fc.parameters()}],
        lr, """),
    ("        net.train()\n", "        net.train()\n        net.layer1[1].eval()\n"),
    ("optimizer.step()\n", "optimizer.step(); "
     "rank or print('rates', *[group['lr'] for group in optimizer.param_groups], flush=True)\n"),
    ("loss = criterion(model(images), labels)", "loss = criterion(model(images), labels) + "
     "(kept[-1] * net.fc.weight).sum() * 0 if kept else criterion(model(images), labels)"),
    ("    correct = []\n", "    correct = []\n    kept.append(net.fc.weight * 1)\n"),
    ("MAX_GRAD_NORM =", "kept = []\nMAX_GRAD_NORM ="),
    ("    # 4. Loss", "    print('random', torch.rand(1).item(), flush=True)\n    # 4. Loss"),
]


def test_the_loop_leaves_rates_frozen_layers_and_kept_tensors_alone(tmp_path):
    project = copy_project(tmp_path / "project", FOLDER / "train.py")
    edit(project, "train.py", *ADAPTED)
    result = run_ranks("train.py", 2, *DATA, "--epochs", 2, cwd=project)
    assert result.code == 0, result
    rates = re.findall("^rates (.*)", result.output, re.M)
    rates = torch.tensor([list(map(float, line.split())) for line in rates])
    steps, peak = 2 * 10, 0.6 * (128 / 256) ** 0.5
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (peak / 10, peak)]
    optimizer = torch.optim.SGD(groups)
    factor = load_script(FOLDER / "train.py").warmup_then_decay
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps))
    expected = []
    for _ in range(steps):
        expected.append(scheduler.get_last_lr())
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(rates, torch.tensor(expected))
    assert rates[:, 1].max() > 0.9 * peak
    assert len(set(re.findall("^random (.*)", result.output, re.M))) == 2  # as dropout draws
    weights = torch.load(project / "mnist.pt", weights_only=True)
    assert not weights["layer1.1.running_mean"].any()  # frozen from the first epoch on
    assert weights["layer2.1.running_mean"].all()


def test_one_progress_bar_on_a_terminal(project):
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    options = [*DATA, "--epochs", 1]
    result = run_ranks("train.py", 2, *options, cwd=project, errors=Path(os.ttyname(end)))
    assert result.code == 0, result
    os.set_blocking(terminal, False)
    seen = os.read(terminal, 65536)
    os.close(end)
    os.close(terminal)
    assert seen.count(b"epoch 1/1:   0%|") == 1, seen
    assert re.search(rb"\| 0/5 \[00:00<\?, \?it/s\]", seen), seen


def test_sigusr1_prints_where_every_rank_is(tmp_path):
    """As by pkill -USR1 -f -- '-u .*train.py', which does not reach torchrun: it would end."""
    project = copy_project(tmp_path / "project", FOLDER / "train.py", "run.sh")
    command = ["bash", "run.sh", *DATA, "--epochs", 10**6]
    job = Running(command, project, NPROC="2", OMP_NUM_THREADS="1")
    try:
        wait_for("epoch 1/", job)
        ranks = [process for process in processes(job.token) if re.search(
            "-u .*train.py", Path(f"/proc/{process}/cmdline").read_text().replace("\0", " "))]
        assert len(ranks) == 2
        for number, rank in enumerate(ranks, start=1):  # one by one, or their lines mix
            os.kill(rank, signal.SIGUSR1)

            def has_printed(number=number):  # that train was called in main, which was called
                frames = re.findall(r'train\.py", line \d+ in (\w+)', job.printed()[1])
                return all(frames.count(name) >= number for name in ("train", "main"))

            wait_until(has_printed, job, limit=60)
        seen = job.printed()[0].count("epoch ")
        wait_for("epoch ", job, times=seen + 2)
    finally:
        job.kill_all()


def test_selftest_passes(tmp_path):
    result = run_ranks(FOLDER / "selftest.py", 2, cwd=tmp_path)
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
