r"""Check that all processes of a job can communicate: run it first on a new machine or cluster.

    torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/selftest.py

On two machines, where 10.0.0.1 is an address of the first; on the second with --node-rank=1:

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 \
        04_ddp_torchrun/selftest.py
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

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # if common/ is not next to this
from common.gather import all_gather
from common.model import ConvNet

SIZES = {"cpu": (1, 8, 64), "cuda": (1, 8, 64, 512)}  # MiB


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu", help="what to check")
    add("--timeout", type=int, default=60, help="time limit of each check in seconds")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of this file show")
    return args


def selftest(args):
    """Run all checks; every rank that fails one prints a line with the reason and exits with 1."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")
    me = f"rank {rank} on {socket.gethostname()}"
    backend, device_id = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, device_id = "cpu:gloo,cuda:nccl", device  # 06 to 08 have a group of each
    print(f"{me}: {device}, {backend}, world size {world_size}\n", end="", flush=True)  # one write

    table = torch.arange(1.0, world_size**2 + 1).view(world_size, world_size)  # rank r has row r

    def join():
        # Longer than the timer of run_check(): NCCL would end the process without a reason
        timeout = timedelta(seconds=args.timeout + 30)
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)

    def all_reduce_sum(device):
        mine = table[rank].to(device, copy=True)
        dist.all_reduce(mine)
        return mine, table.sum(0)

    def broadcast(device):
        mine = table[rank].to(device, copy=True)
        dist.broadcast(mine, src=world_size - 1)
        return mine, table[-1]

    def all_gather_rows(device):
        return all_gather(table[rank].to(device)), table

    def reduce_scatter(device):
        mine = torch.zeros(1, device=device)
        dist.reduce_scatter(mine, list(table[rank].to(device).split(1)))
        return mine, table.sum(0)[rank : rank + 1]

    def ddp_step(device):
        """Compare the averaged gradients with the gradients of one process, in float64."""
        torch.manual_seed(0)
        alone = ConvNet().to(device, torch.float64).eval()  # eval: no statistics of the batch
        together = DDP(copy.deepcopy(alone))
        images = torch.rand(4 * world_size, 1, 28, 28, device=device, dtype=torch.float64)
        labels = torch.arange(4 * world_size, device=device) % 10
        F.cross_entropy(alone(images), labels).backward()
        shard = slice(4 * rank, 4 * rank + 4)
        F.cross_entropy(together(images[shard]), labels[shard]).backward()
        gradients = [
            torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            for model in (together, alone)
        ]
        return gradients[0], gradients[1]

    os.environ.setdefault("NCCL_DEBUG", "WARN")  # NCCL's reasons, on standard output
    torch.compiler.reset()  # imports for seconds what DDP(...) would import under the time limit
    run_check("join: connect to all ranks, on free ports", me, args.timeout, join)
    for checked in dict.fromkeys((torch.device("cpu"), device)):
        for check in (all_reduce_sum, broadcast, all_gather_rows, reduce_scatter, ddp_step):
            title = f"{check.__name__.replace('_', ' ')} on {checked.type}"
            run_check(title, me, args.timeout, check, checked)
    for mebibytes in SIZES[device.type] if world_size > 1 else ():
        run_check(f"{mebibytes} MiB on {device.type}", me, args.timeout, report_bandwidth,
                  rank, world_size, device, mebibytes)
    hosts = [None] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    if rank == 0:
        names = ", ".join(dict.fromkeys(hosts))
        print(f"OK: all checks passed on {world_size} ranks on {names}", flush=True)


def run_check(title, me, timeout, check, *arguments):
    """Run one check, which may return a result and what it should be; end this process if not."""

    def fail(reason):
        print(f"FAILED: {title}: {me}: {reason}\n", end="", flush=True)
        os._exit(1)  # not sys.exit: a thread of the process group may be stuck

    # A plain timer, as NCCL's timeout does not cover the creation of its communicator.
    timer = threading.Timer(timeout, fail, [f"no answer within {timeout} s"])
    timer.start()
    try:
        answer = check(*arguments)
        if answer:
            result, expected = answer
            difference = (result.cpu() - expected.cpu()).abs().max().item()
            if not difference < 1e-5:
                fail(f"wrong by {difference:g}")
    except Exception as error:
        fail(f"{type(error).__name__}: {error}")  # all lines, as NCCL's reason is in the last one
    timer.cancel()


def report_bandwidth(rank, world_size, device, mebibytes):
    """Print the time of all_reduce and its bus bandwidth, as nccl-tests define it.

    On GPUs the mean of several calls in a row, as there; on the CPU the median of five.
    """
    tensor = torch.zeros(mebibytes * 2**18, device=device)
    if device.type == "cuda":
        calls = 20 if mebibytes < 512 else 5  # at 1 Gbit/s each of these takes 9 s
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.all_reduce(tensor)  # the first one also connects
        start.record()
        for _ in range(calls):
            dist.all_reduce(tensor)
        end.record()
        end.synchronize()
        seconds = start.elapsed_time(end) / 1e3 / calls
    else:
        times = []
        for _ in range(6):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - begin)
        seconds = sorted(times[1:])[2]
    speed = mebibytes * 2**20 / 1e9 / seconds * 2 * (world_size - 1) / world_size
    if rank == 0:
        print(f"all_reduce {mebibytes:3} MiB  {seconds * 1e3:8.2f} ms  {speed:7.2f} GB/s",
              flush=True)


def main():
    selftest(parse_args())
    dist.destroy_process_group()  # only now, when selftest() has freed the model


if __name__ == "__main__":
    main()
