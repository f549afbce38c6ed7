"""Train a ConvNet on MNIST as a pipeline: two stages, each a process of its own.

torchrun --standalone --nproc-per-node=2 05_model_parallel/pipeline.py --schedule 1f1b
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
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
    add("--batch-size", type=int, default=64, help="images per step")
    add("--lr", type=float, default=0.6, help="peak rate for 256 images per step")
    add("--seed", type=int, default=0, help="for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=devices, default=devices[0], help="where to train")
    # MP-3: how many, and when
    add("--chunks", type=int, default=4, help="micro-batches per step")
    schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    add("--schedule", choices=schedules, default="gpipe", help="their order")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of this file show")
    if min(args.epochs, args.batch_size, args.chunks) < 1 or args.output.is_dir():
        parser.error("--epochs, --batch-size, --chunks: at least 1; --output: a file")
    if os.environ["RANK"] == "0":  # only rank 0 saves
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output.parent).close()  # fails if read-only
    if os.environ["WORLD_SIZE"] != "2":  # MP-1: one per stage
        world_size = os.environ["WORLD_SIZE"]
        parser.error(f"the model has 2 stages: start 2 processes, not {world_size}")
    if args.batch_size % args.chunks:  # MP-3: the stages would expect other sizes
        parser.error(f"{args.chunks} --chunks do not divide --batch-size")
    if args.schedule == "1f1b" and args.chunks < 2:  # MP-3: a limit of torch
        parser.error("--schedule 1f1b needs at least 2 --chunks, one per stage")
    args.schedule = schedules[args.schedule]
    return args


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
    # MP-4: both ranks read all images in the same order
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)
    options = {"pin_memory": device.type == "cuda"}
    generator = torch.Generator().manual_seed(args.seed)
    train_loader = DataLoader(
        train_set,
        args.batch_size,
        shuffle=True,
        generator=generator,
        drop_last=True,  # MP-3: micro-batches of one size
        **options,
    )
    if len(train_loader) == 0:
        raise ValueError(f"--batch-size is larger than the {len(train_set)} images")
    test_loader = DataLoader(test_set, 250, **options)

    # 3. Model
    whole = ConvNet()
    if rank == 0:  # MP-1: each rank keeps one stage, with the names of the whole model
        del whole.layer2, whole.fc
        model = nn.Sequential(whole.layer1, nn.Flatten())
    else:
        del whole.layer1
        unflatten = nn.Unflatten(1, (16, 14, 14))
        model = nn.Sequential(unflatten, whole.layer2, nn.Flatten(), whole.fc)
    model.to(device)
    # MP-2: what each stage receives and returns. Without these examples, PipelineStage
    # would infer the shapes by a trial run, which counts in BatchNorm's statistics.
    size = args.batch_size // args.chunks
    images = torch.empty(size, 1, 28, 28, device=device)
    hidden = torch.empty(size, 16 * 14 * 14, device=device, requires_grad=True)
    logits = torch.empty(size, 10, device=device, requires_grad=True)
    if rank == 0:
        stage = PipelineStage(model, 0, world_size, device, images, hidden)
    else:
        stage = PipelineStage(model, 1, world_size, device, hidden, logits)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    # MP-3: averages the losses of the micro-batches
    schedule = args.schedule(stage, args.chunks, criterion)
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
        for images, labels in tqdm(train_loader, title, leave=False, disable=no_bar):
            if rank == 0:
                schedule.step(images.to(device, non_blocking=True))
            else:
                losses = []  # one per micro-batch
                schedule.step(
                    target=labels.to(device, non_blocking=True), losses=losses
                )
                total[0] += torch.stack(losses).detach().mean() * len(labels)
                total[1] += len(labels)
            gradients = [parameter.grad for parameter in model.parameters()]
            squared_norm = nn.utils.get_total_norm(gradients) ** 2
            dist.all_reduce(squared_norm)  # MP-1: the norm of both stages' gradients
            norm = squared_norm.sqrt()
            nn.utils.clip_grads_with_norm_(model.parameters(), MAX_GRAD_NORM, norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        dist.all_reduce(total)  # 0 on rank 0
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
    # MP-5: both stages on rank 0 only; the other rank may have no memory for them
    weights = {name: part.cpu() for name, part in whole.state_dict().items()}
    stages = [None] * world_size if rank == 0 else None
    dist.gather_object(weights, stages)
    if rank == 0:
        torch.save(stages[0] | stages[1], args.output)


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that both stages classify correctly."""
    rank = dist.get_rank()
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in test_loader:
        hidden = torch.empty(len(images), 16 * 14 * 14, device=device)
        if rank == 0:
            hidden = model(images.to(device, non_blocking=True))
        dist.broadcast(hidden, src=0)  # MP-2: to the other stage
        if rank == 1:
            labels = labels.to(device, non_blocking=True)
            correct += (model(hidden).argmax(1) == labels).sum()
    dist.all_reduce(correct)  # MP-5: 0 on rank 0
    return correct.item() / len(test_loader.dataset)


def warmup_then_decay(fraction):
    """The factor of the peak rate: it rises for 40 % of the run, then falls to 0."""
    return max(0, min(fraction / 0.4, (1 - fraction) / 0.6))


def main():
    train(parse_args())
    dist.destroy_process_group()  # only now, when train() has freed the model


if __name__ == "__main__":
    main()
