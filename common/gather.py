"""DDP-6: all_gather helpers. All ranks of the default group call one together, and all get the same result."""

import torch
import torch.distributed as dist


def all_gather(tensor):
    """Stack the tensors of all ranks, equal in shape and dtype, in rank order: [...] to [world_size, ...]."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def all_gather_ragged(tensor):
    """List the tensors of all ranks, of any length each, in rank order: [n, ...] to world_size times [n_rank, ...]."""
    lengths = all_gather(torch.tensor(len(tensor), device=tensor.device)).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])  # unequal shapes corrupt all_gather's result on Gloo
    padded[: len(tensor)] = tensor
    return [part[:length] for part, length in zip(all_gather(padded), lengths, strict=True)]


def gather_in_order(tensor, length):
    """Join the results that all ranks have for their samples in data set order: [n, ...] to [length, ...]."""
    # DistributedSampler deals samples out in turn and repeats the first until each rank has n: that padding comes last
    return all_gather(tensor).transpose(0, 1).flatten(0, 1)[:length]
