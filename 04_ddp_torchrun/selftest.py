"""Check that all processes of a job reach each other and compute the same: run it first on a new machine or cluster.

    bash 04_ddp_torchrun/run.sh selftest.py
"""

import argparse
import copy
import gc
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, by DDP, it would keep the group alive past its end
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # after this folder, where a copied common/ may be
from common.gather import all_gather
from common.model import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it can be")
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for another rank")
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    if args.timeout < 1:
        parser.error("--timeout must be above 0")
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if args.device == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        parser.error(f"each process needs a GPU, torch finds {torch.cuda.device_count()}: start fewer, or --device cpu")
    return args


def make_checks(rank, world_size, device, store, group):
    """The checks by name; each is a function that returns what this rank got and what it must get, two tensors."""
    rows = torch.arange(1.0, world_size**2 + 1, device=device).view(world_size, world_size)  # row r is rank r's input

    def after(collective, *options):
        result = rows[rank].clone()
        collective(result, *options)
        return result

    def reduce_scatter():
        result = torch.zeros(1, device=device)
        dist.reduce_scatter_single(result, rows[rank].clone())
        return result

    def barrier():
        store.add("selftest/arrived", 1)
        dist.barrier()
        return torch.tensor(store.add("selftest/arrived", 0))

    def ddp_step():
        torch.manual_seed(0)  # the same weights and images on all ranks; in float64, to leave no doubt about rounding
        alone = ConvNet().to(device, torch.float64).eval()  # eval, as BatchNorm's batch statistics differ by design
        together = DDP(copy.deepcopy(alone))
        images = torch.rand(4 * world_size, 1, 28, 28, device=device, dtype=torch.float64)
        labels = torch.arange(4 * world_size, device=device) % 10
        F.cross_entropy(alone(images), labels).backward()
        F.cross_entropy(together(images.chunk(world_size)[rank]), labels.chunk(world_size)[rank]).backward()
        return [torch.cat([weight.grad.flatten() for weight in net.parameters()]) for net in (together, alone)]

    return {
        "join": lambda: (dist.init_process_group(**group) or rows, rows),
        "all_reduce sum": lambda: (after(dist.all_reduce), rows.sum(0)),
        "all_reduce mean": lambda: (after(dist.all_reduce, dist.ReduceOp.AVG), rows.mean(0)),
        "broadcast": lambda: (after(dist.broadcast, world_size - 1), rows[-1]),
        "all_gather": lambda: (all_gather(rows[rank]), rows),
        "reduce_scatter": lambda: (reduce_scatter(), rows.sum(0)[rank : rank + 1]),
        "barrier": lambda: (barrier(), torch.tensor(world_size)),
        "DDP step": ddp_step,
    }


def run_check(check, me):
    """Run one check; return "" if it passed on this rank, else the reason in one line."""
    try:
        result, expected = check()
        passed = torch.allclose(result, expected)
    except Exception as error:
        return f"{me}: {type(error).__name__}: {error}".splitlines()[0]
    return "" if passed else f"{me}: wrong by up to {(result - expected).abs().max().item():g}"


def report_bandwidth(rank, world_size, device):
    """Print the median time of an all_reduce, and its bus bandwidth as nccl-tests define it, for a few sizes."""
    for mebibytes in (1, 8, 64):
        tensor, times = torch.zeros(mebibytes * 2**18, device=device), []
        for _ in range(6):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # waits for the GPU
            times.append(time.perf_counter() - start)
        seconds = sorted(times[1:])[2]
        speed = mebibytes * 2**20 / 1e9 / seconds * 2 * (world_size - 1) / world_size
        if rank == 0:
            print(f"all_reduce {mebibytes:3} MiB  {seconds * 1e3:8.2f} ms  {speed:7.2f} GB/s", flush=True)


def selftest(args):
    """Say what each rank is, run the checks, print one line with the verdict; return whether all ranks passed."""
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device, me = torch.device(args.device, local_rank), f"rank {rank} on {socket.gethostname()}"
    backend, gpu = ("nccl", device) if args.device == "cuda" else ("gloo", None)
    print(f"{me}: {device}, {backend}, world size {world_size}\n", end="", flush=True)  # in one piece, as others print
    torch.cuda.set_device(gpu or -1)  # -1: no GPU
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # so that a stuck collective raises and can be reported
    group = {"backend": backend, "device_id": gpu, "timeout": timedelta(seconds=args.timeout)}
    # Verdicts travel through the store, mostly torchrun's, of the group, and not by the collectives that they are about
    is_master = rank == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=is_master,
                          timeout=(6 if rank else 2) * group["timeout"], multi_tenant=True)  # rank 0 is to report first
    store.set(f"selftest/host/{rank}", socket.gethostname())
    for name, check in make_checks(rank, world_size, device, store, group).items():
        reason = run_check(check, me)
        store.set(f"selftest/{name}/{rank}", reason)
        try:
            reasons = [store.get(f"selftest/{name}/{other}").decode() for other in range(world_size)]
        except dist.DistError:
            reasons = [reason, f"not every rank answered within {2 * args.timeout} s"]
        if any(reasons):
            if rank == 0:
                print(f"FAILED: {name}: {'; '.join(filter(None, reasons))}", flush=True)
            return False
    report_bandwidth(rank, world_size, device)
    if rank == 0:
        hosts = dict.fromkeys(store.get(f"selftest/host/{other}").decode() for other in range(world_size))
        print(f"OK: all checks passed on {world_size} ranks on {', '.join(hosts)}", flush=True)
    return True


def main():
    passed = selftest(parse_args())
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
