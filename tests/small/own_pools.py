"""Processes beside StopSignals: an error while some of them run.

The error is an OSError if the argument is `no memory`: for the second worker.
"""

import multiprocessing
import os
import subprocess
import sys

import torch.distributed as dist
from torch.utils.data import DataLoader

from common.stops import StopSignals

fork_a_process = os.fork


def fork_the_last_one():
    os.fork = fail_to_fork
    return fork_a_process()


def fail_to_fork():
    raise OSError("no memory")


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stops = StopSignals()
    fork = multiprocessing.get_context("fork")
    pool = fork.Pool(2)
    pool.map(abs, range(9))
    command = subprocess.Popen(["sleep", "1000"])
    print(f"started {command.pid}", flush=True)
    if sys.argv[1] == "no memory":
        os.fork = fork_the_last_one
    batches = stops.iterate(DataLoader(range(99), num_workers=2))
    next(batches)
    raise ValueError("with workers")
