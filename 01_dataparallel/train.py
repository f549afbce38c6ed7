"""Train a ConvNet on MNIST in one process: on the CPU, on one GPU or, through DataParallel, on all GPUs of a machine.

    bash 01_dataparallel/run.sh
    python 01_dataparallel/train.py --epochs 5 --batch-size 256 --amp
    CUDA_VISIBLE_DEVICES=0,1 python 01_dataparallel/train.py
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # after this folder, where a copied common/ may be
from common.data import load_mnist
from common.model import ConvNet


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
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    for name, value in vars(args).items():
        if name != "seed" and type(value) in (int, float) and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.device == "cuda" and torch.cuda.device_count() < 1:
        parser.error(f"each process needs a GPU, torch finds {torch.cuda.device_count()}: start fewer, or --device cpu")
    if os.path.isdir(out := args.output) or not os.access(out if os.path.exists(out) else f"{out.parent}/", os.W_OK):
        parser.error(f"--output {out}: cannot write this file; name one in a folder that exists and is yours")
    return args


def train(args):
    # 1. Setup
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = RandomSampler(train_set)
    images_per_epoch = len(train_sampler)
    loading = {"collate_fn": tuple, "pin_memory": args.device == "cuda"}  # tuple: the sets give whole batches
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loading)
    test_loader = DataLoader(test_set, 250, **loading)

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    model = nn.DataParallel(net) if args.device == "cuda" else net  # DP-1: split each batch among the GPUs
    model = torch.compile(model) if args.compile else model

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss()
    global_batch = args.batch_size
    optimizer = torch.optim.SGD(model.parameters(), args.lr * global_batch / 256, momentum=0.9, nesterov=True)
    steps = args.epochs * len(train_loader)  # the rate rises for 40 % of them, then falls to 0
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / (steps * 0.4 + 1), (steps - step) / (steps * 0.6)))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        start, total_loss = time.perf_counter(), torch.zeros((), device=device)
        bar = tqdm(train_loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=None)
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
        loss, seconds = total_loss.item() / images_per_epoch, time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
              f"{images_per_epoch / seconds:.0f} images/s", flush=True)

    # 6. Save
    torch.save({name: tensor.cpu() for name, tensor in net.state_dict().items()}, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """The fraction of the test set that the model classifies correctly; each image counts once."""
    model.eval()
    hits = torch.cat([model(images.to(device)).argmax(1) == labels.to(device) for images, labels in test_loader])
    model.train()
    return hits.sum().item() / len(hits)


def main():
    train(parse_args())


if __name__ == "__main__":
    main()
