"""Train a ConvNet on MNIST, cut in two parts that two processes compute, several parts of a batch at once.

    bash 05_model_parallel/run.sh pipeline.py --schedule 1f1b --chunks 8
"""

import argparse
import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, it would keep the group alive past its end
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # after this folder, where a copied common/ may be
from common.data import load_mnist
from common.model import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, which pass through both processes")
    parser.add_argument("--chunks", type=int, default=4, help="parts of a batch that follow each other")  # MP-3
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="gpipe", help="what is next")  # MP-3
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate for a global batch of 256 images")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the images")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of MNIST, downloaded if need be")
    parser.add_argument("--output", type=Path, default="mnist.pt", help="file for the trained weights")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it can be")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for another rank")
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    for name, value in vars(args).items():
        if name != "seed" and type(value) in (int, float) and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if args.batch_size % args.chunks:  # MP-3
        parser.error(f"--batch-size {args.batch_size} cannot be cut into {args.chunks} equal --chunks")
    if int(os.environ["WORLD_SIZE"]) != 2:  # MP-1
        parser.error(f"the network is cut in 2 parts: start 2 processes, not {os.environ['WORLD_SIZE']}")
    if args.device == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        parser.error(f"each process needs a GPU, torch finds {torch.cuda.device_count()}: start fewer, or --device cpu")
    if os.path.isdir(out := args.output) or not os.access(out if os.path.exists(out) else f"{out.parent}/", os.W_OK):
        parser.error(f"--output {out}: cannot write this file; name one in a folder that exists and is yours")
    return args


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # one device a process, known before the group is made
    device = torch.device(args.device, local_rank)
    backend, gpu = ("nccl", device) if args.device == "cuda" else ("gloo", None)
    torch.cuda.set_device(gpu or -1)  # -1: no GPU
    dist.init_process_group(backend, device_id=gpu, timeout=timedelta(seconds=args.timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=args.seed)  # MP-4: both read all images
    loading = {"collate_fn": tuple, "pin_memory": args.device == "cuda"}  # tuple: the sets give whole batches
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, drop_last=True, **loading)  # MP-3
    test_loader = DataLoader(test_set, 250, **loading)
    images_per_epoch = len(train_loader) * args.batch_size

    # 3. Model
    net = ConvNet()
    if rank == 0:  # MP-1: each rank keeps one part, with the names of the whole
        del net.layer2, net.fc
        model = nn.Sequential(net.layer1, nn.Flatten())  # MP-2: memory is sent as it lies, so not as channels_last
    else:
        del net.layer1
        model = nn.Sequential(nn.Unflatten(1, (16, 14, 14)), net.layer2, nn.Flatten(), net.fc)
    chunk = args.batch_size // args.chunks  # MP-2: what goes in, is sent on, comes out; a stage not told of it tries it
    shapes = (chunk, 1, 28, 28), (chunk, 16 * 14 * 14), (chunk, 10)  # out with empty memory, and that spoils BatchNorm
    ends = [torch.empty(shape, device=device, requires_grad=shape != shapes[0]) for shape in shapes]
    stage = PipelineStage(model.to(device), rank, world_size, device, ends[rank], ends[rank + 1])

    # 4. Loss and optimizer
    schedule = (ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B)(stage, args.chunks, nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), args.lr * args.batch_size / 256, momentum=0.9, nesterov=True)
    steps = args.epochs * len(train_loader)  # the rate rises for 40 % of them, then falls to 0
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / (steps * 0.4 + 1), (steps - step) / (steps * 0.6)))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        start, total_loss = time.perf_counter(), torch.zeros((), device=device)
        for images, labels in tqdm(train_loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=rank > 0 or None):
            losses = []  # of the chunks, on the last rank
            if rank == 0:
                schedule.step(images.to(device, non_blocking=True))
            else:
                schedule.step(target=labels.to(device, non_blocking=True), losses=losses)
            squares = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]) ** 2
            dist.all_reduce(squares)  # MP-1: the norm is that of both parts
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squares.sqrt())  # for a start without a jump
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total_loss += sum(loss.detach() for loss in losses) * (args.batch_size / args.chunks)
        dist.all_reduce(total_loss)
        loss, seconds = total_loss.item() / images_per_epoch, time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images_per_epoch / seconds:.0f} images/s", flush=True)

    # 6. Save
    states = [None] * world_size
    dist.all_gather_object(states, {name: tensor.cpu() for name, tensor in net.state_dict().items()})  # MP-5
    if rank == 0:
        torch.save(states[0] | states[1], args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """The fraction of the test set that both parts classify correctly; each image counts once."""
    hits = torch.zeros((), dtype=torch.int64, device=device)
    model.eval()
    for images, labels in test_loader:
        if dist.get_rank() == 0:
            dist.send(model(images.to(device)), dst=1)  # MP-2: no schedule, as nothing comes back
        else:
            hidden = torch.empty(len(images), 16 * 14 * 14, device=device)
            dist.recv(hidden, src=0)
            hits += (model(hidden).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(hits)  # MP-5: the first part's are 0
    model.train()
    return hits.item() / len(test_loader.dataset)


def main():
    train(parse_args())
    gc.collect()  # the model goes before the group does: in the other order some exits abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
