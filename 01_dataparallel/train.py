"""Train a ConvNet on MNIST in one process: on the CPU, on one GPU, or on all GPUs.

python 01_dataparallel/train.py --epochs 5 --batch-size 256
CUDA_VISIBLE_DEVICES=0 python 01_dataparallel/train.py --amp --compile
"""

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
if not (HERE / "common").exists():  # in this repository it is one folder above
    sys.path.append(str(HERE.parent))  # last: it may have a profile.py
from common.data import load_mnist
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
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or args.output.is_dir():
        parser.error("--epochs and --batch-size must be at least 1, --output a file")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=args.output.parent).close()  # fails if read-only
    return args


def train(args):
    # 1. Setup
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    options = {"pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, **options)
    test_loader = DataLoader(test_set, 250, **options)

    # 3. Model
    # channels_last: a third faster on the CPU; on a GPU DDP would warn (one channel)
    layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
    model = ConvNet().to(device, memory_format=layout)
    dp_model = model
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        # DP-1: DataParallel's threads would use float16; compile is untested
        if args.amp or args.compile:
            raise ValueError("--amp and --compile: one GPU (CUDA_VISIBLE_DEVICES=0)")
        dp_model = nn.DataParallel(model)  # DP-1: split each batch among the GPUs
    if args.compile:
        dp_model = torch.compile(dp_model)

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
        # None: a bar on a terminal only
        for batch in tqdm(train_loader, title, leave=False, disable=None):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = criterion(dp_model(images), labels)
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
        print(
            f"{title}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
            f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s",
            flush=True,
        )

    # 6. Save
    torch.save(model.state_dict(), args.output)


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


if __name__ == "__main__":
    main()
