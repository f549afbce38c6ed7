"""Train a ConvNet on MNIST as a pipeline of two stages, on two processes, in micro-batches.

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
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # if common/ is not next to this
from common.data import load_mnist
from common.model import ConvNet

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per step")
    add("--lr", type=float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    add("--chunks", type=int, default=4, help="micro-batches per step")  # MP-3: how many
    add("--schedule", choices=("gpipe", "1f1b"), default="gpipe", help="order of the micro-batches")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of this file show")
    if min(args.epochs, args.batch_size, args.chunks) < 1 or args.output.is_dir():
        parser.error("--epochs, --batch-size and --chunks must be at least 1, and --output a file")
    if os.environ["RANK"] == "0":  # only rank 0 saves
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output.parent).close()  # fails now if it is read-only
    if os.environ["WORLD_SIZE"] != "2":  # MP-1: one per stage
        parser.error(f"the network has 2 stages: start 2 processes, not {os.environ['WORLD_SIZE']}")
    if args.batch_size % args.chunks:  # MP-3: the stages would expect other sizes
        parser.error(f"--batch-size {args.batch_size} cannot be split into {args.chunks} --chunks")
    if args.schedule == "1f1b" and args.chunks < 2:  # MP-3: a limit of torch
        parser.error("--schedule 1f1b needs at least 2 --chunks, one per stage")
    return args


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before init_process_group
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)  # one downloads it
    options = {"pin_memory": device.type == "cuda"}
    generator = torch.Generator().manual_seed(args.seed)  # MP-4: both ranks read all images
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, generator=generator,
                              drop_last=True, **options)  # MP-3: micro-batches of one size
    test_loader = DataLoader(test_set, 250, **options)

    # 3. Model
    net = ConvNet()
    if rank == 0:  # MP-1: each rank keeps one stage, with the names of the whole network
        del net.layer2, net.fc
        model = nn.Sequential(net.layer1, nn.Flatten())
    else:
        del net.layer1
        model = nn.Sequential(nn.Unflatten(1, (16, 14, 14)), net.layer2, nn.Flatten(), net.fc)
    model.to(device)
    # MP-2: what each stage receives and returns. Without these examples, PipelineStage would infer
    # the shapes by a trial run, which counts in BatchNorm's statistics.
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
    schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    schedule = schedules[args.schedule](stage, args.chunks, criterion)  # MP-3: averages them
    lr = args.lr * (args.batch_size / 256) ** 0.5  # keeps the noise of a step: arXiv:1705.08741
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_decay(step, total_steps))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        model.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, count of images
        # One bar, of rank 0; None: on a terminal only
        for images, labels in tqdm(train_loader, title, leave=False, disable=rank > 0 or None):
            if rank == 0:
                schedule.step(images.to(device, non_blocking=True))
            else:
                losses = []  # one per micro-batch
                schedule.step(target=labels.to(device, non_blocking=True), losses=losses)
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
        assert math.isfinite(loss), f"{title}: the loss is {loss}"  # before it is saved
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:  # log on rank 0 only
            print(f"{title}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
                  f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s", flush=True)

    # 6. Save
    stages = [None] * world_size
    weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
    dist.all_gather_object(stages, weights)  # MP-5: of both stages
    if rank == 0:
        torch.save(stages[0] | stages[1], args.output)


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that both stages together classify correctly."""
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


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def main():
    train(parse_args())
    dist.destroy_process_group()  # only now, when train() has freed the model


if __name__ == "__main__":
    main()
