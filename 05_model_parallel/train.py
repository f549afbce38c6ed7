"""Train a ConvNet on MNIST, split by hand across two devices; with more processes also by DDP.

    torchrun --standalone --nproc-per-node=1 05_model_parallel/train.py --devices cuda:0,cuda:1
    torchrun --standalone --nproc-per-node=2 05_model_parallel/train.py --devices cpu,cpu,cpu,cpu
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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # if common/ is not next to this
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import ConvNet

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # MP-1: on this machine
    devices = [f"cuda:{index}" if gpus >= needed else "cpu" for index in range(needed)]
    add = parser.add_argument
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per process")
    add("--lr", type=float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--devices", default=",".join(devices), help="two per process of this machine")  # MP-1: on
    add("--chunks", type=int, default=4, help="micro-batches per step")  # MP-3: how many
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of this file show")
    if min(args.epochs, args.batch_size, args.chunks) < 1 or args.output.is_dir():
        parser.error("--epochs, --batch-size and --chunks must be at least 1, and --output a file")
    if os.environ["RANK"] == "0":  # only rank 0 saves
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output.parent).close()  # fails now if it is read-only
    devices = args.devices.split(",")
    if len(devices) != needed:
        parser.error(f"--devices {args.devices}: name {needed} devices, two per process")
    if 0 < gpus < needed and "cpu" in devices and os.environ["RANK"] == "0":
        print(f"training on the CPU: it needs {needed} GPUs, and PyTorch finds {gpus}", flush=True)
    args.devices = [torch.device(name) for name in devices]
    return args


class SplitConvNet(ConvNet):
    """A ConvNet on two devices: [N, 1, 28, 28] on the first to logits [N, 10] on the second."""

    def __init__(self, devices, chunks):
        super().__init__()
        self.devices = devices
        self.chunks = chunks
        parts = (self.layer1, devices[0]), (self.layer2, devices[1]), (self.fc, devices[1])
        for part, device in parts:  # MP-1: a part on each
            layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
            part.to(device, memory_format=layout)  # CPU: a third faster; GPU: DDP would warn

    def forward(self, images):
        logits = []
        for micro_batch in images.chunk(self.chunks):  # MP-3: the first GPU starts on the next one
            hidden = self.layer1(micro_batch).to(self.devices[1])  # MP-2: and its gradient back
            logits.append(self.fc(self.layer2(hidden).flatten(1)))
        return torch.cat(logits)


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it
    first, second = devices = args.devices[2 * local_rank : 2 * local_rank + 2]  # MP-1: its two
    if first.type == "cuda":
        torch.cuda.set_device(first)  # set before init_process_group
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # else torch 2.15 allows one GPU
    dist.init_process_group("nccl" if first.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)  # one downloads it
    train_sampler = DistributedSampler(train_set, seed=args.seed)  # MP-4: one shard per rank
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": first.type == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    net = SplitConvNet(devices, args.chunks)
    model = DDP(net, gradient_as_bucket_view=True)  # MP-4: no device_ids, as it has two
    torch.manual_seed(args.seed + rank)  # MP-4: other random numbers on each rank

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # images per step
    lr = args.lr * (global_batch / 256) ** 0.5  # keeps the noise of a step: arXiv:1705.08741
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_decay(step, total_steps))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # reshuffle
        net.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=second)  # sum of losses, count of images
        # One bar, of rank 0; None: on a terminal only
        for images, labels in tqdm(train_loader, title, leave=False, disable=rank > 0 or None):
            images = images.to(first, non_blocking=True)  # MP-2: each where it is needed
            labels = labels.to(second, non_blocking=True)
            loss = criterion(model(images), labels)
            loss.backward()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        dist.all_reduce(total)  # sum over all ranks
        loss = (total[0] / total[1]).item()  # waits for the GPU
        assert math.isfinite(loss), f"{title}: the loss is {loss}"  # before it is saved
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, first, second)
        if rank == 0:  # log on rank 0 only
            print(f"{title}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
                  f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s", flush=True)

    # 6. Save
    if rank == 0:  # MP-5: save on rank 0 only, with the names of a plain ConvNet, on one device
        torch.save({name: tensor.cpu() for name, tensor in net.state_dict().items()}, args.output)


@torch.no_grad()
def evaluate(net, test_loader, first, second):
    """Return the fraction of the test set that the network classifies correctly."""
    for buffer in net.buffers():  # copy rank 0's BatchNorm statistics to all ranks
        dist.broadcast(buffer, src=0)
    net.eval()
    correct = []
    for images, labels in test_loader:
        images, labels = images.to(first, non_blocking=True), labels.to(second, non_blocking=True)
        correct.append(net(images).argmax(1) == labels)
    correct = gather_in_order(torch.cat(correct), len(test_loader.dataset))  # of all ranks
    return correct.sum().item() / len(correct)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def main():
    train(parse_args())
    dist.destroy_process_group()  # only now, when train() has freed the model


if __name__ == "__main__":
    main()
