r"""Train two linear layers on MNIST with tensor parallelism: each rank has a part of both.

    torchrun --standalone --nproc-per-node=2 05_model_parallel/tensor_parallel.py --hidden 2048
    bash 05_model_parallel/run.sh tensor_parallel.py

On two machines, where 10.0.0.1 is an address of the first; on the second with --node-rank=1:

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 \
        05_model_parallel/tensor_parallel.py
"""

import argparse
import gc
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # here, as a later import keeps the process group alive
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # a common/ next to this file wins
from common.data import already_batched, load_mnist

EVAL_BATCH_SIZE = 250  # images; the accuracy does not depend on it


def parse_args():
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=positive_int, default=1, help="passes over the training set")
    add("--batch-size", type=positive_int, default=64, help="images per step; all ranks read them")
    add("--hidden", type=positive_int, default=512, help="features between the layers")  # MP-1
    add("--lr", type=positive_float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=writable_file, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if available")
    add("--timeout", type=positive_int, default=300, help="collective timeout in seconds")
    add("--check", action="store_true", help="check the options and exit")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        parser.error(f"--device cuda needs a GPU per process, and PyTorch finds {gpus}")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.hidden % world_size:  # MP-1
        parser.error(f"--hidden {args.hidden} cannot be split equally among {world_size} processes")
    if args.check:
        parser.exit()
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"run: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    return args


class Mlp(nn.Module):
    """Two linear layers: images [N, 1, 28, 28] to hidden features [N, hidden] to scores [N, 10]."""

    def __init__(self, hidden=512):
        super().__init__()
        self.up = nn.Linear(28 * 28, hidden)
        self.down = nn.Linear(hidden, 10)

    def forward(self, images):
        return self.down(self.up(images.flatten(1)).relu())


def train(args):
    # 1. Setup
    use_cuda = args.device == "cuda"
    local_rank = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(local_rank)  # one device per process, set before init_process_group
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timeout)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    generator = torch.Generator().manual_seed(args.seed)
    train_sampler = RandomSampler(train_set, generator=generator)  # MP-4: all ranks read all images
    test_sampler = SequentialSampler(test_set)
    images_per_epoch = len(train_sampler)
    loader_options = {"collate_fn": already_batched, "pin_memory": use_cuda}
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loader_options)
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE, sampler=test_sampler, **loader_options)

    # 3. Model
    mesh = init_device_mesh(args.device, (world_size,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # MP-1: split the hidden features
    model = parallelize_module(Mlp(args.hidden).to(device), mesh, plan)  # MP-2: down all-reduces

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
        disable = None if rank == 0 else True  # one progress bar
        progress = tqdm(train_loader, title, leave=False, disable=disable)
        for step, (images, labels) in enumerate(progress):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
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
        accuracy = evaluate(model, test_loader, device)
        speed = images_per_epoch / seconds
        if rank == 0:
            print(f"{title}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{speed:.0f} images/s", flush=True)

    # 6. Save
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # MP-5: complete, on rank 0
    if rank == 0:
        torch.save(weights, args.output)


@torch.no_grad()
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
    gc.collect()  # free the model before destroying the group, or the exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
