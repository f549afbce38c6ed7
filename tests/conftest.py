"""Only the tests of test_cuda.py see a GPU; each process has one thread."""

import os
import sys

import torch
from helpers import ROOT

# before torch is asked for GPUs; all commands inherit it
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(ROOT))  # for common/
# two threads would wait for each other if other processes used the cores
torch.set_num_threads(1)
