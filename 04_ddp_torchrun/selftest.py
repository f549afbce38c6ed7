"""Check that all processes of a job can communicate: run it first on new machines.

torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/selftest.py
"""

import argparse
import copy
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.gather import all_gather
from common.model import ConvNet

SIZES = {"cpu": (1, 8, 64), "cuda": (1, 8, 64, 512)}  # MiB


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--timeout", type=int, default=60, help="seconds for each check: %(default)s")
    # ignored: 07_slurm/run.sh passes them to every script
    add("--checkpoint", help=argparse.SUPPRESS)
    add("--output", help=argparse.SUPPRESS)
    return parser.parse_args()


def selftest(args):
    """Run all checks; a rank that fails one prints the reason and exits with 1."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    me = f"rank {rank} on {socket.gethostname()}"
    if args.device == "cuda":
        device = device_id = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # one group for tensors on the CPU and on the GPU, where 07 has one for each
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, device_id = torch.device("cpu"), None
        backend = "gloo"
    # a single write, so that the lines of two ranks do not mix
    print(f"{me}: {device}, {backend}, world size {world_size}\n", end="", flush=True)

    # rank r has row r
    table = torch.arange(1.0, world_size**2 + 1).view(world_size, world_size)

    def row(device):
        return table[rank].to(device, copy=True)

    def join():
        # longer than run_check() waits: NCCL would end the process without a reason
        timeout = timedelta(seconds=args.timeout + 30)
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)

    def all_reduce_sum(device):
        mine = row(device)
        dist.all_reduce(mine)
        return mine, table.sum(0)

    def broadcast(device):
        mine = row(device)
        dist.broadcast(mine, src=world_size - 1)
        return mine, table[-1]

    def all_gather_rows(device):
        return all_gather(row(device)), table

    def reduce_scatter(device):
        mine = torch.zeros(1, device=device)
        dist.reduce_scatter(mine, list(row(device).split(1)))
        return mine, table.sum(0)[rank : rank + 1]

    def ddp_step(device):
        """Compare the averaged gradients with those of one process, in float64."""
        torch.manual_seed(0)
        # eval(): BatchNorm would normalise each rank's images on their own
        alone = ConvNet().to(device, torch.float64).eval()
        together = DDP(copy.deepcopy(alone))
        images = torch.rand(4 * world_size, 1, 28, 28, device=device).double()
        labels = torch.arange(4 * world_size, device=device) % 10
        F.cross_entropy(alone(images), labels).backward()
        images, labels = [part.chunk(world_size)[rank] for part in (images, labels)]
        F.cross_entropy(together(images), labels).backward()
        return [
            [parameter.grad for parameter in model.parameters()]
            for model in (together, alone)
        ]

    os.environ.setdefault("NCCL_DEBUG", "WARN")  # NCCL prints why it failed
    # DDP(...) imports torch's compiler, which takes seconds: here without a time limit
    torch.compiler.reset()
    run_check("join: connect to all ranks, on free ports", me, args.timeout, join)
    checks = [all_reduce_sum, broadcast, all_gather_rows, reduce_scatter, ddp_step]
    for checked in dict.fromkeys((torch.device("cpu"), device)):
        for check in checks:
            title = f"{check.__name__.replace('_', ' ')} on {checked.type}"
            run_check(title, me, args.timeout, check, checked)
    if world_size > 1:
        for size in SIZES[device.type]:
            title = f"{size} MiB on {device.type}"
            run_check(title, me, args.timeout, report_bandwidth, device, size)
    hosts = [None] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    if rank == 0:
        names = ", ".join(dict.fromkeys(hosts))
        print(f"OK: all checks passed on {world_size} ranks on {names}", flush=True)


def run_check(title, me, timeout, check, *arguments):
    """Run one check, which may return a result and what it should be.

    If it fails, or takes more seconds than timeout, end this process with code 1.
    """

    def fail(reason):
        print(f"FAILED: {title}: {me}: {reason}\n", end="", flush=True)
        os._exit(1)  # not sys.exit: a thread of the process group may be stuck

    # a plain timer, as NCCL's timeout does not cover the creation of its communicator
    timer = threading.Timer(timeout, fail, [f"no answer within {timeout} s"])
    timer.start()
    try:
        answer = check(*arguments)
        if answer:
            torch.testing.assert_close(*answer, check_device=False)
    except Exception as error:
        # the whole message, because NCCL's reason is in its last line
        fail(f"{type(error).__name__}: {error}")
    timer.cancel()


def report_bandwidth(device, mebibytes):
    """Print the mean time of all_reduce and its bus bandwidth, as nccl-tests do."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.zeros(mebibytes * 2**18, device=device)  # float32
    calls = 20 if mebibytes < 64 else 5  # at 1 Gbit/s a call with 512 MiB takes 9 s
    dist.all_reduce(tensor)  # the first one also connects
    tensor[0].item()  # waits for the GPU
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor)
    tensor[0].item()
    seconds = (time.perf_counter() - start) / calls
    speed = mebibytes * 2**20 / 1e9 / seconds * 2 * (world_size - 1) / world_size
    if rank == 0:
        print(
            f"all_reduce {mebibytes:3} MiB  {seconds * 1e3:8.2f} ms  {speed:7.2f} GB/s",
            flush=True,
        )


if __name__ == "__main__":
    selftest(parse_args())
    dist.destroy_process_group()  # after selftest() has released the model
