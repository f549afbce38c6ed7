"""Tests of the other files on GPUs, with NCCL. Two ranks may share one GPU."""

import pytest
import test_smoke
import torch
from helpers import ROOT, VISIBLE_GPUS
from test_exact import test_the_selftest_passes  # noqa: F401
from test_resume import (  # noqa: F401
    project,
    start,
    test_different_weights_or_nan_are_not_saved,
    test_interrupted_and_resumed_bit_for_bit,
)
from test_smoke import ONE, SCRIPTS, copy  # noqa: F401

# conftest.py hides the GPUs from all other tests
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)
    GPUS = torch.cuda.device_count()
if not GPUS:
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def see_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/small")
    if GPUS == 1:
        monkeypatch.setenv("ONE_GPU", "1")
    monkeypatch.setattr(test_smoke, "DEVICE", "cuda")
    # a GPU may choose another digit if an image is equally near to two of them
    monkeypatch.setattr(test_smoke, "CLOSE", 2.5 / 359)
    # two nodes on one machine would use GPU 0
    monkeypatch.setitem(SCRIPTS, "04_ddp_torchrun/train.py", (1, ONE))


# how many GPUs the script needs for two processes
NEEDS = dict.fromkeys(SCRIPTS, 2) | {"05_model_parallel/train.py": 4}
del NEEDS["03_ddp_multinode_spawn/train.py"]


@pytest.mark.parametrize("script", NEEDS)
def test_two_processes_train(script, copy, tmp_path):  # noqa: F811
    if NEEDS[script] > GPUS:
        pytest.skip(f"needs {NEEDS[script]} GPUs")
    test_smoke.test_two_processes_train_and_rank_0_saves(script, copy, tmp_path)
