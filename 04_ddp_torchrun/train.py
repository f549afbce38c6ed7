r"""Train a ConvNet on MNIST with DistributedDataParallel, one process per GPU, started by torchrun.

    torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/train.py --epochs 5 --amp
    bash 04_ddp_torchrun/run.sh

On two machines, where 10.0.0.1 is an address of the first; on the second with --node-rank=1:

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 \
        04_ddp_torchrun/train.py
"""

import argparse
import contextlib  # DDP-7
import gc  # DDP-1
import math
import os
import sys
import time
from datetime import timedelta  # DDP-1
from pathlib import Path

import torch
import torch.distributed as dist  # DDP-1
import torch.distributed.nn  # DDP-1: here, as a later import by DDP keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP-2
from torch.utils.data import DataLoader, DistributedSampler  # DDP-3
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # a common/ next to this file wins
from common.data import already_batched, load_mnist
from common.gather import gather_in_order  # DDP-5
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
    add("--timeout", type=positive_int, default=300, help="collective timeout in seconds")  # DDP-1
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # DDP-2
    add("--accumulate", type=positive_int, default=1, help="micro-batches per step")  # DDP-7
    add("--check", action="store_true", help="check the options and exit")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # DDP-0
        parser.error(f"--device cuda needs a GPU per process, and PyTorch finds {gpus}")
    if args.device == "cpu" and args.sync_bn:  # DDP-2
        parser.error("--sync-bn needs GPUs")
    if args.check:
        print(gpus)  # DDP-0: run.sh starts as many processes
        parser.exit()
    if "LOCAL_RANK" not in os.environ:  # DDP-0: torchrun sets it
        parser.error(f"run: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    return args


def train(args):
    # 1. Setup
    use_cuda = args.device == "cuda"
    local_rank = int(os.environ["LOCAL_RANK"])  # DDP-1
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
    train_sampler = DistributedSampler(train_set, seed=args.seed)  # DDP-3: one shard per rank
    test_sampler = DistributedSampler(test_set, shuffle=False)
    images_per_epoch = train_sampler.total_size
    loader_options = {"collate_fn": already_batched, "pin_memory": use_cuda}
    images_per_step = args.batch_size * args.accumulate  # DDP-7: per process
    train_loader = DataLoader(train_set, images_per_step, sampler=train_sampler, **loader_options)
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE, sampler=test_sampler, **loader_options)

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    if args.sync_bn:  # DDP-2
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, device_ids=[local_rank] if use_cuda else None, gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # evaluate() broadcasts them
    torch.manual_seed(args.seed + rank)  # different dropout per rank
    if args.compile:
        model = torch.compile(model)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = images_per_step * world_size  # DDP-3
    peak_lr = args.lr * math.sqrt(global_batch / 256)
    optimizer = torch.optim.SGD(model.parameters(), peak_lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)

    # 5. Train and evaluate
    steps_done = 0
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # DDP-3: reshuffle
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        disable = None if rank == 0 else True  # DDP-4: one progress bar
        progress = tqdm(train_loader, title, leave=False, disable=disable)
        for step, (images, labels) in enumerate(progress):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            images_in_step = len(labels)  # DDP-7: accumulate gradients
            parts = zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True)
            for part, (images, labels) in enumerate(parts, start=1):
                is_last_micro_batch = part * args.batch_size >= images_in_step
                with contextlib.nullcontext() if is_last_micro_batch else model.no_sync():
                    with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                        loss = criterion(model(images), labels)
                    (loss * (len(labels) / images_in_step)).backward()  # DDP-7
                total_loss += loss.detach() * len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)  # stabilises the warm-up
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * warmup_then_decay(steps_done, total_steps)
            optimizer.step()
            optimizer.zero_grad()
            steps_done += 1
            if step % 50 == 0:
                progress.set_postfix(loss=f"{loss.item():.4f}")
        dist.all_reduce(total_loss)  # DDP-5: sum over all ranks
        mean_loss = total_loss.item() / images_per_epoch
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        speed = images_per_epoch / seconds
        if rank == 0:  # DDP-4: log on rank 0 only
            print(f"{title}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{speed:.0f} images/s", flush=True)

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
        torch.save(weights, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # DDP-5: copy rank 0's to all ranks
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for images, labels in test_loader:
        predictions = model(images.to(device)).argmax(1)
        correct.append(predictions == labels.to(device))
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))  # DDP-5: from all ranks
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
    gc.collect()  # DDP-1: free the model before destroying the group, or the exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
