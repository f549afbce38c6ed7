"""DDP-6: all_gather helpers. All ranks of the default group call them and get the same result."""

import torch
import torch.distributed as dist


def all_gather(tensor):
    """Stack the ranks' tensors, all of one shape and dtype: [...] to [world_size, ...]."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def all_gather_ragged(tensor):
    """List the ranks' tensors, which may differ in length: [n, ...] to a list of [n_rank, ...]."""
    lengths = all_gather(torch.tensor(len(tensor), device=tensor.device)).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])  # unequal shapes corrupt the result
    padded[: len(tensor)] = tensor
    return [part[:length] for part, length in zip(all_gather(padded), lengths, strict=True)]


def gather_in_order(tensor, length):
    """Join the ranks' results for their samples in data set order: [n, ...] to [length, ...].

    DistributedSampler deals out the samples in turn; its padding is at the end and is dropped.
    """
    return all_gather(tensor).transpose(0, 1).flatten(0, 1)[:length]
