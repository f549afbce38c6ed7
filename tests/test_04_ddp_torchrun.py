"""04: processes started by torchrun."""

import os
import re
import signal
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.checks import EXACT, check_as_one_process, check_trained, distance, launch
from helpers.commands import Running, processes, wait_for, wait_until
from helpers.paths import ROOT
from helpers.projects import copy_project, edit, fewer_digits, splittable, trained
from helpers.ranks import run_ranks
from helpers.scripts import load_script

FOLDER = ROOT / "04_ddp_torchrun"
DATA = ["--data-dir", "common"]


def test_both_ranks_train_evaluate_and_save(exact, tmp_path):
    options = [*EXACT, "--epochs", 2]
    result = launch(exact, "04_ddp_torchrun", *options, cwd=tmp_path, NPROC="2")
    check_as_one_process(result, tmp_path, ranks=2)


def test_a_copy_trains_three_ranks_with_a_remainder(tmp_path):
    """Neither the test images nor the last batch can be split equally."""
    project = copy_project(tmp_path / "my project", FOLDER / "train.py")
    fewer_digits(project, now=140, digits=40)
    decoy = tmp_path / "common"  # one level up, where the repository has it: the copy must win
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise ImportError('the wrong common')")
    options = [*DATA, "--batch-size", 50, "--epochs", 1]
    result = run_ranks("train.py", 3, *options, cwd=project, WITNESS=project / "witness")
    check_trained(result, project, epochs=1, ranks=3, at_least=0)


def test_two_ranks_take_the_steps_of_one_with_the_whole_batch(tmp_path):
    project = splittable(tmp_path / "project")
    fewer_digits(project, now=140, digits=30)
    one, two = [trained(project, nproc, "--batch-size", 192 // nproc) for nproc in (1, 2)]
    assert distance(one, two) < 1e-12


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
    rates = re.findall("^rates (.*)", result.output, re.M)
    rates = torch.tensor([list(map(float, line.split())) for line in rates])
    peak = 0.6 * (128 / 256) ** 0.5
    factors = [n / 9 for n in range(1, 10)] + [n / 12 for n in range(11, 0, -1)]  # up for 8 steps
    expected = [[peak / 10 * factor, peak * factor] for factor in factors]
    torch.testing.assert_close(rates, torch.tensor(expected))
    assert len(set(re.findall("^random (.*)", result.output, re.M))) == 2  # as dropout draws
    weights = torch.load(project / "mnist.pt", weights_only=True)
    assert not weights["layer1.1.running_mean"].any()  # frozen from the first epoch on
    assert weights["layer2.1.running_mean"].all()


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

            wait_until(has_printed, job)
        seen = job.printed()[0].count("epoch ")
        wait_for("epoch ", job, times=seen + 2)
    finally:
        job.kill_all()


def test_selftest_passes(tmp_path):
    result = run_ranks(FOLDER / "selftest.py", 2, cwd=tmp_path)
    lines = re.findall(r"^(rank \d on|all_reduce|OK: all checks passed on 2 ranks on) ",
                       result.output, re.M)
    assert sorted(lines[:2]) == ["rank 0 on", "rank 1 on"], result
    assert lines[2:] == ["all_reduce"] * 3 + ["OK: all checks passed on 2 ranks on"], result


@pytest.mark.parametrize(("settings", "check", "error"), [
    ({"FAULTY_RANK": "1"}, "all reduce sum on cpu", "RuntimeError: planted by the test\n"),
    ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "join", ""),
])
def test_selftest_names_the_rank_and_the_check_that_failed(settings, check, error, tmp_path):
    settings["WITNESS"] = os.devnull
    result = run_ranks(FOLDER / "selftest.py", 2, cwd=tmp_path, code=1, **settings)
    failed = [line for line in result.output.splitlines() if line.startswith("FAILED: ")]
    assert all(line.startswith(f"FAILED: {check}: rank ") for line in failed), result
    assert f"FAILED: {check}: rank 1 on {socket.gethostname()}: {error}" in result.output, result


def test_selftest_notices_wrong_numbers_and_hangs_and_reports_the_bandwidth(monkeypatch, capsys):
    """A check that fails raises the exit code here, and 4 ranks take half a second to reduce."""
    times = iter(0.5 * n for n in range(100))
    monkeypatch.setattr("os._exit", end := mock.Mock(side_effect=SystemExit))
    monkeypatch.setattr("threading.Timer", timer := mock.Mock())
    selftest = load_script(FOLDER / "selftest.py")
    for result, wrong in ((1.5, "0.5"), (0.5, "0.5"), (float("nan"), "nan")):
        with pytest.raises(SystemExit):
            selftest.run_check("sum", "rank 1", 60, lambda: (torch.tensor(result), torch.ones(1)))  # noqa: B023
        assert capsys.readouterr().out == f"FAILED: sum: rank 1: wrong by {wrong}\n"
    assert end.call_args_list == [mock.call(1)] * 3

    # The timer prints FAILED before the process group's own limit ends the process
    monkeypatch.setattr("torch.distributed.init_process_group", join := mock.Mock(side_effect=end))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(SystemExit):
        selftest.selftest(mock.Mock(device="cpu", timeout=60))
    (seconds, _, _), _ = timer.call_args
    assert timer().start.called
    assert 60 <= seconds < join.call_args.kwargs["timeout"].total_seconds()

    # The bus bandwidth, as nccl-tests define it
    monkeypatch.setattr(selftest, "dist", mock.Mock())
    monkeypatch.setattr(selftest, "time", mock.Mock(perf_counter=lambda: next(times)))
    for rank in (1, 0):
        assert "MiB" not in capsys.readouterr().out
        selftest.report_bandwidth(rank, 4, torch.device("cpu"))
    assert "64 MiB    500.00 ms     0.20 GB/s\n" in capsys.readouterr().out
