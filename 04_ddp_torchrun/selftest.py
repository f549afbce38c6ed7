r"""Check that all processes of a job can communicate: run it first on new machines.

    torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/selftest.py

On two machines, where 10.0.0.1 is an address of the first; on the second with
--node-rank=1:

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

HERE = Path(__file__).resolve().parent
if not (HERE / "common").exists():  # in this repository it is one folder above
    sys.path.append(str(HERE.parent))  # last: it may have a profile.py
from common.gather import all_gather
from common.model import ConvNet

SIZES = {"cpu": (1, 8, 64), "cuda": (1, 8, 64, 512)}  # MiB


def parse_args():
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[0], help="what to check")
    add("--timeout", type=int, default=60, help="time limit of each check in seconds")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of this file show")
    return args


def selftest(args):
    """Run all checks; a rank that fails one prints the reason and exits with 1."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    me = f"rank {rank} on {socket.gethostname()}"
    if args.device == "cuda":
        device = device_id = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # 07 and fsdp.py have a group of each
    else:
        device, device_id = torch.device("cpu"), None
        backend = "gloo"
    # in one write, or the lines of two ranks mix
    print(f"{me}: {device}, {backend}, world size {world_size}\n", end="", flush=True)

    # rank r has row r
    table = torch.arange(1.0, world_size**2 + 1).view(world_size, world_size)

    def join():
        # longer than run_check() waits: NCCL would end the process without a reason
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
        """Compare the averaged gradients with those of one process, in float64."""
        torch.manual_seed(0)
        # eval(): BatchNorm would use statistics of the batch
        alone = ConvNet().to(device, torch.float64).eval()
        together = DDP(copy.deepcopy(alone))
        count = 4 * world_size
        images = torch.rand(count, 1, 28, 28, device=device, dtype=torch.float64)
        labels = torch.arange(count, device=device) % 10
        F.cross_entropy(alone(images), labels).backward()
        shard = slice(4 * rank, 4 * rank + 4)
        F.cross_entropy(together(images[shard]), labels[shard]).backward()
        return [
            torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            for model in (together, alone)
        ]

    os.environ.setdefault("NCCL_DEBUG", "WARN")  # NCCL's reasons, on standard output
    warm_up()  # without a time limit
    run_check("join: connect to all ranks, on free ports", me, args.timeout, join)
    for checked in dict.fromkeys((torch.device("cpu"), device)):
        for check in (
            all_reduce_sum,
            broadcast,
            all_gather_rows,
            reduce_scatter,
            ddp_step,
        ):
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


def warm_up():
    """Import torch's compiler, as the first DDP(...) does: it takes seconds."""
    torch.compiler.reset()


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
            result, expected = answer
            difference = (result.cpu() - expected.cpu()).abs().max().item()
            if not difference < 1e-5:
                fail(f"wrong by {difference:g}")
    except Exception as error:
        # all lines, as NCCL's reason is in the last one
        fail(f"{type(error).__name__}: {error}")
    timer.cancel()


def report_bandwidth(device, mebibytes):
    """Print the time of all_reduce and its bus bandwidth, as nccl-tests define it.

    On GPUs the mean of several calls in a row, as there; on the CPU the median of five.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.zeros(mebibytes * 2**18, device=device)  # float32
    if device.type == "cuda":
        calls = 20 if mebibytes < 512 else 5  # at 1 Gbit/s each of these takes 9 s
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
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
        print(
            f"all_reduce {mebibytes:3} MiB  {seconds * 1e3:8.2f} ms  {speed:7.2f} GB/s",
            flush=True,
        )


def main():
    selftest(parse_args())
    dist.destroy_process_group()  # only now, when selftest() has freed the model


if __name__ == "__main__":
    main()
