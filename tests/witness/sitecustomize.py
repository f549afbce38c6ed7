"""Put on PYTHONPATH by tests: writes down what each rank brings to an all_reduce, makes one rank fail or sends it a
signal, counts Gloo's threads at the exit, or changes what compiles a model.

A test must see that every rank took part without any branch in the scripts that exists for tests alone.
"""

import os

if "WITNESS" in os.environ:
    import torch.distributed as dist

    real_all_reduce = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if str(dist.get_rank()) == os.environ.get("FAULTY_RANK"):
            raise RuntimeError("planted by the test")
        if tensor.numel() == 1 and tensor.is_floating_point():
            with open(os.environ["WITNESS"], "a") as file:
                file.write(f"{dist.get_rank()} {dist.get_world_size()} {tensor.item()!r}\n")
        return real_all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce

if "SIGNAL_AT_BATCH" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:  # rank, signal, which of the rank's batches
    from torch.utils.data import dataloader

    signalled, number, batch = map(int, os.environ["SIGNAL_AT_BATCH"].split())
    real_next, batches = dataloader._BaseDataLoaderIter.__next__, 0

    def count_and_go_on(self):
        global batches
        batches += 1
        if batches == batch and int(os.environ["RANK"]) == signalled:
            os.kill(os.getpid(), number)
        return real_next(self)

    dataloader._BaseDataLoaderIter.__next__ = count_and_go_on

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
