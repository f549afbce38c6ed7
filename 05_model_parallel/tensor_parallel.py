"""Train two linear layers on MNIST, each of them cut into as many parts as there are processes.

    bash 05_model_parallel/run.sh tensor_parallel.py
    torchrun --standalone --nproc-per-node=2 05_model_parallel/tensor_parallel.py --hidden 2048
"""

import argparse
import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, it would keep the group alive past its end
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # after this folder, where a copied common/ may be
from common.data import load_mnist


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, the same for all processes")
    parser.add_argument("--hidden", type=int, default=512, help="features between the two layers")
    parser.add_argument("--lr", type=float, default=1.0, help="peak learning rate for a global batch of 256 images")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the images")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of MNIST, downloaded if need be")
    parser.add_argument("--output", type=Path, default="mnist.pt", help="file for the trained weights")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it can be")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for another rank")
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    for name, value in vars(args).items():
        if name != "seed" and type(value) in (int, float) and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if args.hidden % (world_size := int(os.environ["WORLD_SIZE"])):  # MP-1
        parser.error(f"--hidden {args.hidden} cannot be cut into {world_size} equal parts, one for each process")
    if args.device == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        parser.error(f"each process needs a GPU, torch finds {torch.cuda.device_count()}: start fewer, or --device cpu")
    if os.path.isdir(out := args.output) or not os.access(out if os.path.exists(out) else f"{out.parent}/", os.W_OK):
        parser.error(f"--output {out}: cannot write this file; name one in a folder that exists and is yours")
    return args


class Mlp(nn.Module):
    """Two linear layers: images [N, 1, 28, 28] to [N, hidden] to class scores [N, 10]."""

    def __init__(self, hidden=512):
        super().__init__()
        self.up, self.down = nn.Linear(28 * 28, hidden), nn.Linear(hidden, 10)

    def forward(self, images):
        return self.down(self.up(images.flatten(1)).relu())


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # one device a process, known before the group is made
    device = torch.device(args.device, local_rank)
    backend, gpu = ("nccl", device) if args.device == "cuda" else ("gloo", None)
    torch.cuda.set_device(gpu or -1)  # -1: no GPU
    dist.init_process_group(backend, device_id=gpu, timeout=timedelta(seconds=args.timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=args.seed)  # MP-4: all read all images
    images_per_epoch = train_sampler.total_size
    loading = {"collate_fn": tuple, "pin_memory": args.device == "cuda"}  # tuple: the sets give whole batches
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loading)
    test_loader = DataLoader(test_set, 250, **loading)

    # 3. Model
    mesh = init_device_mesh(args.device, (world_size,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # MP-1: each rank has its part of the hidden features
    model = parallelize_module(Mlp(args.hidden).to(device), mesh, plan)  # MP-2: down sums its scores over the ranks

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss()
    global_batch = args.batch_size
    optimizer = torch.optim.SGD(model.parameters(), args.lr * global_batch / 256, momentum=0.9, nesterov=True)
    steps = args.epochs * len(train_loader)  # the rate rises for 40 % of them, then falls to 0
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / (steps * 0.4 + 1), (steps - step) / (steps * 0.6)))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        start, total_loss = time.perf_counter(), torch.zeros((), device=device)
        bar = tqdm(train_loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=rank != 0 or None)
        for images, labels in bar:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = criterion(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # large batches start without a jump
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total_loss += loss.detach() * len(labels)
        loss, seconds = total_loss.item() / images_per_epoch, time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images_per_epoch / seconds:.0f} images/s", flush=True)

    # 6. Save
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # MP-5
    if rank == 0:
        torch.save(whole, args.output)
    mesh._pg_registry.clear()  # caches keep the mesh for good, and with it the group's threads: some exits would abort


@torch.no_grad()
def evaluate(model, test_loader, device):
    """The fraction of the test set that the model classifies correctly; all ranks compute each image together."""
    model.eval()
    hits = torch.cat([model(images.to(device)).argmax(1) == labels.to(device) for images, labels in test_loader])
    model.train()
    return hits.sum().item() / len(hits)


def main():
    train(parse_args())
    gc.collect()  # the model goes before the group does: in the other order some exits abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
