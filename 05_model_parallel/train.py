"""Train a ConvNet on MNIST, split by hand across two devices, with DDP for more.

torchrun --standalone --nproc-per-node=1 05_model_parallel/train.py --chunks 8
torchrun --standalone --nproc-per-node=2 05_model_parallel/train.py
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import ConvNet, warmup_then_decay


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    # MP-1: two devices for each process of this machine
    needed = 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    devices = [f"cuda:{index}" if gpus else "cpu" for index in range(needed)]
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=64, help="images per process: %(default)s")
    add("--lr", type=float, default=0.03, help="peak rate for 256 images: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="per process: %(default)s")
    add("--data-dir", type=Path, help="MNIST folder; default: download to ./data")
    add("--output", type=Path, default="mnist.pt", help="weights: %(default)s")
    add("--devices", default=",".join(devices), help="two per process: %(default)s")
    # MP-3: how many micro-batches
    add("--chunks", type=int, default=4, help="micro-batches per step: %(default)s")
    args = parser.parse_args()
    if f"cuda:{gpus}" in args.devices:  # MP-1: there is no such GPU
        parser.error(f"{needed} GPUs are needed, {gpus} found: change --devices")
    return args


class SplitConvNet(ConvNet):
    """A ConvNet on two devices.

    Images [N, 1, 28, 28] on the first one to logits [N, 10] on the second.
    """

    def __init__(self, devices, chunks):
        super().__init__()
        self.devices = devices
        self.chunks = chunks
        # MP-1: one part on each device
        self.layer1.to(devices[0])
        self.layer2.to(devices[1])
        self.fc.to(devices[1])

    def forward(self, images):
        logits = []
        # MP-3: the first GPU starts the next one while the second GPU is busy.
        # BatchNorm normalizes over a micro-batch, so the result depends on --chunks
        for micro_batch in images.chunk(self.chunks):
            hidden = self.layer1(micro_batch)
            hidden = hidden.to(self.devices[1])  # MP-2: the backward sends its gradient
            logits.append(self.fc(self.layer2(hidden).flatten(1)))
        return torch.cat(logits)


@record  # DDP-1: torchrun's last lines show the first error
def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])
    # MP-1: the two devices of this process
    devices = args.devices.split(",")[2 * local_rank : 2 * local_rank + 2]
    first, second = map(torch.device, devices)
    if first.type == "cuda":
        torch.cuda.set_device(first)
        # From torch 2.15 on, "nccl" has one GPU per process, but this model is on two.
        # "0" selects the form without this limit, the only one of older releases.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        dist.init_process_group("nccl")  # no device_id: this process has two
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_equal(**vars(args))  # DDP-1: an error if a machine has different options
    torch.manual_seed(args.seed)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    # DDP-3: one process per machine downloads; each rank trains on its own shard
    train_set, test_set = load_mnist(args.data_dir, download=local_rank == 0)
    sampler = DistributedSampler(train_set, seed=args.seed)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"num_workers": args.workers, "pin_memory": first.type == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    model = SplitConvNet((first, second), args.chunks)
    # MP-4: no device_ids, because the model is on two devices
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    torch.manual_seed(args.seed + rank)  # DDP-3: for dropout, differs between ranks

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3: images of all ranks per step
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    steps = args.epochs * len(train_loader)
    # taken in the middle of a step, so that no step has a rate of 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_decay((step + 0.5) / steps)
    )
    if rank == 0:  # DDP-4: log on rank 0 only
        print(f"starting on {world_size} ranks, {args.devices}", flush=True)

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP-3: shuffle again
        model.train()
        start = time.perf_counter()
        # the sum of the losses, and the number of images
        total = torch.zeros(2, dtype=torch.float64, device=second)
        # DDP-4: hide the progress bar on other ranks (True) and in files (None)
        hide = rank > 0 or None
        for batch in tqdm(train_loader, f"epoch {epoch}", leave=False, disable=hide):
            images, labels = batch
            # MP-2: each to the device that needs it
            images = images.to(first, non_blocking=True)
            labels = labels.to(second, non_blocking=True)
            optimizer.zero_grad()
            loss = criterion(ddp_model(images), labels)
            loss.backward()  # DDP-2: averages the gradients of all ranks
            optimizer.step()
            scheduler.step()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
        # no check_same_model(), which needs all weights on one device
        dist.all_reduce(total)  # DDP-5: the sum over all ranks
        total, count = total.tolist()  # waits for the GPU
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, len(test_set))
        if rank == 0:  # DDP-4: log and save on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  loss {total / count:.4f}"
                f"  accuracy {accuracy:.4f}  {seconds:.1f} s"
                f"  {count / seconds:.0f} images/s",
                flush=True,
            )
            # MP-5: like the weights of a plain ConvNet on the CPU
            weights = {name: part.cpu() for name, part in model.state_dict().items()}
            torch.save(weights, args.output)


@torch.no_grad()
def evaluate(model, batches, length):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # DDP-5: all ranks take rank 0's (BatchNorm)
        dist.broadcast(buffer, src=0)
    model.eval()
    first, second = model.devices
    correct = []
    for images, labels in batches:
        # MP-2: each to the device that needs it
        images = images.to(first, non_blocking=True)
        labels = labels.to(second, non_blocking=True)
        correct.append(model(images).argmax(1) == labels)
    # DDP-5: collect the results of all ranks
    correct = gather_in_order(torch.cat(correct), length)
    return correct.sum().item() / length


if __name__ == "__main__":
    train(parse_args())
    dist.destroy_process_group()  # DDP-1: after train() has released the model
