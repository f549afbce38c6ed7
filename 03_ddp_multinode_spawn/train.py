"""Train a ConvNet on MNIST with DDP, in processes that this script spawns on each node.

Node 0 has 8 GPUs and the address 10.0.0.1, node 1 has 2 GPUs:

    python 03_ddp_multinode_spawn/train.py -n 2 -g 8,2 -i 0 --master-addr 10.0.0.1
    python 03_ddp_multinode_spawn/train.py -n 2 -g 8,2 -i 1 --master-addr 10.0.0.1
"""

import argparse
import math
import os
import signal
import socket
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

HERE = Path(__file__).resolve().parent
if not (HERE / "common").exists():  # in this repository it is one folder above
    sys.path.append(str(HERE.parent))  # last: it may have a profile.py
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import ConvNet

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up


def parse_args():
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per process")
    add("--lr", type=float, default=0.6, help="peak rate for 256 images per step")
    add("--seed", type=int, default=0, help="for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=devices, default=devices[0], help="where to train")
    add("--amp", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--compile", action="store_true", help="slower start, faster steps")
    # DDP-2: for small batches
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")
    # DDP-0: how many processes, and on which nodes
    nprocs = torch.cuda.device_count() or 2
    add("-g", "--nprocs", default=str(nprocs), help="of every node, or of each: 8,2")
    add("-n", "--nodes", type=int, default=1, help="number of nodes")
    add("-i", "--node-rank", type=int, default=0, help="number of this node: 0, 1, ...")
    add("--master-addr", default="127.0.0.1", help="address of node 0")
    add("--master-port", type=int, default=29500, help="free port on node 0")
    args = parser.parse_args()
    # DDP-0: of one node, or of each
    args.per_node = [int(number) for number in args.nprocs.split(",")]
    if len(args.per_node) == 1:
        args.per_node *= args.nodes
    if not 0 <= args.node_rank < args.nodes == len(args.per_node):
        parser.error(
            f"{args.nodes} nodes, --nprocs {args.nprocs}, --node-rank {args.node_rank}"
        )
    if min(args.epochs, args.batch_size, *args.per_node) < 1 or args.output.is_dir():
        parser.error("--epochs, --batch-size, --nprocs: at least 1; --output: a file")
    if args.node_rank == 0:  # DDP-4: only rank 0 saves
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output.parent).close()  # fails if read-only
    return args


def train(local_rank, args):  # DDP-0: in each of the processes
    # 1. Setup
    # DDP-1: the ranks follow those of the nodes before; all find each other at node 0
    rank = sum(args.per_node[: args.node_rank]) + local_rank
    world_size = sum(args.per_node)
    group = {
        "store": dist.TCPStore(args.master_addr, args.master_port),
        "rank": rank,
        "world_size": world_size,
    }
    if args.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **group)
    torch.manual_seed(args.seed)

    # 2. Data
    # DDP-3: one process per machine downloads, and each rank has its own shard
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)
    train_sampler = DistributedSampler(train_set, seed=args.seed)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": device.type == "cuda"}
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=train_sampler, **options
    )
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    # channels_last: a third faster on the CPU; on a GPU DDP would warn (one channel)
    layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
    model = ConvNet().to(device, memory_format=layout)
    if args.sync_bn:  # DDP-2: convert BatchNorm, then wrap the model
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    if args.compile:
        ddp_model = torch.compile(ddp_model)
    torch.manual_seed(args.seed + rank)  # DDP-3: each rank draws other dropout masks

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3: images per step
    # the root keeps the noise of a step: arXiv:1705.08741
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)
    # the rate follows the part of the run that is done in the middle of a step
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_decay((step + 0.5) / total_steps)
    )

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # DDP-3: a new order
        model.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # loss sum, images
        # DDP-4: only rank 0 has a bar; None: on a terminal only
        no_bar = True if rank > 0 else None
        for batch in tqdm(train_loader, title, leave=False, disable=no_bar):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = criterion(ddp_model(images), labels)
            loss.backward()  # DDP-2: averages the gradients of all ranks
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        dist.all_reduce(total)  # DDP-5: sum over all ranks
        loss = (total[0] / total[1]).item()  # waits for the GPU
        if not math.isfinite(loss):
            raise ValueError(f"{title}: the loss is {loss}")  # before it is saved
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(
                f"{title}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
                f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s",
                flush=True,
            )

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        torch.save(model.state_dict(), args.output)


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # DDP-5: all take BatchNorm's of rank 0
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for batch in test_loader:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(model(images).argmax(1) == labels)
    # DDP-5: join the results of all ranks
    correct = gather_in_order(torch.cat(correct), len(test_loader.dataset))
    return correct.sum().item() / len(correct)


def warmup_then_decay(fraction):
    """The factor of the peak rate: it rises for 40 % of the run, then falls to 0."""
    return max(0, min(fraction / 0.4, (1 - fraction) / 0.6))


def run(local_rank, args):  # DDP-0: what each spawned process runs
    # torch sends SIGINT if the parent dies, but a job started with & ignores it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # the parent may have died before torch asked for that signal
    if torch.multiprocessing.parent_process().is_alive():
        train(local_rank, args)
        dist.destroy_process_group()  # only now, when train() has freed the model


def main():
    args = parse_args()
    # DDP-0: share the cores, wait for all nodes, and start the processes
    nprocs = args.per_node[args.node_rank]
    threads = math.ceil(torch.get_num_threads() / nprocs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    address = args.master_addr, args.master_port
    listener = None
    if args.node_rank == 0:  # it hosts the store, at --master-addr only
        try:
            listener = socket.create_server(  # by IPv4, or else by IPv6
                address, family=min(socket.getaddrinfo(*address))[0]
            ).detach()
        except OSError:  # no interface has that address: at all addresses
            pass
    store = dist.TCPStore(
        *address,
        world_size=args.nodes,
        is_master=args.node_rank == 0,
        master_listen_fd=listener,
    )
    torch.multiprocessing.spawn(run, (args,), nprocs)
    del store  # only now, when its processes have ended


if __name__ == "__main__":
    main()
