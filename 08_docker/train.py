"""Train a ConvNet on MNIST with checkpoints: whenever it is stopped, the same command resumes it.

    torchrun --standalone --nproc-per-node=2 06_checkpointing/train.py
"""

import argparse
import contextlib
import itertools
import math
import os
import sys
import time
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # if common/ is not next to this
from common.data import load_mnist
from common.gather import check_equal, gather_in_order, wait_for_file
from common.model import ConvNet

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per process")
    add("--lr", type=float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    add("--amp", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--compile", action="store_true", help="compile the model: slower start, faster steps")
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # DDP-2: small batches
    add("--accumulate", type=int, default=1, help="micro-batches per step")  # DDP-7: larger batches
    add("--workers", type=int, default=0, help="DataLoader workers per process")
    add("--save-every", type=int, default=100, help="steps per checkpoint")  # CKPT-1: when, where
    add("--checkpoint", type=Path, default="checkpoint.pt", help="checkpoint path; one per run")
    add("--best", type=Path, default="best.pt", help="path of the weights of the best epoch")
    args = parser.parse_args()
    if "RANK" not in os.environ:  # DDP-1: torchrun sets it
        parser.error("start it with torchrun, as the first lines of this file show")
    if min(args.epochs, args.batch_size, args.accumulate, args.save_every) < 1:  # CKPT-1: fail now
        parser.error("--epochs, --batch-size, --accumulate and --save-every must be at least 1")
    files = {args.output.resolve(), args.checkpoint.resolve(), args.best.resolve()}
    if len(files) < 3 or any(file.is_dir() for file in files):
        parser.error("--output, --checkpoint and --best must be three different files")
    if os.environ["RANK"] == "0":  # DDP-4: only rank 0 saves
        for file in files:  # CKPT-1: make the folders
            file.parent.mkdir(parents=True, exist_ok=True)
    return args


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # DDP-1: torchrun sets it
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before init_process_group
    backend = "nccl" if device.type == "cuda" else "gloo"
    launcher, again = os.getppid(), os.getenv("TORCHELASTIC_RESTART_COUNT", "0")  # CKPT-1: save()
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)  # DDP-3: one downloads it
    length = len(train_set)  # CKPT-4: progress counts images
    options = {"pin_memory": device.type == "cuda", "num_workers": args.workers}
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
    net = ConvNet().to(device, memory_format=layout)  # CPU: a third faster; GPU: DDP would warn
    if args.sync_bn:  # DDP-2: convert BatchNorm, then wrap the model
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, gradient_as_bucket_view=True)  # backward averages the gradients
    if args.compile:
        model = torch.compile(model)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * args.accumulate * world_size  # DDP-7: images per step
    lr = args.lr * (global_batch / 256) ** 0.5  # keeps the noise of a step: arXiv:1705.08741
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * math.ceil(length / global_batch)  # CKPT-4: there is no loader yet
    peaks = [group["lr"] for group in optimizer.param_groups]  # a checkpoint has other rates
    progress = {"epoch": 1, "done": 0, "best": -math.inf}  # CKPT-1: add your own numbers
    stateful = {"model": net, "optimizer": optimizer}  # add an EMA, a GradScaler
    fingerprint = {"length": length, "seed": args.seed, "lr": args.lr, "names": [*net.state_dict()]}
    check_equal("options", {"epochs": args.epochs, "batch-size": args.batch_size, **fingerprint,
                            "accumulate": args.accumulate, "save-every": args.save_every})
    if wait_for_file(args.checkpoint):  # CKPT-3: all ranks read it
        load_checkpoint(args.checkpoint, stateful, progress, fingerprint)
    check_equal("progress in --checkpoint", (progress["epoch"], progress["done"]))
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    check_equal("weights", nn.utils.get_total_norm(trained).item(), 1e-6)  # DDP made them equal

    def save():  # CKPT-1: on rank 0; DDP keeps the weights of the others equal
        if os.getppid() != launcher:  # torchrun has died, and a new run may be using the files
            raise RuntimeError("torchrun was killed, and its processes end, too")
        if rank == 0:
            state = {name: each.state_dict() for name, each in stateful.items()}
            save_file(state | {"progress": progress, "fingerprint": fingerprint}, args.checkpoint)

    # 5. Train and evaluate
    for epoch in range(progress["epoch"], args.epochs + 1):  # CKPT-4: only what is left
        shard = rest_of_epoch(length, hash((args.seed, epoch)), progress["done"])
        seed = hash((args.seed, epoch, progress["done"], rank))  # integers hash alike in each start
        torch.manual_seed(seed)
        train_loader = DataLoader(train_set, args.batch_size, sampler=shard, **options,
                                  generator=torch.Generator().manual_seed(seed))  # of the workers
        check_equal("batches", (len(train_loader), len(test_loader)))  # or some ranks would wait
        net.train()
        title = f"epoch {epoch}/{args.epochs}" + f", restart {again}" * (again > "0")  # CKPT-1: log
        since = f"  since {progress['done'] / length:.0%}" * (progress["done"] > 0)
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, count of images
        # DDP-4: one bar, of rank 0; None: on a terminal only
        bar = iter(tqdm(train_loader, title, leave=False, disable=rank > 0 or None))  # DDP-7: once
        while micro_batches := list(itertools.islice(bar, args.accumulate)):  # those of one step
            images_in_step = sum(len(batch[1]) for batch in micro_batches)  # or batch["labels"]
            for number, batch in enumerate(micro_batches, start=1):  # the last backward averages
                with contextlib.nullcontext() if number == len(micro_batches) else model.no_sync():
                    images, labels = [part.to(device, non_blocking=True) for part in batch]
                    with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                        loss = criterion(model(images), labels)
                    (loss * (len(labels) / images_in_step)).backward()  # DDP-7: a weighted mean
                total[0] += loss.detach() * len(labels)
                total[1] += len(labels)
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)  # CKPT-5: compared
            step = total_steps * (epoch - 1 + progress["done"] / length) / args.epochs
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * warmup_then_decay(step, total_steps)  # CKPT-4: by progress
            done = progress["done"] = min(progress["done"] + global_batch, length)
            optimizer.step()
            optimizer.zero_grad()
            if done // global_batch % args.save_every == 0 or done == length:  # CKPT-1: save
                check_equal("gradients", norm.item(), 1e-6)  # CKPT-5: 1e-6, as CPUs may round
                check_equal("weights", nn.utils.get_total_norm(trained).item(), 1e-3)  # they add up
                save()
                if rank == 0:  # CKPT-1: log it, with the loss of this rank
                    tqdm.write(f"{title}  {done / length:.0%}  "
                               f"loss {total[0] / total[1]:.4f}  rate {group['lr']:.3g}")
            torch.manual_seed(hash((args.seed, epoch, done, rank)))  # CKPT-4: as after a resume
        dist.all_reduce(total)  # DDP-5: sum over all ranks
        loss = f"{total[0] / total[1]:.4f}" if total[1] else "-"  # CKPT-1: if no step was left
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(f"{title}  loss {loss}  accuracy {accuracy:.4f}  "  # CKPT-1: loss may be -
                  f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s{since}", flush=True)
        if accuracy > progress["best"]:  # on all ranks, as they all have the same
            progress["best"] = accuracy
            if rank == 0:
                save_file(net.state_dict(), args.best)
        progress |= {"epoch": epoch + 1, "done": 0}
        save()

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        save_file(net.state_dict(), args.output)  # CKPT-2: and not half of it
        print(f"finished after epoch {progress['epoch'] - 1}: {args.output}", flush=True)


@torch.no_grad()
def evaluate(net, test_loader, device):
    """Return the fraction of the test set that the network classifies correctly."""
    for buffer in net.buffers():  # DDP-5: copy rank 0's BatchNorm statistics to all ranks
        dist.broadcast(buffer, src=0)
    net.eval()
    correct = []
    for batch in test_loader:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(net(images).argmax(1) == labels)
    correct = gather_in_order(torch.cat(correct), len(test_loader.dataset))  # DDP-5: of all ranks
    return correct.sum().item() / len(correct)


def rest_of_epoch(length, seed, done):  # CKPT-4: in place of the sampler
    """This rank's part of the indices that an epoch has left; all parts are equally long."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    order = order[done:] + order[: (done - length) % dist.get_world_size()]  # the first ones pad it
    return order[dist.get_rank() :: dist.get_world_size()]


def save_file(content, path):  # CKPT-2: a kill leaves no half file
    """Write a temporary file and rename it, so that path is a complete file at any moment."""
    path = path.resolve()  # a symlink stays one
    with open(f"{path}.tmp", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    torch.load(f"{path}.tmp", "cpu", mmap=True, weights_only=True)  # what cannot be loaded fails
    os.replace(f"{path}.tmp", path)


def load_checkpoint(path, stateful, progress, fingerprint):  # CKPT-3: and reject what does not fit
    """Load a file. ValueError: damaged, or of another run; UnpicklingError: not plain values."""
    if not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip():
        raise ValueError(f"{path} is damaged")  # torch.load ignores the checksums
    state = torch.load(path, "cpu", mmap=True, weights_only=True)  # one copy per node
    if state.get("fingerprint") != fingerprint:
        raise ValueError(f"{path} has {state.get('fingerprint')}, not {fingerprint}: move it away")
    progress.update(state["progress"])
    for name, each in stateful.items():
        each.load_state_dict(state[name])
    if dist.get_rank() == 0:
        print(f"resuming from {path} at {progress} on {dist.get_world_size()} ranks", flush=True)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def main():
    train(parse_args())
    dist.destroy_process_group()  # DDP-1: only now, when train() has freed the model


if __name__ == "__main__":
    main()
