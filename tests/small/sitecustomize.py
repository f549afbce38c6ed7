"""Each Python process runs this first, if PYTHONPATH leads here.

Let torchvision work without its C++ extension, which may be for another build of torch.
With SDPA=math, compute attention without fused kernels, which simulated GPUs lack.
"""

import os

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    for name in ("nms", "qnms"):
        arguments = "(Tensor a, Tensor b, float c) -> Tensor"
        torch.library.define(f"torchvision::{name}", arguments)
if os.environ.get("SDPA") == "math":
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
