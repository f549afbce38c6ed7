"""Train a ConvNet on MNIST as a pipeline of two stages, on two processes, in micro-batches.

    torchrun --standalone --nproc-per-node=2 05_model_parallel/pipeline.py --schedule 1f1b
    bash 05_model_parallel/run.sh pipeline.py --chunks 8
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
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
    add("--batch-size", type=positive_int, default=64, help="images per step")
    add("--chunks", type=positive_int, default=4, help="micro-batches per step")  # MP-3
    add("--schedule", choices=("gpipe", "1f1b"), default="gpipe", help="order of the micro-batches")
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
    if args.batch_size % args.chunks:  # MP-3
        parser.error(f"--batch-size {args.batch_size} cannot be split into {args.chunks} --chunks")
    if int(os.environ.get("WORLD_SIZE", 2)) != 2:  # MP-1
        parser.error(f"the network has 2 stages: start 2 processes, not {os.environ['WORLD_SIZE']}")
    if args.check:
        parser.exit()
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"run: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    return args


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
    train_sampler = RandomSampler(train_set, generator=generator)  # MP-4: all images
    test_sampler = SequentialSampler(test_set)
    loader_options = {"collate_fn": already_batched, "pin_memory": use_cuda}
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, drop_last=True,
                              **loader_options)  # MP-3: the sizes of the micro-batches are fixed
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE, sampler=test_sampler, **loader_options)
    images_per_epoch = len(train_loader) * args.batch_size

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
    scores = torch.empty(size, 10, device=device, requires_grad=True)
    if rank == 0:
        stage = PipelineStage(model, 0, world_size, device, images, hidden)
    else:
        stage = PipelineStage(model, 1, world_size, device, hidden, scores)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss_share(scores, labels):  # MP-3: the losses of the micro-batches add up to the mean
        return criterion(scores, labels) / args.chunks

    schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    schedule = schedules[args.schedule](stage, args.chunks, loss_share)
    schedule.scale_grads = False  # which torch 2.6 does not have, and later versions do by default
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
        for images, labels in progress:
            if rank == 0:
                schedule.step(images.to(device, non_blocking=True))
            else:
                losses = []  # one per micro-batch
                schedule.step(target=labels.to(device, non_blocking=True), losses=losses)
                total_loss += torch.stack(losses).detach().sum() * len(labels)
            gradients = [parameter.grad for parameter in model.parameters()]
            squared_norm = nn.utils.get_total_norm(gradients) ** 2
            dist.all_reduce(squared_norm)  # MP-1: the norm of both stages' gradients
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.7, squared_norm.sqrt())
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * warmup_then_decay(steps_done, total_steps)
            optimizer.step()
            optimizer.zero_grad()
            steps_done += 1
        dist.all_reduce(total_loss)
        mean_loss = total_loss.item() / images_per_epoch
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device)
        speed = images_per_epoch / seconds
        if rank == 0:
            print(f"{title}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{speed:.0f} images/s", flush=True)

    # 6. Save
    weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
    stages = [None] * world_size
    dist.all_gather_object(stages, weights)  # MP-5
    if rank == 0:
        torch.save(stages[0] | stages[1], args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that both stages together classify correctly."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in test_loader:
        if dist.get_rank() == 0:
            dist.send(model(images.to(device)), dst=1)  # MP-2
        else:
            hidden = torch.empty(len(images), 16 * 14 * 14, device=device)
            dist.recv(hidden, src=0)
            predictions = model(hidden).argmax(1)
            correct += (predictions == labels.to(device)).sum()
    dist.all_reduce(correct)  # MP-5: 0 on rank 0
    model.train()
    return correct.item() / len(test_loader.dataset)


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
