"""Train a ConvNet on MNIST in one process: on the CPU, on one GPU, or on all GPUs of a machine.

    python 01_dataparallel/train.py --epochs 5 --batch-size 256
    CUDA_VISIBLE_DEVICES=0 python 01_dataparallel/train.py --amp --compile
    bash 01_dataparallel/run.sh
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # a common/ next to this file wins
from common.data import already_batched, load_mnist
from common.model import ConvNet

EVAL_BATCH_SIZE = 250  # images; the accuracy does not depend on it


def parse_args():
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=positive_int, default=1, help="passes over the training set")
    add("--batch-size", type=positive_int, default=64, help="images per process")
    add("--lr", type=positive_float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=writable_file, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if available")
    add("--amp", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--compile", action="store_true", help="compile the model: slower start, faster steps")
    add("--check", action="store_true", help="check the options and exit")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < 1:
        parser.error(f"--device cuda needs a GPU per process, and PyTorch finds {gpus}")
    if args.device == "cuda" and gpus > 1 and (args.amp or args.compile):  # DP-1
        parser.error("DataParallel has no --amp, --compile: set CUDA_VISIBLE_DEVICES=0 or use DDP")
    if args.check:
        parser.exit()
    return args


def train(args):
    # 1. Setup
    use_cuda = args.device == "cuda"
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = RandomSampler(train_set)
    test_sampler = SequentialSampler(test_set)
    images_per_epoch = len(train_sampler)
    loader_options = {"collate_fn": already_batched, "pin_memory": use_cuda}
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loader_options)
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE, sampler=test_sampler, **loader_options)

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    model = net
    if use_cuda and torch.cuda.device_count() > 1:
        model = nn.DataParallel(net)  # DP-1: split each batch among the GPUs
    if args.compile:
        model = torch.compile(model)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size
    peak_lr = args.lr * math.sqrt(global_batch / 256)
    optimizer = torch.optim.SGD(model.parameters(), peak_lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)

    # 5. Train and evaluate
    steps_done = 0
    for epoch in range(1, args.epochs + 1):
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        progress = tqdm(train_loader, title, leave=False, disable=None)
        for step, (images, labels) in enumerate(progress):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = criterion(model(images), labels)
            loss.backward()
            total_loss += loss.detach() * len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)  # stabilises the warm-up
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * warmup_then_decay(steps_done, total_steps)
            optimizer.step()
            optimizer.zero_grad()
            steps_done += 1
            if step % 50 == 0:
                progress.set_postfix(loss=f"{loss.item():.4f}")
        mean_loss = total_loss.item() / images_per_epoch
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        speed = images_per_epoch / seconds
        print(f"{title}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
              f"{speed:.0f} images/s", flush=True)

    # 6. Save
    weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
    torch.save(weights, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the model classifies correctly."""
    model.eval()
    correct = []
    for images, labels in test_loader:
        predictions = model(images.to(device)).argmax(1)
        correct.append(predictions == labels.to(device))
    correct = torch.cat(correct)
    model.train()
    return correct.sum().item() / len(correct)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def positive_int(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def positive_float(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def writable_file(text):
    path = Path(text)
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}; name a file in a writable folder")
    return path


def main():
    train(parse_args())


if __name__ == "__main__":
    main()
