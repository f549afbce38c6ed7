"""Only the tests of test_cuda.py see a GPU; each process has one thread."""

import os
import sys

import pytest
import torch
from helpers import ROOT

# before torch is asked for GPUs; all commands inherit it
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(ROOT))  # for common/
# two threads would wait for each other if other processes used the cores
torch.set_num_threads(1)


@pytest.fixture
def float64(monkeypatch):
    """Compute in float64, as tests/small/data.py does, until the test ends."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
