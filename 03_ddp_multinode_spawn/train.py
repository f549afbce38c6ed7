"""Train a ConvNet on MNIST with DistributedDataParallel, in processes spawned on several nodes.

Node 0 has 8 GPUs and the address 10.0.0.1, node 1 has 2 GPUs:

    python 03_ddp_multinode_spawn/train.py -n 2 -g 8 -i 0 --master-addr 10.0.0.1
    python 03_ddp_multinode_spawn/train.py -n 2 -g 2 -i 1 --master-addr 10.0.0.1
"""

import argparse
import faulthandler
import gc  # DDP-1
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist  # DDP-1
import torch.distributed.nn  # DDP-1: if DDP imports it later, the exit may abort
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP-2
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler  # DDP-3
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))  # unless common/ is next to this file
from common.data import load_mnist
from common.gather import gather_in_order  # DDP-5
from common.model import ConvNet

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up

faulthandler.register(signal.SIGUSR1)  # kill -USR1 prints where this process is
signal.signal(signal.SIGINT, signal.SIG_DFL)  # DDP-0: Linux sends it when the parent process dies


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
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # DDP-2
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 2  # DDP-0
    add("-n", "--nodes", type=int, default=1, help="number of nodes")
    add("-g", "--gpus", type=int, default=gpus, help="processes on this machine, one per GPU")
    add("-i", "--node-rank", type=int, default=0, help="number of this node: 0, 1, ...")
    add("--master-addr", default="127.0.0.1", help="address of node 0")
    add("--master-port", type=int, default=29500, help="free port on node 0")
    args = parser.parse_args()
    if args.node_rank == 0 and not args.output.parent.is_dir():  # DDP-4: rank 0 saves
        parser.error(f"--output: there is no folder {args.output.parent}")
    return args


def train(local_rank, args, gpus):  # DDP-0
    # 1. Setup
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")  # DDP-1
    if device.type == "cuda":
        torch.cuda.set_device(device)  # one GPU per process, set before init_process_group
    store = dist.TCPStore(args.master_addr, args.master_port)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store,
                            rank=sum(gpus[: args.node_rank]) + local_rank, world_size=sum(gpus))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, seed=args.seed)  # DDP-3: one shard per rank
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)  # DDP-3
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    if args.sync_bn:  # DDP-2
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, gradient_as_bucket_view=True)  # DDP-2: backward averages the gradients
    if args.compile:
        model = torch.compile(model)
    torch.manual_seed(args.seed + rank)  # DDP-3: different dropout per rank

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    lr = args.lr * (args.batch_size * world_size / 256) ** 0.5  # DDP-3: grows with the batch
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_decay(step, total_steps))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # DDP-3: reshuffle
        net.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, of the images
        bar = tqdm(train_loader, title, leave=False, disable=rank > 0 or None)  # DDP-4: one bar
        for images, labels in bar:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = criterion(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
        dist.all_reduce(total)  # DDP-5: sum over all ranks
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        if rank == 0:  # DDP-4: log on rank 0 only
            loss, images = total.tolist()
            print(f"{title}  loss {loss / images:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images / seconds:.0f} images/s", flush=True)

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
    for images, labels in test_loader:
        correct.append(net(images.to(device)).argmax(1) == labels.to(device))
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))  # DDP-5: from all ranks
    return correct.sum().item() / len(correct)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def run(local_rank, args, gpus):  # DDP-0: what each spawned process runs
    os.environ["LOCAL_RANK"] = str(local_rank)  # load_mnist downloads on local rank 0
    train(local_rank, args, gpus)
    gc.collect()  # DDP-1: free the model before destroying the group, or the exit may abort
    time.sleep(0.1)  # DDP-1: Gloo's threads must be idle, or the exit may hang (torch < 2.8)
    dist.destroy_process_group()


def main():
    args = parse_args()  # DDP-0: share the cores, wait for all nodes, start the processes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.gpus)))
    is_master = args.node_rank == 0  # it hosts a store, where each node writes how many GPUs it has
    store = dist.TCPStore(args.master_addr, args.master_port, args.nodes, is_master)
    store.set(f"gpus of node {args.node_rank}", str(args.gpus))
    gpus = [int(store.get(f"gpus of node {node}")) for node in range(args.nodes)]
    torch.multiprocessing.spawn(run, (args, gpus), args.gpus)


if __name__ == "__main__":
    main()
