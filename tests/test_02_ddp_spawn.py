"""02: processes spawned on one machine."""

import pytest
from helpers import ROOT, check_two_ranks, copy_project, fewer_digits, rejected

FOLDER = ROOT / "02_ddp_spawn"


def test_both_ranks_train_evaluate_and_save(tmp_path):
    project = tmp_path / "my project"
    copy_project(project, FOLDER / "train.py", "run.sh")
    fewer_digits(project)
    run, data = project / "run.sh", project / "common"
    check_two_ranks(run, tmp_path, epochs=3, at_least=0.6, data=data)


def test_needs_a_gpu_per_process(monkeypatch, capsys):
    error = rejected(monkeypatch, capsys, FOLDER / "train.py", "--nprocs", 3, gpus=2)
    assert error == "--device cuda needs a GPU per process, and PyTorch finds 2"


@pytest.mark.parametrize("folder", ["02_ddp_spawn", "03_ddp_multinode_spawn", "04_ddp_torchrun",
                                    "06_checkpointing", "07_slurm", "08_docker"])
def test_sync_bn_needs_gpus(folder, monkeypatch, capsys):
    script = ROOT / folder / "train.py"
    error = rejected(monkeypatch, capsys, script, "--sync-bn", LOCAL_RANK=0)
    assert error == "--sync-bn needs GPUs"
