"""Train a ConvNet on MNIST in one process: CPU, one GPU, or all with DataParallel.

python 01_dataparallel/train.py --epochs 5
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.data import load_mnist
from common.model import ConvNet, warmup_then_decay


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=64, help="images per step: %(default)s")
    add("--lr", type=float, default=0.03, help="peak rate for 256 images: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="DataLoader workers: %(default)s")
    add("--data-dir", type=Path, help="MNIST folder; default: download to ./data")
    add("--output", type=Path, default="mnist.pt", help="weights: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    add("--compile", action="store_true", help="compile: slow start, faster steps")
    return parser.parse_args()


def train(args):
    # 1. Setup
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, **options)
    test_loader = DataLoader(test_set, 250, **options)

    # 3. Model
    model = dp_model = ConvNet().to(device)
    if args.device == "cuda" and torch.cuda.device_count() > 1:
        if args.amp:  # DP-1: its threads would silently use float16
            raise ValueError("--amp needs one GPU: set CUDA_VISIBLE_DEVICES=0")
        dp_model = nn.DataParallel(model)  # DP-1: split each batch among the GPUs
    if args.compile:
        dp_model = torch.compile(dp_model)

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
    print(f"starting on {device}", flush=True)

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        model.train()
        start = time.perf_counter()
        # the sum of the losses, and the number of images
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in tqdm(train_loader, f"epoch {epoch}", leave=False, disable=None):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            with torch.autocast(args.device, torch.bfloat16, enabled=args.amp):
                loss = criterion(dp_model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
        total, count = total.tolist()  # waits for the GPU
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, len(test_set), device)
        print(
            f"epoch {epoch}/{args.epochs}  loss {total / count:.4f}"
            f"  accuracy {accuracy:.4f}  {seconds:.1f} s"
            f"  {count / seconds:.0f} images/s",
            flush=True,
        )
        torch.save(model.state_dict(), args.output)


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
