"""Train a ConvNet on MNIST, split by hand across two devices, and DDP for more.

torchrun --standalone --nproc-per-node=1 05_model_parallel/train.py --chunks 8
torchrun --standalone --nproc-per-node=2 05_model_parallel/train.py
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
    # MP-1: two devices for each process of this machine
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    devices = [f"cuda:{index}" if gpus >= needed else "cpu" for index in range(needed)]
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per process")
    add("--lr", type=float, default=0.6, help="peak rate for 256 images per step")
    add("--seed", type=int, default=0, help="for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--devices", default=",".join(devices), help="two for each local process")
    # MP-3: how many
    add("--chunks", type=int, default=4, help="micro-batches per step")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of this file show")
    if min(args.epochs, args.batch_size, args.chunks) < 1 or args.output.is_dir():
        parser.error("--epochs, --batch-size, --chunks: at least 1; --output: a file")
    if os.environ["RANK"] == "0":  # only rank 0 saves
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output.parent).close()  # fails if read-only
    devices = args.devices.split(",")
    if len(devices) != needed:
        parser.error(f"--devices must name {needed} devices, two per process")
    if 0 < gpus < needed and "cpu" in devices and os.environ["RANK"] == "0":
        print(f"training on the CPU, as it needs {needed} GPUs, and finds {gpus}")
    args.devices = [torch.device(name) for name in devices]
    return args


class SplitConvNet(ConvNet):
    """A ConvNet on two devices.

    Images [N, 1, 28, 28] on the first one to logits [N, 10] on the second.
    """

    def __init__(self, devices, chunks):
        super().__init__()
        self.devices = devices
        self.chunks = chunks
        # MP-1: a part on each
        self.layer1.to(devices[0])
        self.layer2.to(devices[1])
        self.fc.to(devices[1])

    def forward(self, images):
        logits = []
        # MP-3: the first GPU starts the next one while the second is busy
        for micro_batch in images.chunk(self.chunks):
            hidden = self.layer1(micro_batch)
            hidden = hidden.to(self.devices[1])  # MP-2: the backward sends its gradient
            logits.append(self.fc(self.layer2(hidden).flatten(1)))
        return torch.cat(logits)


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # its index on this machine
    # MP-1: the two devices of this process
    first, second = args.devices[2 * local_rank : 2 * local_rank + 2]
    if first.type == "cuda":
        torch.cuda.set_device(first)
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # torch 2.15: or one GPU
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    # MP-4: one process per machine downloads, and each rank has its own shard
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)
    train_sampler = DistributedSampler(train_set, seed=args.seed)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": first.type == "cuda"}
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=train_sampler, **options
    )
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    model = SplitConvNet((first, second), args.chunks)
    # MP-4: no device_ids, as the model has two devices
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    torch.manual_seed(args.seed + rank)  # MP-4: each rank draws other dropout masks

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # images per step
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
        train_sampler.set_epoch(epoch)  # a new order
        model.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=second)  # loss sum, images
        # only rank 0 has a bar; None: on a terminal only
        no_bar = True if rank > 0 else None
        for images, labels in tqdm(train_loader, title, leave=False, disable=no_bar):
            images = images.to(
                first, non_blocking=True
            )  # MP-2: each where it is needed
            labels = labels.to(second, non_blocking=True)
            loss = criterion(ddp_model(images), labels)
            loss.backward()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        dist.all_reduce(total)  # sum over all ranks
        loss = (total[0] / total[1]).item()  # waits for the GPU
        if not math.isfinite(loss):
            raise ValueError(f"{title}: the loss is {loss}")  # before it is saved
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, first, second)
        if rank == 0:  # log on rank 0 only
            print(
                f"{title}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
                f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s",
                flush=True,
            )

    # 6. Save
    if rank == 0:  # MP-5: all of it, as a plain ConvNet's weights on the CPU
        weights = {name: part.cpu() for name, part in model.state_dict().items()}
        torch.save(weights, args.output)


@torch.no_grad()
def evaluate(model, test_loader, first, second):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # all take BatchNorm's of rank 0
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for images, labels in test_loader:
        images = images.to(first, non_blocking=True)
        labels = labels.to(second, non_blocking=True)
        correct.append(model(images).argmax(1) == labels)
    correct = gather_in_order(torch.cat(correct), len(test_loader.dataset))
    return correct.sum().item() / len(correct)


def warmup_then_decay(fraction):
    """The factor of the peak rate: it rises for 40 % of the run, then falls to 0."""
    return max(0, min(fraction / 0.4, (1 - fraction) / 0.6))


def main():
    train(parse_args())
    dist.destroy_process_group()  # only now, when train() has freed the model


if __name__ == "__main__":
    main()
