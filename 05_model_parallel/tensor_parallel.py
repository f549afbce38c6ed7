"""Train two linear layers on MNIST by tensor parallelism: each rank has parts of both.

torchrun --standalone --nproc-per-node=2 05_model_parallel/tensor_parallel.py
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal
from common.data import load_mnist
from common.model import warmup_then_decay


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=64, help="images per step: %(default)s")
    add("--lr", type=float, default=0.03, help="peak rate for 256 images: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="per process: %(default)s")
    add("--data-dir", type=Path, help="MNIST folder; default: download to ./data")
    add("--output", type=Path, default="mnist.pt", help="weights: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    # MP-1: what is split
    add("--hidden", type=int, default=512, help="features between the layers")
    return parser.parse_args()


class Mlp(nn.Module):
    """Images [N, 1, 28, 28] to hidden features [N, hidden] to logits [N, 10]."""

    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(28 * 28, hidden)
        self.down = nn.Linear(hidden, 10)

    def forward(self, images):
        return self.down(self.up(images.flatten(1)).relu())


@record  # DDP-1: torchrun's last lines show the first error
def train(args):
    # 1. Setup
    # DDP-1: torchrun sets LOCAL_RANK, the number of the process on its machine
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_equal(**vars(args))  # DDP-1: an error if a machine has different options
    torch.manual_seed(args.seed)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    # one process per machine downloads, and all ranks read all images
    train_set, test_set = load_mnist(args.data_dir, download=local_rank == 0)
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, **options)
    test_loader = DataLoader(test_set, 250, **options)

    # 3. Model
    # MP-1: each rank has a part of the hidden features
    mesh = init_device_mesh(args.device, (world_size,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    # MP-2: down all-reduces its result
    model = parallelize_module(Mlp(args.hidden).to(device), mesh, plan)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (args.batch_size / 256) ** 0.5
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
        torch.manual_seed(args.seed + epoch)  # the same order on all ranks
        model.train()
        start = time.perf_counter()
        # the sum of the losses, and the number of images
        total = torch.zeros(2, dtype=torch.float64, device=device)
        # DDP-4: hide the progress bar on other ranks (True) and in files (None)
        hide = rank > 0 or None
        for batch in tqdm(train_loader, f"epoch {epoch}", leave=False, disable=hide):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
        total, count = total.tolist()  # waits for the GPU
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, len(test_set), device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  loss {total / count:.4f}"
                f"  accuracy {accuracy:.4f}  {seconds:.1f} s"
                f"  {count / seconds:.0f} images/s",
                flush=True,
            )

    # 6. Save
    # MP-5: all ranks take part, and rank 0 gets the whole weights
    to_rank0 = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=to_rank0)
    if rank == 0:  # DDP-4: save on rank 0 only
        torch.save(weights, args.output)


@torch.no_grad()
def evaluate(model, batches, length, device):
    """Return the fraction of the test set that the model classifies correctly."""
    model.eval()
    correct = []
    for batch in batches:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(model(images).argmax(1) == labels)
    return torch.cat(correct).sum().item() / length


if __name__ == "__main__":
    train(parse_args())
    if dist.get_backend() == "gloo":
        time.sleep(0.1)  # DTensor keeps Gloo's threads; a busy one may abort the exit
    dist.destroy_process_group()  # DDP-1: after train() has released the model
