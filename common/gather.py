"""DDP-6: all_gather helpers. All ranks of the default group call them and get the same result.

Gradients do not flow through them: torch.distributed.all_gather returns tensors without a graph.
"""

import time

import torch
import torch.distributed as dist

# DDP(...) imports this, too, but its functions keep the group of that moment as their default. So
# import it before there is one, or the group and its threads live until the exit, which may abort.
import torch.distributed.nn


def all_gather(tensor):
    """Stack the ranks' tensors, all of one shape and dtype: [...] to [world_size, ...]."""
    tensor = tensor.contiguous()  # NCCL copies memory: parts in another order would get it mixed up
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def all_gather_ragged(tensor):
    """List the ranks' tensors, which may differ in length: [n, ...] to a list of [n_rank, ...]."""
    lengths = all_gather(torch.tensor(len(tensor), device=tensor.device)).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])  # unequal shapes corrupt the result
    padded[: len(tensor)] = tensor
    return [part[:length] for part, length in zip(all_gather(padded), lengths, strict=True)]


def gather_in_order(tensor, length):
    """Join the ranks' results for their samples in data set order: [n, ...] to [length, ...].

    The samples must have been dealt out in turn: by DistributedSampler(data_set, shuffle=False),
    whose padding is dropped, or by range(rank, length, world_size), which has none. Raises
    ValueError on a rank with a different number of rows, before any communication.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = -(-length // world_size)  # rounded up, as with padding
    if len(tensor) not in (rows, len(range(rank, length, world_size))):
        raise ValueError(
            f"{length} samples on {world_size} ranks need {rows} rows on each, one per sample, and "
            f"rank {rank} has {len(tensor)}: use all_gather_ragged for other shards"
        )
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return all_gather(padded).transpose(0, 1).flatten(0, 1)[:length]


def check_equal(name, value, tolerance=0):
    """Raise ValueError on all ranks if their values differ; of dictionaries it shows what differs.

    value: plain values, as == compares them; or, with a relative tolerance, a number, which must be
    finite, too. No tensor: == compares it element by element.
    """
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    first = values[0]
    if tolerance:  # a comparison with nan is false, and inf - inf is nan
        equal = all(abs(each - first) <= tolerance * abs(first) for each in values)
    else:
        equal = all(each == first for each in values)
    if not equal:
        if all(isinstance(each, dict) for each in values):
            same = [key for key in first if all(first[key] == each.get(key) for each in values)]
            values = [{key: each[key] for key in each if key not in same} for each in values]
        shown = ", ".join(f"{each}"[:300] for each in values)  # there may be thousands of names
        raise ValueError(f"{name} of the ranks differ, or are not finite: [{shown}]")


def wait_for_file(path, seconds=90):
    """Return whether a rank sees this file; if one does, wait until all do, or raise ValueError.

    NFS may show a node late what another one has just written: it caches which names are missing.
    """
    for _ in range(seconds):
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, path.exists())
        if len({*seen}) == 1:
            return seen[0]
        time.sleep(1)
    missing = seen.count(False)
    raise ValueError(f"{path} is not on a disk that all nodes share: {missing} ranks do not see it")
