r"""Train two linear layers on MNIST by tensor parallelism: each rank has parts of both.

    torchrun --standalone --nproc-per-node=2 05_model_parallel/tensor_parallel.py

On two machines, where 10.0.0.1 is an address of the first; on the second with
--node-rank=1:

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 \
        05_model_parallel/tensor_parallel.py
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
if not (HERE / "common").exists():  # in this repository it is one folder above
    sys.path.append(str(HERE.parent))  # last: it may have a profile.py
from common.data import load_mnist

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up


def parse_args():
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per step, read by all ranks")
    add("--lr", type=float, default=0.6, help="peak rate for 256 images per step")
    add("--seed", type=int, default=0, help="for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=devices, default=devices[0], help="where to train")
    # MP-1: what is split
    add("--hidden", type=int, default=512, help="features between the layers")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of this file show")
    if min(args.epochs, args.batch_size, args.hidden) < 1 or args.output.is_dir():
        parser.error("--epochs, --batch-size, --hidden: at least 1; --output: a file")
    if os.environ["RANK"] == "0":  # only rank 0 saves
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output.parent).close()  # fails if read-only
    if args.hidden % int(os.environ["WORLD_SIZE"]):  # MP-1: parts of one size
        parser.error("--hidden must be a multiple of the number of processes")
    return args


class Mlp(nn.Module):
    """Images [N, 1, 28, 28] to hidden features [N, hidden] to logits [N, 10]."""

    def __init__(self, hidden=512):
        super().__init__()
        self.up = nn.Linear(28 * 28, hidden)
        self.down = nn.Linear(hidden, 10)

    def forward(self, images):
        return self.down(self.up(images.flatten(1)).relu())


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # its index on this machine
    if args.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    # MP-4: all ranks read all images in the same order
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)
    options = {"pin_memory": device.type == "cuda"}
    generator = torch.Generator().manual_seed(args.seed)
    train_loader = DataLoader(
        train_set, args.batch_size, shuffle=True, generator=generator, **options
    )
    test_loader = DataLoader(test_set, 250, **options)

    # 3. Model
    mesh = init_device_mesh(device.type, (world_size,))
    # MP-1: each rank has a part of the hidden features
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = Mlp(args.hidden).to(device)
    model = parallelize_module(model, mesh, plan)  # MP-2: down all-reduces its result

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    # the root keeps the noise of a step: arXiv:1705.08741
    lr = args.lr * (args.batch_size / 256) ** 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)
    # the rate follows the part of the run that is done in the middle of a step
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_decay((step + 0.5) / total_steps)
    )

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        model.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # loss sum, images
        # only rank 0 has a bar; None: on a terminal only
        no_bar = True if rank > 0 else None
        for batch in tqdm(train_loader, title, leave=False, disable=no_bar):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            loss = criterion(model(images), labels)
            loss.backward()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss = (total[0] / total[1]).item()  # waits for the GPU
        if not math.isfinite(loss):
            raise ValueError(f"{title}: the loss is {loss}")  # before it is saved
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:  # log on rank 0 only
            print(
                f"{title}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
                f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s",
                flush=True,
            )

    # 6. Save
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    # MP-5: complete, on rank 0
    weights = dcp_state.get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(weights, args.output)


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the model classifies correctly."""
    model.eval()
    correct = []
    for batch in test_loader:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(model(images).argmax(1) == labels)
    correct = torch.cat(correct)
    return correct.sum().item() / len(correct)


def warmup_then_decay(fraction):
    """The factor of the peak rate: it rises for 40 % of the run, then falls to 0."""
    return max(0, min(fraction / 0.4, (1 - fraction) / 0.6))


def main():
    train(parse_args())
    # DTensor keeps Gloo's threads until the exit, which a busy one may abort
    time.sleep(0.1)
    dist.destroy_process_group()  # only now, when train() has freed the model


if __name__ == "__main__":
    main()
