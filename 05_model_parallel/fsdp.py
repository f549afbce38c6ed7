r"""Train a ConvNet on MNIST with fully sharded data parallelism (FSDP2): each rank keeps a shard.

    torchrun --standalone --nproc-per-node=2 05_model_parallel/fsdp.py --checkpoint fsdp-run1

On two machines, where 10.0.0.1 is an address of the first; on the second with --node-rank=1:

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 \
        05_model_parallel/fsdp.py
"""

import argparse
import faulthandler
import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn  # here, as a later import keeps the group alive
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))  # unless common/ is next to this file
from common.data import load_mnist
from common.gather import all_gather, gather_in_order
from common.model import ConvNet

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up

faulthandler.register(signal.SIGUSR1)  # kill -USR1 prints where this process is


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
    add("--checkpoint", type=Path, help="directory that all nodes share")  # MP-5
    args = parser.parse_args()
    for path in filter(None, (args.output, args.checkpoint)):
        if os.environ["RANK"] == "0" and not path.parent.is_dir():  # only rank 0 saves the weights
            parser.error(f"there is no folder {path.parent} for {path.name}")
    return args


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # one GPU per process, set before init_process_group
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, seed=args.seed)  # MP-4: data parallel, as DDP
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    mesh = init_device_mesh(device.type, (world_size,))
    model = ConvNet()  # equal on all ranks by the seed, as fully_shard does not broadcast
    for part in (model.layer1, model.layer2, model.fc, model):
        fully_shard(part, mesh=mesh)  # MP-1, MP-2: keep a shard, all-gather the part to compute it
    torch.manual_seed(args.seed + rank)  # different dropout per rank

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    lr = args.lr * (args.batch_size * world_size / 256) ** 0.5  # grows with the batch
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    epochs_done = 0
    if args.checkpoint:  # MP-5: resume from the last complete one, on any number of ranks
        complete = args.checkpoint.glob("epoch-*/.metadata")  # this file is written last
        epochs_done = max((int(path.parent.name.split("-")[1]) for path in complete), default=0)
        agreed = torch.tensor(epochs_done, device=device)
        dist.broadcast(agreed, src=0)
        epochs_done = agreed.item()
    if epochs_done:
        load_sharded(args.checkpoint / f"epoch-{epochs_done}", model, optimizer)
    total_steps = args.epochs * len(train_loader)
    done = epochs_done * len(train_loader)  # MP-5
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_decay(done + step, total_steps))
    shard = sum(parameter.to_local().nbytes for parameter in model.parameters())
    shards = all_gather(torch.tensor(shard, device=device)).tolist()
    if rank == 0:
        print(f"bytes of parameters per rank: {shards}; epochs done: {epochs_done}", flush=True)

    # 5. Train and evaluate
    for epoch in range(epochs_done + 1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # reshuffle
        model.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, of the images
        bar = tqdm(train_loader, title, leave=False, disable=rank > 0 or None)  # one bar
        for images, labels in bar:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = criterion(model(images), labels)
            loss.backward()  # MP-2: all-gathers again, then averages and shards the gradients
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
        dist.all_reduce(total)  # sum over all ranks
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:  # log on rank 0 only
            loss, images = total.tolist()
            print(f"{title}  loss {loss / images:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images / seconds:.0f} images/s", flush=True)
        if args.checkpoint:  # MP-5: every rank writes its shard
            save_sharded(args.checkpoint / f"epoch-{epoch}", model, optimizer)

    # 6. Save
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # MP-5: complete, on rank 0
    if rank == 0:
        torch.save(weights, args.output)


def save_sharded(path, model, optimizer):
    """Save the model and the optimizer's state, without the learning rates: --lr gives them."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state["state"]}, checkpoint_id=path)


def load_sharded(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state["state"]}, checkpoint_id=path)  # in place
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the network classifies correctly."""
    for buffer in model.buffers():  # copy rank 0's BatchNorm statistics to all ranks
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for images, labels in test_loader:
        correct.append(model(images.to(device)).argmax(1) == labels.to(device))
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))  # from all ranks
    return correct.sum().item() / len(correct)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def main():
    train(parse_args())
    gc.collect()  # free the model before destroying the group, or the exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
