"""02: processes spawned on one machine."""

import pytest
from helpers import ROOT, rejected


@pytest.mark.launch("02_ddp_spawn", "--epochs", 3)
def test_both_ranks_train_evaluate_and_save(launched):
    launched.check()


def test_needs_a_gpu_per_process(monkeypatch, capsys):
    script = ROOT / "02_ddp_spawn/train.py"
    error = rejected(monkeypatch, capsys, script, "--nprocs", 3, gpus=2)
    assert error == "--device cuda needs a GPU per process, and PyTorch finds 2"
