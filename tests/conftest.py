"""No test sees a GPU but those of test_cuda.py; all run one thread per process."""

import multiprocessing.forkserver
import os
import sys

import pytest
import torch
from helpers import ROOT

# before anything asks torch; all commands inherit it
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(ROOT))  # for common/
# for helpers.RANKS: it imports torch while pytest does
multiprocessing.forkserver.ensure_running()
# two threads wait for each other where other processes use the cores
torch.set_num_threads(1)


@pytest.fixture
def float64():
    """Compute in it, as the copies with tests/small/data.py do."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
