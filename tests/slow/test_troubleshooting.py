"""Rows of the troubleshooting tables in README and 04, reproduced."""

import os
import re
import socket
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, exit_codes, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

TABLES = "".join((ROOT / page).read_text() for page in ("README.md", "04_ddp_torchrun/README.md"))


def row(text, error=RuntimeError):
    """Expect an error with this text, which stands in one of the tables."""
    assert text in TABLES
    return pytest.raises(error, match=re.escape(text))


def see(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", None, 2, rank)
    net = nn.Linear(2, 1)
    net.unused = nn.Linear(2, 1)
    for find in (False, True):
        model = DDP(net, find_unused_parameters=find)
        text = "Expected to have finished reduction in the prior iteration"
        with nullcontext() if find else row(text):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
    del model  # or the end may wait for a thread of the group, which waits for Python's lock
    with row("EADDRINUSE", dist.DistNetworkError), socket.create_server(("0.0.0.0", 0)) as other:
        dist.TCPStore("127.0.0.1", other.getsockname()[1], is_master=True)
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank == 0:
        with row("Timed out waiting"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="Connection (closed|reset) by peer"):
        for _ in range(100):
            dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    for early in (dist.barrier, lambda: DDP(nn.Linear(1, 1)), lambda: DistributedSampler([1])):
        with row("Default process group has not been initialized", ValueError):
            early()


def test_two_ranks_see_these_messages(tmp_path):
    assert exit_codes(start(see, [(rank, tmp_path) for rank in (0, 1)])) == [0, 0]
