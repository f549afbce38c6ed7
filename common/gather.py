"""Helpers around all_gather. All ranks of the default group must call them together.

They are not differentiable.
"""

import torch
import torch.distributed as dist

# Not used here. DDP(...) imports this module, and its functions then hold the process
# group as a default argument. Imported now, before there is a group, they hold none, so
# Gloo's threads end in destroy_process_group() and cannot abort the exit.
import torch.distributed.nn


def all_gather(tensor):
    """Stack the ranks' tensors, of one shape and dtype: [...] to [world_size, ...]."""
    tensor = tensor.contiguous()  # NCCL needs contiguous memory
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def all_gather_objects(value):
    """Return a list of the ranks' values, which may be any that pickle takes."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def gather_in_order(tensor, length):
    """Join the ranks' results in the order of the data set: [n, ...] to [length, ...].

    Rank r must have the samples r, r + world_size, ..., as it has with
    DistributedSampler(data_set, shuffle=False), whose padding is dropped. The other
    dimensions must be equal on all ranks. Raises ValueError, before any communication,
    on a rank that does not have one row per sample.
    """
    rows = -(-length // dist.get_world_size())  # rounded up
    if len(tensor) != rows:
        raise ValueError(f"{len(tensor)} rows on this rank, not {rows}")
    return all_gather(tensor).transpose(0, 1).flatten(0, 1)[:length]
