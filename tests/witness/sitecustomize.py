"""Python reads this file at its start if tests put its folder on PYTHONPATH.

It records which ranks add their losses and who saves, makes one rank fail, sends it a signal,
counts Gloo's threads at the exit, chooses what compiles a model, or declares what torchvision
needs: the scripts have no code for tests only.
"""

import os

if "WITNESS" in os.environ:
    import torch
    import torch.distributed as dist

    real_all_reduce, real_save = dist.all_reduce, torch.save

    def witness(what):
        with open(os.environ["WITNESS"], "a") as file:
            file.write(f"{dist.get_rank()} {dist.get_world_size()} {what}\n")

    def all_reduce(tensor, *args, **kwargs):
        if str(dist.get_rank()) == os.environ.get("FAULTY_RANK"):
            raise RuntimeError("planted by the test")
        if tensor.shape == (2,) and tensor.dtype == torch.float64:  # sum of the losses, images
            witness("adds")
        return real_all_reduce(tensor, *args, **kwargs)

    def save(content, *args, **kwargs):
        if dist.is_initialized() and isinstance(content, dict):  # not DCP's single values
            witness("saves")
        return real_save(content, *args, **kwargs)

    dist.all_reduce, torch.save = all_reduce, save

# SIGNAL_AT_BATCH="1 15 7": rank 1 gets signal 15 when it asks for its 7th batch
if "SIGNAL_AT_BATCH" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
    from torch.utils.data import dataloader

    signalled, number, batch = map(int, os.environ["SIGNAL_AT_BATCH"].split())
    real_next, batches = dataloader._BaseDataLoaderIter.__next__, 0

    def count_and_signal(self):
        global batches
        batches += 1
        if batches == batch and int(os.environ["RANK"]) == signalled:
            os.kill(os.getpid(), number)
        return real_next(self)

    dataloader._BaseDataLoaderIter.__next__ = count_and_signal

if "THREADS" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
    import atexit
    from pathlib import Path

    def count_threads():
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        with open(os.environ["THREADS"], "a") as file:
            file.write(f"{sum('gloo' in name for name in names)}\n")

    atexit.register(count_threads)

if "COMPILE_BACKEND" in os.environ:
    import functools

    import torch

    torch.compile = functools.partial(torch.compile, backend=os.environ["COMPILE_BACKEND"])

if "TORCHVISION_OPERATORS" in os.environ:
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # its C++ extension is for another build of torch, and did not load
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", schema)
