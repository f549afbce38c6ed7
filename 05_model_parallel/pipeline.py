"""Train a ConvNet on MNIST as a pipeline: each process is a stage with some layers.

torchrun --standalone --nproc-per-node=2 05_model_parallel/pipeline.py --schedule 1f1b
"""

import argparse
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal
from common.data import load_mnist
from common.model import ConvNet, warmup_then_decay

# MP-3: in which order a stage works on its micro-batches
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


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
    # MP-3: how many micro-batches, and in which order
    add("--chunks", type=int, default=4, help="micro-batches per step: %(default)s")
    add("--schedule", choices=SCHEDULES, default="gpipe", help="order of micro-batches")
    args = parser.parse_args()
    if args.batch_size % args.chunks:  # MP-3: micro-batches of equal size
        parser.error("--chunks must divide --batch-size")
    return args


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
    # MP-3: drop_last, because all micro-batches must have the same size
    train_loader = DataLoader(
        train_set, args.batch_size, shuffle=True, drop_last=True, **options
    )
    test_loader = DataLoader(test_set, args.batch_size, **options)

    # 3. Model
    # MP-1: each rank keeps a part of the layers, with their names in the whole model.
    # What they exchange must be contiguous, so they are not channels-last on the CPU.
    whole = ConvNet().to(memory_format=torch.contiguous_format)
    whole.layer2.append(nn.Flatten())
    layers = list(whole.named_children())
    if world_size > len(layers):
        raise ValueError(f"{world_size} processes, but only {len(layers)} layers")
    first, end = [len(layers) * part // world_size for part in (rank, rank + 1)]
    model = nn.Sequential(OrderedDict(layers[first:end])).to(device)
    del whole, layers
    # MP-2: what each stage receives and returns. Without these examples, PipelineStage
    # would infer the shapes by a trial run, which changes BatchNorm's statistics in
    # torch 2.13 and in older releases.
    shapes = [(1, 28, 28), (16, 14, 14), (32 * 7 * 7,), (10,)]
    micro_batch = args.batch_size // args.chunks
    examples = [
        torch.empty(micro_batch, *shapes[cut], device=device, requires_grad=cut > 0)
        for cut in (first, end)
    ]

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    # MP-3: averages the losses of the micro-batches
    stage = PipelineStage(model, rank, world_size, device, *examples)
    schedule = SCHEDULES[args.schedule](stage, args.chunks, criterion)
    # MP-3: without a loss there is no backward
    stage = PipelineStage(model, rank, world_size, device, *examples)
    test_schedule = ScheduleGPipe(stage, args.chunks)
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
            # MP-2: the first stage takes the images, the last one fills in the losses
            losses = []
            inputs = [images] if rank == 0 else []
            schedule.step(*inputs, target=labels, losses=losses)
            optimizer.step()
            scheduler.step()
            if losses:
                total[0] += torch.stack(losses).detach().mean() * len(labels)
                total[1] += len(labels)
        dist.all_reduce(total)  # MP-2: only the last stage has it
        total, count = total.tolist()  # waits for the GPU
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_schedule, test_loader, len(test_set), device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  loss {total / count:.4f}"
                f"  accuracy {accuracy:.4f}  {seconds:.1f} s"
                f"  {count / seconds:.0f} images/s",
                flush=True,
            )

    # 6. Save
    # MP-5: gather all stages on rank 0 only, as the others may lack the memory.
    # With Gloo, because NCCL would gather them in rank 0's GPU memory
    weights = {name: part.cpu() for name, part in model.state_dict().items()}
    stages = [None] * world_size if rank == 0 else None
    dist.gather_object(weights, stages, group=dist.new_group(backend="gloo"))
    if rank == 0:  # DDP-4: save on rank 0 only
        for each in stages:
            weights |= each
        torch.save(weights, args.output)


@torch.no_grad()
def evaluate(model, schedule, batches, length, device):
    """Return the fraction of the test set that all stages classify correctly."""
    model.eval()
    correct = torch.zeros((), device=device)
    for batch in batches:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        # MP-3: fill the last batch, because all micro-batches must have the same size
        missing = batches.batch_size - len(labels)
        images = nn.functional.pad(images, (0, 0) * 3 + (0, missing))
        inputs = [images] if dist.get_rank() == 0 else []
        logits = schedule.step(*inputs)
        if logits is not None:  # on the last stage
            correct += (logits[: len(labels)].argmax(1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / length


if __name__ == "__main__":
    train(parse_args())
    dist.destroy_process_group()  # DDP-1: after train() has released the model
