"""No test sees a GPU but those of test_cuda.py; all run one thread per process."""

import os
import sys

import pytest
import torch
from helpers import ROOT

# before anything asks torch; all commands inherit it
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(ROOT))  # for common/
# two threads wait for each other where other processes use the cores
torch.set_num_threads(1)


@pytest.fixture
def float64(monkeypatch):
    """Compute in it, as tests/small/data.py does, until the test ends."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
