"""Train a ConvNet on MNIST, cut by hand in two parts on two devices; in several processes also data parallel.

    bash 05_model_parallel/run.sh
    torchrun --standalone --nproc-per-node=1 05_model_parallel/train.py --devices cuda:0,cuda:1 --chunks 4
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
import torch.distributed.nn  # imported later, by DDP, it would keep the group alive past its end
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # after this folder, where a copied common/ may be
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--chunks", type=int, default=4, help="parts of a batch that follow each other")  # MP-3
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate for a global batch of 256 images")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the images")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of MNIST, downloaded if need be")
    parser.add_argument("--output", type=Path, default="mnist.pt", help="file for the trained weights")
    parser.add_argument("--devices", default="auto", help="two per process, as in cuda:0,cuda:1 or cpu,cpu")  # MP-1
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for another rank")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if name != "seed" and type(value) in (int, float) and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --standalone --nproc-per-node=1 {sys.argv[0]}")
    if args.batch_size % args.chunks:  # MP-3
        parser.error(f"--batch-size {args.batch_size} cannot be cut into {args.chunks} equal --chunks")
    gpus, needed = torch.cuda.device_count(), 2 * int(os.environ["LOCAL_WORLD_SIZE"])  # MP-1: two devices a process
    names = [f"cuda:{index}" for index in range(needed)] if gpus >= needed else ["cpu"] * needed
    names = args.devices.split(",") if args.devices != "auto" else names
    if len(names) != needed or not ({*names} <= {f"cuda:{index}" for index in range(gpus)} or set(names) == {"cpu"}):
        parser.error(f"--devices {args.devices}: name {needed}, all cpu or all from cuda:0 on; torch finds {gpus} GPUs")
    args.devices = [torch.device(name) for name in names[2 * int(os.environ["LOCAL_RANK"]) :][:2]]
    if os.path.isdir(out := args.output) or not os.access(out if os.path.exists(out) else f"{out.parent}/", os.W_OK):
        parser.error(f"--output {out}: cannot write this file; name one in a folder that exists and is yours")
    return args


class SplitConvNet(ConvNet):
    """A ConvNet on two devices: images [N, 1, 28, 28] on the first to class scores [N, 10] on the second."""

    def __init__(self, devices, chunks):
        super().__init__()
        self.devices, self.chunks = devices, chunks
        self.layer1.to(devices[0], memory_format=torch.channels_last)  # MP-1: two parts, with the names of the whole
        self.layer2.to(devices[1], memory_format=torch.channels_last)
        self.fc.to(devices[1])

    def forward(self, images):
        scores = []
        for chunk in images.chunk(self.chunks):  # MP-3: GPUs queue their work: the first is at the next chunk already
            hidden = self.layer1(chunk).to(self.devices[1])  # MP-2: backward() sends the gradient the other way
            scores.append(self.fc(self.layer2(hidden).flatten(1)))
        return torch.cat(scores)


def train(args):
    # 1. Setup
    first, second = args.devices
    torch.cuda.set_device(first if first.type == "cuda" else -1)  # -1: no GPU
    dist.init_process_group("nccl" if first.type == "cuda" else "gloo", timeout=timedelta(seconds=args.timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, seed=args.seed)
    images_per_epoch = train_sampler.total_size
    loading = {"collate_fn": tuple, "pin_memory": first.type == "cuda"}  # tuple: the sets give whole batches
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loading)
    test_loader = DataLoader(test_set, 250, sampler=DistributedSampler(test_set, shuffle=False), **loading)

    # 3. Model
    net = SplitConvNet(args.devices, args.chunks)
    model = DDP(net, device_ids=None, forward_sync_buffers=False, gradient_as_bucket_view=True)  # MP-4: copies of both

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss()
    global_batch = args.batch_size * world_size
    optimizer = torch.optim.SGD(model.parameters(), args.lr * global_batch / 256, momentum=0.9, nesterov=True)
    steps = args.epochs * len(train_loader)  # the rate rises for 40 % of them, then falls to 0
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / (steps * 0.4 + 1), (steps - step) / (steps * 0.6)))

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        start, total_loss = time.perf_counter(), torch.zeros((), device=second)
        bar = tqdm(train_loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=rank != 0 or None)
        for images, labels in bar:
            images, labels = images.to(first, non_blocking=True), labels.to(second, non_blocking=True)  # MP-2
            loss = criterion(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # large batches start without a jump
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total_loss += loss.detach() * len(labels)
        dist.all_reduce(total_loss)
        loss, seconds = total_loss.item() / images_per_epoch, time.perf_counter() - start
        accuracy = evaluate(net, test_loader, first, second)
        if rank == 0:
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images_per_epoch / seconds:.0f} images/s", flush=True)

    # 6. Save
    if rank == 0:  # MP-5: the names are those of the whole network
        torch.save({name: tensor.cpu() for name, tensor in net.state_dict().items()}, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, first, second):
    """The fraction of the test set that the model classifies correctly; each image counts once."""
    for buffer in model.buffers():  # the running statistics differ from rank to rank; rank 0's are saved
        dist.broadcast(buffer, src=0)
    model.eval()
    hits = torch.cat([model(images.to(first)).argmax(1) == labels.to(second) for images, labels in test_loader])
    hits = gather_in_order(hits, len(test_loader.dataset))  # without the sampler's padding
    model.train()
    return hits.sum().item() / len(hits)


def main():
    train(parse_args())
    gc.collect()  # the model goes before the group does: in the other order some exits abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
