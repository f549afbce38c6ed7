"""Checks that raise an error if ranks differ. All ranks must call them together."""

import time

import torch

from common.gather import all_gather, all_gather_objects


def check_equal(**values):
    """Raise ValueError, which names the value, on all ranks if a value differs."""
    every = all_gather_objects(values)
    for name in values:
        found = [each.get(name) for each in every]
        if any(value != found[0] for value in found):
            found = sorted({f"{value}" for value in found})
            raise ValueError(f"{name} differs between the ranks: {found}")


def check_same_model(model):
    """Raise ValueError if a weight is NaN or weights or gradients differ between ranks.

    It looks for NaN in all weights, and compares up to 64 numbers of each tensor. They
    may differ by 0.001 of their norm, because different CPU models round differently.
    Of FSDP's shards, it compares only their order and which have a gradient.
    """
    names, samples = [], []
    for name, weight in model.named_parameters():
        for kind, tensor in (("weight", weight.detach()), ("gradient", weight.grad)):
            if tensor is None:
                continue
            if hasattr(tensor, "to_local"):  # FSDP: each rank has another shard
                tensor = 0 * tensor.to_local().sum()  # or NaN
            sample = tensor.to_dense().flatten()[:: tensor.numel() // 64 + 1].double()
            if kind == "gradient":  # inf and NaN are normal with a GradScaler
                sample = sample.nan_to_num()
            else:  # also a NaN that is not in the sample
                sample = sample.masked_fill(tensor.isnan().any(), torch.nan)
            samples.append(torch.stack([sample, sample.norm().expand_as(sample)]))
            names += [f"the {kind} of {name}"] * len(sample)
    # DDP and FSDP pair the tensors of the ranks by their position
    check_equal(**{f"the position of {name}": n for n, name in enumerate(names)})
    sample, norm = all_gather(torch.cat(samples, dim=1)).unbind(1)
    close = (sample - sample[0]).abs() <= 1e-3 * norm[0]
    same = close | (sample == sample[0])  # inf - inf is NaN, which is never equal
    for place in (~same.all(0)).nonzero():
        raise ValueError(f"{names[place]} differs between the ranks, or is NaN")


def wait_for_file(path, seconds=90):
    """Return whether a file exists, once all ranks agree: NFS may show it late.

    Raises TimeoutError if they still disagree after this time, which means that the
    machines do not share this disk.
    """
    all_gather_objects(None)  # wait for the rank that has just written it
    for _ in range(seconds):
        try:
            found = bool(path.stat())
        except FileNotFoundError:  # exists() could hide a disk error
            found = False
        seen = all_gather_objects(found)
        if len(set(seen)) == 1:
            return found
        time.sleep(1)
    raise TimeoutError(f"{seen.count(False)} ranks do not see {path}")
