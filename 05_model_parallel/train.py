"""Train a ConvNet on MNIST, split by hand across two devices; more processes train copies with DDP.

    torchrun --standalone --nproc-per-node=1 05_model_parallel/train.py --devices cuda:0,cuda:1
    torchrun --standalone --nproc-per-node=2 05_model_parallel/train.py --devices cpu,cpu,cpu,cpu
    bash 05_model_parallel/run.sh
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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # a common/ next to this file wins
from common.data import already_batched, load_mnist
from common.gather import gather_in_order
from common.model import ConvNet

EVAL_BATCH_SIZE = 250  # images; the accuracy does not depend on it


def parse_args():
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=positive_int, default=1, help="passes over the training set")
    add("--batch-size", type=positive_int, default=64, help="images per process")
    add("--chunks", type=positive_int, default=4, help="micro-batches per step")  # MP-3
    add("--lr", type=positive_float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=writable_file, default="mnist.pt", help="path of the trained weights")
    add("--devices", default="auto", help="two per process: cuda:0,cuda:1 or cpu,cpu")  # MP-1
    add("--timeout", type=positive_int, default=300, help="collective timeout in seconds")
    add("--check", action="store_true", help="check the options and exit")
    args = parser.parse_args()
    if args.batch_size % args.chunks:  # MP-3
        parser.error(f"--batch-size {args.batch_size} cannot be split into {args.chunks} --chunks")
    gpus = torch.cuda.device_count()
    needed = 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # MP-1: on this machine
    names = args.devices.split(",")
    if args.devices == "auto" and gpus >= needed:
        names = [f"cuda:{index}" for index in range(needed)]
    elif args.devices == "auto":
        names = ["cpu"] * needed
    all_cuda = set(names) <= {f"cuda:{index}" for index in range(gpus)}
    all_cpu = set(names) == {"cpu"}
    if len(names) != needed or not (all_cuda or all_cpu):
        parser.error(f"--devices {args.devices}: name {needed}, all cpu or all among {gpus} GPUs")
    if args.check:
        parser.exit()
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"run: torchrun --standalone --nproc-per-node=1 {sys.argv[0]}")
    if args.devices == "auto" and gpus > 0 and all_cpu and os.environ["RANK"] == "0":
        print(f"training on the CPU: it needs {needed} GPUs, and PyTorch finds {gpus}", flush=True)
    local_rank = int(os.environ["LOCAL_RANK"])
    args.devices = [torch.device(name) for name in names[2 * local_rank : 2 * local_rank + 2]]
    return args


class SplitConvNet(ConvNet):
    """A ConvNet on two devices: [N, 1, 28, 28] on the first to scores [N, 10] on the second."""

    def __init__(self, devices, chunks):
        super().__init__()
        self.devices = devices
        self.chunks = chunks
        self.layer1.to(devices[0], memory_format=torch.channels_last)  # MP-1
        self.layer2.to(devices[1], memory_format=torch.channels_last)
        self.fc.to(devices[1])

    def forward(self, images):
        scores = []
        for micro_batch in images.chunk(self.chunks):  # MP-3: the first GPU starts on the next one
            hidden = self.layer1(micro_batch).to(self.devices[1])  # MP-2: and its gradient back
            scores.append(self.fc(self.layer2(hidden).flatten(1)))
        return torch.cat(scores)


def train(args):
    # 1. Setup
    first, second = args.devices
    use_cuda = first.type == "cuda"
    if use_cuda:
        torch.cuda.set_device(first)
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # else torch 2.15 allows one GPU
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timeout)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, seed=args.seed)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    images_per_epoch = train_sampler.total_size
    loader_options = {"collate_fn": already_batched, "pin_memory": use_cuda}
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loader_options)
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE, sampler=test_sampler, **loader_options)

    # 3. Model
    net = SplitConvNet(args.devices, args.chunks)
    model = DDP(net, device_ids=None, gradient_as_bucket_view=True)  # MP-4: on several devices
    model.broadcast_buffers = False  # evaluate() broadcasts them
    torch.manual_seed(args.seed + rank)  # different dropout per rank

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size
    peak_lr = args.lr * math.sqrt(global_batch / 256)
    optimizer = torch.optim.SGD(model.parameters(), peak_lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)

    # 5. Train and evaluate
    steps_done = 0
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total_loss = torch.zeros((), dtype=torch.float64, device=second)
        disable = None if rank == 0 else True  # one progress bar
        progress = tqdm(train_loader, title, leave=False, disable=disable)
        for step, (images, labels) in enumerate(progress):
            images = images.to(first, non_blocking=True)  # MP-2
            labels = labels.to(second, non_blocking=True)
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
        dist.all_reduce(total_loss)
        mean_loss = total_loss.item() / images_per_epoch
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, first, second)
        speed = images_per_epoch / seconds
        if rank == 0:
            print(f"{title}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{speed:.0f} images/s", flush=True)

    # 6. Save
    if rank == 0:  # MP-5: with the names of a plain ConvNet
        weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
        torch.save(weights, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, first, second):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # every rank evaluates what rank 0 saves
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for images, labels in test_loader:
        predictions = model(images.to(first)).argmax(1)
        correct.append(predictions == labels.to(second))
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))
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
