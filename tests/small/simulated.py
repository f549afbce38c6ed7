"""Replaces common/__init__.py: for simulated GPUs, which lack some kernels.

SDPA=math computes attention without fused kernels, COMPILE=eager compiles without
Triton.
"""

import functools
import os

import torch

if os.environ.get("SDPA") == "math":
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
if os.environ.get("COMPILE") == "eager":
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
