"""Prints by how many GB a step of memory.py's model raises the resident memory of each rank."""

import gc
import re
import sys
from pathlib import Path

import memory
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP


def resident(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024 / 1e9


def peak(depth):
    memory.DEPTH = depth
    model = memory.Model(recompute=False)
    for module in (*model.blocks, model) if sys.argv[1] == "fsdp" else ():
        fully_shard(module)
    model = DDP(model, gradient_as_bucket_view=True) if sys.argv[1] == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # the maximum begins again
        memory.loss_of(model).backward()
        most = resident("VmHWM")
        optimizer.step()
        optimizer.zero_grad()
    return most


dist.init_process_group("gloo")
peak(depth=1)  # loads libraries
gc.collect()
before = resident("VmRSS")
print(f"peak {peak(depth=8) - before:.3f} GB\n", end="", flush=True)
dist.destroy_process_group()
