"""Train a ConvNet on MNIST in one process a GPU, or in several on the CPU, spawned on several nodes by hand.

    python 03_ddp_multinode_spawn/train.py -n 2 -g 8,2 -i 0 --master-addr 10.0.0.1     # on the other node: -i 1
"""

import argparse
import gc  # DDP-1
import os
import sys
import time
from datetime import timedelta  # DDP-1
from pathlib import Path

import torch
import torch.distributed as dist  # DDP-1
import torch.distributed.nn  # DDP-1: imported later, by DDP, it would keep the group alive past its end
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP-2
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler  # DDP-3
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # after this folder, where a copied common/ may be
from common.data import load_mnist
from common.gather import gather_in_order  # DDP-5
from common.model import ConvNet
from meet import counts, meet  # DDP-0, DDP-1


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate for a global batch of 256 images")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the images")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of MNIST, downloaded if need be")
    parser.add_argument("--output", type=Path, default="mnist.pt", help="file for the trained weights")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it can be")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--compile", action="store_true", help="compile the model: a slower start, faster steps")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for another rank")  # DDP-1
    parser.add_argument("--start-timeout", type=int, default=300, help="seconds to wait for the other nodes")
    parser.add_argument("-n", "--nodes", type=int, default=1, help="machines of the job")  # DDP-0: who is who, by hand
    parser.add_argument("-g", "--gpus", type=counts, default="all", help="processes on each node, as 8 or 8,2")
    parser.add_argument("-i", "--node-rank", type=int, default=os.environ.get("NODE_RANK", 0), help="this node, from 0")
    parser.add_argument("--master-addr", default=os.environ.get("MASTER_ADDR", "127.0.0.1"), help="address of node 0")
    parser.add_argument("--master-port", type=int, default=os.environ.get("MASTER_PORT", 29500), help="port there")
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    for name, value in vars(args).items():
        if name not in ("seed", "node_rank") and type(value) in (int, float) and not 0 < value < float("inf"):  # DDP-0
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    args.gpus *= args.nodes if len(args.gpus) == 1 else 1  # DDP-0: one number stands for every node
    if len(args.gpus) != args.nodes or args.node_rank not in range(args.nodes):
        parser.error(f"--nodes {args.nodes} needs --gpus, one for all or one each, a --node-rank below {args.nodes}")
    if args.device == "cuda" and torch.cuda.device_count() < args.gpus[args.node_rank]:
        parser.error(f"each process needs a GPU, torch finds {torch.cuda.device_count()}: start fewer, or --device cpu")
    if os.path.isdir(out := args.output) or not os.access(out if os.path.exists(out) else f"{out.parent}/", os.W_OK):
        parser.error(f"--output {out}: cannot write this file; name one in a folder that exists and is yours")
    return args


def train(local_rank, args):  # DDP-0: what the parent gives to each process
    # 1. Setup
    device = torch.device(args.device, local_rank)  # DDP-1: one device a process, known before the group is made
    backend, gpu = ("nccl", device) if args.device == "cuda" else ("gloo", None)
    torch.cuda.set_device(gpu or -1)  # -1: no GPU
    store, timeout = dist.TCPStore(args.master_addr, args.master_port), timedelta(seconds=args.timeout)
    rank, world_size = sum(args.gpus[: args.node_rank]) + local_rank, sum(args.gpus)  # DDP-1
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store, timeout=timeout, device_id=gpu)
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, seed=args.seed)  # DDP-3: each rank reads its own shard
    images_per_epoch = train_sampler.total_size  # DDP-3: of all ranks
    loading = {"collate_fn": tuple, "pin_memory": args.device == "cuda"}  # tuple: the sets give whole batches
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loading)
    test_loader = DataLoader(test_set, 250, sampler=DistributedSampler(test_set, shuffle=False), **loading)  # DDP-3

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if gpu else net  # DDP-2: over the global batch; CUDA only
    model = DDP(net, forward_sync_buffers=False, gradient_as_bucket_view=True)  # DDP-2: averages gradients
    model = torch.compile(model) if args.compile else model

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss()
    global_batch = args.batch_size * world_size  # DDP-3
    optimizer = torch.optim.SGD(model.parameters(), args.lr * global_batch / 256, momentum=0.9, nesterov=True)
    steps = args.epochs * len(train_loader)  # the rate rises for 40 % of them, then falls to 0
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / (steps * 0.4 + 1), (steps - step) / (steps * 0.6)))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # DDP-3: another order each epoch
        start, total_loss = time.perf_counter(), torch.zeros((), device=device)
        bar = tqdm(train_loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=rank != 0 or None)  # DDP-4
        for step, (images, labels) in enumerate(bar):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = criterion(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # large batches start without a jump
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total_loss += loss.detach() * len(labels)
            if step % 50 == 0 and not bar.disable:
                bar.set_postfix(loss=f"{loss.item():.4f}")
        dist.all_reduce(total_loss)  # DDP-5: the sum of all ranks
        loss, seconds = total_loss.item() / images_per_epoch, time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        if rank == 0:  # DDP-4: one rank speaks for all
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images_per_epoch / seconds:.0f} images/s", flush=True)

    # 6. Save
    if rank == 0:  # DDP-4: one rank writes
        torch.save({name: tensor.cpu() for name, tensor in net.state_dict().items()}, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """The fraction of the test set that the model classifies correctly; each image counts once."""
    for buffer in model.buffers():  # DDP-5: the running statistics differ from rank to rank; rank 0's are saved
        dist.broadcast(buffer, src=0)
    model.eval()
    hits = torch.cat([model(images.to(device)).argmax(1) == labels.to(device) for images, labels in test_loader])
    hits = gather_in_order(hits, len(test_loader.dataset))  # DDP-5: without the sampler's padding
    model.train()
    return hits.sum().item() / len(hits)


def run(local_rank, *given):  # DDP-0: in each process; spawn puts its number first
    os.environ["LOCAL_RANK"] = str(local_rank)  # tells load_mnist that one process of a node looks for all
    train(local_rank, *given)
    gc.collect()  # DDP-1: the model goes before the group does: in the other order some exits abort
    dist.destroy_process_group()


def main():
    args = parse_args()  # DDP-0: share out the cores of this node
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.gpus[args.node_rank])))
    with meet(args):  # DDP-1: every node waits for all others before it starts a process
        torch.multiprocessing.spawn(run, (args,), args.gpus[args.node_rank])


if __name__ == "__main__":
    main()
