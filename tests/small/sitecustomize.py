"""Each Python process runs this first, if PYTHONPATH leads here.

Let torchvision work without its C++ extension, which may be for another build of torch.
"""

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    for name in ("nms", "qnms"):
        arguments = "(Tensor a, Tensor b, float c) -> Tensor"
        torch.library.define(f"torchvision::{name}", arguments)
