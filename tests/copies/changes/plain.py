"""Compute in float64, and without what would hide a wrong divisor."""

import torch


def change(script, rank):
    torch.set_default_dtype(torch.float64)
    torch.optim.AdamW = torch.optim.SGD
    script.MAX_GRAD_NORM = 1e9
