"""DDP-6: all_gather helpers. All ranks of the default group must call them together.

Gradients do not flow through them: dist.all_gather returns tensors without a graph.
"""

import itertools
import time

import torch
import torch.distributed as dist

# Not used here: DDP(...) imports it, and its functions keep the group of that moment as
# their default. So import it before there is one, or the group and its threads live
# until the exit, which may abort.
import torch.distributed.nn


def all_gather(tensor):
    """Stack the ranks' tensors, of one shape and dtype: [...] to [world_size, ...]."""
    tensor = tensor.contiguous()  # NCCL copies the memory as it lies there
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def all_gather_ragged(tensor):
    """List the ranks' tensors, of any lengths: [n, ...] to a list of [n_rank, ...]."""
    lengths = all_gather(torch.tensor(len(tensor), device=tensor.device)).tolist()
    # unequal shapes would corrupt the result
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = all_gather(padded)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def gather_in_order(tensor, length):
    """Join the ranks' results in data set order: [n, ...] to [length, ...].

    The samples must have been dealt out in turn: by DistributedSampler(data_set,
    shuffle=False), whose padding is dropped, or by range(rank, length, world_size),
    which has none. Raises ValueError on a rank with a different number of rows, before
    any communication.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = -(-length // world_size)  # rounded up, as with padding
    if len(tensor) not in (rows, len(range(rank, length, world_size))):
        raise ValueError(
            f"{length} samples on {world_size} ranks need {rows} rows on each, one per "
            f"sample, and rank {rank} has {len(tensor)}: use all_gather_ragged for "
            "other shards"
        )
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return all_gather(padded).transpose(0, 1).flatten(0, 1)[:length]


def check_equal(*, tolerance=0.0, **values):
    """Raise ValueError on all ranks if a value is not the same on all; it shows which.

    values: plain values, which == compares, and no tensors; or, with a relative
    tolerance, numbers, which must also be finite. A value that a rank does not have
    differs.
    """
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, values)

    def same(value, other):
        if tolerance:  # false for nan, and for infinity, as inf - inf is nan
            return abs(value - other) <= tolerance * abs(other)
        return value == other

    for name in dict.fromkeys(itertools.chain(*every)):  # the names of all ranks
        found = [each.get(name) for each in every]
        missing = any(name not in each for each in every)
        if missing or not all(same(value, found[0]) for value in found):
            shown = ", ".join(f"{each}"[:300] for each in found)
            raise ValueError(
                f"{name} differs between the ranks, or is not finite: [{shown}]"
            )


def wait_for_file(path, seconds=90):
    """Return whether a rank sees this file; if one does, wait until all do.

    NFS may show a node late what another one has written, because it caches which names
    are missing. Raises ValueError if a rank still does not see it after so many
    seconds, and OSError if the disk fails.
    """
    for _ in range(seconds):
        try:
            path.stat()
            found = True
        except FileNotFoundError:  # Path.exists() could hide errors of the disk
            found = False
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, found)
        if len(set(seen)) == 1:
            return found
        time.sleep(1)
    missing = seen.count(False)
    raise ValueError(
        f"{path} is not on a disk that all nodes share: {missing} ranks do not see it"
    )
