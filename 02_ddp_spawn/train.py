"""Train a ConvNet on MNIST with DistributedDataParallel, in processes spawned by this script.

    python 02_ddp_spawn/train.py --epochs 5 --amp
    python 02_ddp_spawn/train.py --nprocs 2 --device cpu
"""

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # if common/ is not next to this
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import ConvNet

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per process")
    add("--lr", type=float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    add("--amp", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--compile", action="store_true", help="compile the model: slower start, faster steps")
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # DDP-2: small batches
    nprocs = torch.cuda.device_count() if torch.cuda.is_available() else 2  # DDP-0: how many
    add("--nprocs", type=int, default=nprocs, help="processes: one per GPU, or any number on CPUs")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size, args.nprocs) < 1 or args.output.is_dir():  # DDP-0: nprocs
        parser.error("--epochs, --batch-size and --nprocs must be at least 1, and --output a file")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=args.output.parent).close()  # fails now if it is read-only
    return args


def train(local_rank, args):  # DDP-0: in each of the processes
    # 1. Setup
    # DDP-1: one GPU per process, or the CPU
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before init_process_group
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(f"{args.folder}/store", args.nprocs)  # a file: it needs no port
    dist.init_process_group(backend, store=store, rank=local_rank, world_size=args.nprocs,
                            device_id=device if device.type == "cuda" else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)  # DDP-3: one downloads it
    options = {"pin_memory": device.type == "cuda"}
    train_sampler = DistributedSampler(train_set, seed=args.seed)  # DDP-3: one shard per rank
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
    net = ConvNet().to(device, memory_format=layout)  # CPU: a third faster; GPU: DDP would warn
    if args.sync_bn:  # DDP-2: convert BatchNorm, then wrap the model
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, gradient_as_bucket_view=True)  # backward averages the gradients
    if args.compile:
        model = torch.compile(model)
    torch.manual_seed(args.seed + rank)  # DDP-3: other random numbers on each rank

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3: images per step
    lr = args.lr * (global_batch / 256) ** 0.5  # keeps the noise of a step: arXiv:1705.08741
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_decay(step, total_steps))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # DDP-3: reshuffle
        net.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, count of images
        # DDP-4: one bar, of rank 0; None: on a terminal only
        for batch in tqdm(train_loader, title, leave=False, disable=rank > 0 or None):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = criterion(model(images), labels)
            loss.backward()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        dist.all_reduce(total)  # DDP-5: sum over all ranks
        loss = (total[0] / total[1]).item()  # waits for the GPU
        assert math.isfinite(loss), f"{title}: the loss is {loss}"  # before it is saved
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(f"{title}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
                  f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s", flush=True)

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        torch.save(net.state_dict(), args.output)


@torch.no_grad()
def evaluate(net, test_loader, device):
    """Return the fraction of the test set that the network classifies correctly."""
    for buffer in net.buffers():  # DDP-5: copy rank 0's BatchNorm statistics to all ranks
        dist.broadcast(buffer, src=0)
    net.eval()
    correct = []
    for batch in test_loader:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(net(images).argmax(1) == labels)
    correct = gather_in_order(torch.cat(correct), len(test_loader.dataset))  # DDP-5: of all ranks
    return correct.sum().item() / len(correct)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def run(local_rank, args):  # DDP-0: what each spawned process runs
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # comes if the parent dies; jobs after & ignore it
    if torch.multiprocessing.parent_process().is_alive():  # or it died before torch asked for that
        train(local_rank, args)
        dist.destroy_process_group()  # only now, when train() has freed the model


def main():
    args = parse_args()  # DDP-0: share the cores, and start processes that share a folder
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.nprocs)))
    with tempfile.TemporaryDirectory() as args.folder:
        torch.multiprocessing.spawn(run, (args,), args.nprocs)


if __name__ == "__main__":
    main()
