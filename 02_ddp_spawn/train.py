"""Train a ConvNet on MNIST with DDP, in processes that this script spawns.

python 02_ddp_spawn/train.py --epochs 5
"""

import argparse
import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal, check_same_model
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import ConvNet, warmup_then_decay


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=64, help="images per process: %(default)s")
    add("--lr", type=float, default=0.03, help="peak rate for 256 images: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="per process: %(default)s")
    add("--data-dir", type=Path, help="MNIST folder; default: download to ./data")
    add("--output", type=Path, default="mnist.pt", help="weights: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    add("--compile", action="store_true", help="compile: slow start, faster steps")
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")
    # DDP-0: as many processes as GPUs, or two
    add("--nprocs", type=int, default=torch.cuda.device_count() or 2)
    return parser.parse_args()


def train(local_rank, args):  # DDP-0: in each process
    # 1. Setup
    rank, world_size = local_rank, args.nprocs
    # DDP-1: the processes find each other through a file, which needs no free port
    group = {"init_method": args.meet, "rank": rank, "world_size": world_size}
    if args.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **group)
    check_equal(**vars(args))  # DDP-1: an error if a rank has different options
    torch.manual_seed(args.seed)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    # DDP-3: one process per machine downloads; each rank trains on its own shard
    train_set, test_set = load_mnist(args.data_dir, download=local_rank == 0)
    sampler = DistributedSampler(train_set, seed=args.seed)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    model = ConvNet().to(device)
    if args.sync_bn:  # DDP-2: convert BatchNorm before the model is wrapped
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # DDP-2: all ranks get the weights of rank 0; gradients need no second copy
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    if args.compile:
        ddp_model = torch.compile(ddp_model)
    torch.manual_seed(args.seed + rank)  # DDP-3: for dropout, differs between ranks

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3: images of all ranks per step
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    steps = args.epochs * len(train_loader)
    # taken in the middle of a step, so that no step has a rate of 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_decay((step + 0.5) / steps)
    )
    if rank == 0:  # DDP-4: log on rank 0 only
        print(f"starting on {world_size} ranks, {device}", flush=True)

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP-3: shuffle again
        model.train()
        start = time.perf_counter()
        # the sum of the losses, and the number of images
        total = torch.zeros(2, dtype=torch.float64, device=device)
        # DDP-4: hide the progress bar on other ranks (True) and in files (None)
        hide = rank > 0 or None
        for batch in tqdm(train_loader, f"epoch {epoch}", leave=False, disable=hide):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            with torch.autocast(args.device, torch.bfloat16, enabled=args.amp):
                loss = criterion(ddp_model(images), labels)
            loss.backward()  # DDP-2: averages the gradients of all ranks
            optimizer.step()
            scheduler.step()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
        # DDP-2: an error if a weight is NaN or differs between the ranks
        check_same_model(model)
        dist.all_reduce(total)  # DDP-5: the sum over all ranks
        total, count = total.tolist()  # waits for the GPU
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, len(test_set), device)
        if rank == 0:  # DDP-4: log and save on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  loss {total / count:.4f}"
                f"  accuracy {accuracy:.4f}  {seconds:.1f} s"
                f"  {count / seconds:.0f} images/s",
                flush=True,
            )
            torch.save(model.state_dict(), args.output)


@torch.no_grad()
def evaluate(model, batches, length, device):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # DDP-5: all ranks take rank 0's (BatchNorm)
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for batch in batches:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(model(images).argmax(1) == labels)
    # DDP-5: collect the results of all ranks
    correct = gather_in_order(torch.cat(correct), length)
    return correct.sum().item() / length


def run(local_rank, args):  # DDP-0: what spawn() calls in each process
    # PR_SET_PDEATHSIG, SIGKILL: Linux kills this process when the script dies
    ctypes.CDLL(None).prctl(1, 9)
    train(local_rank, args)
    dist.destroy_process_group()  # DDP-1: after train() has released the model


if __name__ == "__main__":
    args = parse_args()
    # DDP-0: share the cores among the processes
    threads = torch.get_num_threads() // args.nprocs or 1
    os.environ.setdefault("OMP_NUM_THREADS", f"{threads}")
    with tempfile.TemporaryDirectory() as folder:
        args.meet = f"file://{folder}/meet"
        torch.multiprocessing.spawn(run, [args], args.nprocs)
