"""Checks that raise an error if ranks differ. All ranks must call them together."""

import time

import torch
import torch.distributed as dist

from common.gather import all_gather


def check_equal(**values):
    """Raise ValueError, which names the value, on all ranks if a value differs."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, values)
    for name in values:
        found = [each[name] for each in every]
        if any(value != found[0] for value in found):
            found = sorted({f"{value}" for value in found})
            raise ValueError(f"{name} differs between the ranks: {found}")


def check_same_model(model):
    """Raise ValueError if a weight is NaN or weights or gradients differ between ranks.

    It reads up to 64 numbers of each tensor: a NaN soon spreads to all. They may differ
    by 0.001 of their norm, because different CPU models round differently.
    """
    names, samples = [], []
    for name, weight in model.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for kind, tensor in (("weight", weight.detach()), ("gradient", gradient)):
            sample = tensor.to_dense().flatten()[:: tensor.numel() // 64 + 1].double()
            if kind == "gradient":  # inf and NaN are normal with a GradScaler
                sample = sample.nan_to_num()
            samples.append(torch.stack([sample, sample.norm().expand_as(sample)]))
            names += [f"the {kind} of {name}"] * len(sample)
    sample, norm = all_gather(torch.cat(samples, dim=1)).unbind(1)
    close = (sample - sample[0]).abs() <= 1e-3 * norm[0]
    differs = ~(close | (sample == sample[0])).all(0)  # NaN is not equal to itself
    if differs.any():
        name = names[differs.nonzero()[0]]
        raise ValueError(f"{name} differs between the ranks, or is NaN")


def wait_for_file(path, seconds=90):
    """Return whether a file exists, once all ranks agree: NFS may show it late.

    Raises TimeoutError if they still disagree after this time, which means that the
    machines do not share this disk.
    """
    for _ in range(seconds):
        try:
            found = bool(path.stat())
        except FileNotFoundError:  # exists() could hide a disk error
            found = False
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, found)
        if len(set(seen)) == 1:
            return found
        time.sleep(1)
    raise TimeoutError(f"{seen.count(False)} ranks do not see {path}")
