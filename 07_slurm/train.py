"""Train a ConvNet on MNIST under Slurm: it saves at a signal, resumes if requeued.

sbatch 07_slurm/run.sh --epochs 5
torchrun --standalone --nproc-per-node=2 07_slurm/train.py --epochs 5
"""

import argparse
import ctypes
import os
import sys
import time
import zipfile
from pathlib import Path

# CKPT-1: PR_SET_PDEATHSIG, SIGKILL: if torchrun dies, so does this, or two runs save
ctypes.CDLL(None).prctl(1, 9)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal, check_same_model, wait_for_file
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import ConvNet, warmup_then_decay
from common.stops import StopSignals


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=64, help="images per process: %(default)s")
    add("--lr", type=float, default=0.03, help="peak rate for 256 images: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="per process: %(default)s")
    add("--data-dir", type=Path, help="MNIST folder; default: download to ./data")
    add("--output", type=Path, default="mnist.pt", help="weights: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    add("--compile", action="store_true", help="compile: slow start, faster steps")
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")
    # CKPT-1: one path per run, because what is there is resumed
    add("--checkpoint", type=Path, default="checkpoint.pt", help="one file per run")
    add("--save-every", type=int, default=100, help="steps: %(default)s")
    return parser.parse_args()


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
    if args.output == args.checkpoint:  # CKPT-1: the weights would overwrite it
        raise ValueError("--output and --checkpoint must be different files")
    for path in (args.output, args.checkpoint):
        path.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    # DDP-3: one process per machine downloads; each rank trains on its own shard
    train_set, test_set = load_mnist(args.data_dir, download=local_rank == 0)
    length = len(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    model = ConvNet().to(device)
    if args.sync_bn:  # DDP-2: convert BatchNorm before the model is wrapped
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # DDP-2: all ranks get the weights of rank 0; gradients need no second copy
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    if args.compile:
        ddp_model = torch.compile(ddp_model)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3: images of all ranks per step
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    # CKPT-4: this start's peaks, because loading overwrites lr, weight_decay, ...
    peaks = [group["lr"] for group in optimizer.param_groups]
    # CKPT-1: saved is rank 0's: weights are equal, and DDP uses rank 0's buffers
    stateful = {"model": model, "optimizer": optimizer}
    progress = {"epoch": 1, "done": 0}  # done: images of this epoch, over all ranks
    # CKPT-3: with another length, seed or --lr the file is of another run
    must_match = {"length": length, "seed": args.seed, "lr": args.lr}
    if wait_for_file(args.checkpoint):  # CKPT-3: all ranks load: DDP(...) came before
        load_checkpoint(args.checkpoint, stateful, progress, must_match)
    check_equal(length=length, **progress)  # CKPT-3: a machine may have an old copy
    if progress["epoch"] > args.epochs:  # CKPT-3: fewer --epochs than before
        raise ValueError(f"{args.checkpoint} has {progress}: give more --epochs")
    if rank == 0:  # DDP-4: log on rank 0 only
        print(f"starting at {progress} on {world_size} ranks, {device}", flush=True)

    def seed_step():  # CKPT-4: a resume on as many ranks draws the same noise
        seen = (progress["epoch"] - 1) * length + progress["done"]
        torch.manual_seed(args.seed + seen * world_size + rank)  # unique per step, rank

    # 5. Train and evaluate
    # STOP-1: from here on a signal only sets a flag. Before, there is nothing to save
    stops = StopSignals()
    for epoch in range(progress["epoch"], args.epochs + 1):
        progress["epoch"] = epoch
        # CKPT-4: the rest of the epoch; it is empty if only the evaluation is missing
        shard = rest_of_epoch(length, args.seed + epoch, progress["done"])
        train_loader = DataLoader(train_set, args.batch_size, sampler=shard, **options)
        model.train()
        start, done_before = time.perf_counter(), progress["done"]
        # the sum of the losses, and the number of images
        total = torch.zeros(2, dtype=torch.float64, device=device)
        # DDP-4: hide the progress bar on other ranks (True) and in files (None)
        hide = rank > 0 or None
        seed_step()  # CKPT-4: iter() seeds workers, or a resume repeats epoch 1's noise
        batches = stops.iterate(train_loader)  # STOP-1: a signal must not end workers
        batches = tqdm(batches, f"epoch {epoch}", leave=False, disable=hide)
        seed_step()  # CKPT-4: again, because iter() has drawn a number
        for step, batch in enumerate(batches, start=1):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            with torch.autocast(args.device, torch.bfloat16, enabled=args.amp):
                loss = criterion(ddp_model(images), labels)
            loss.backward()  # DDP-2: averages the gradients of all ranks
            # CKPT-4: the rate follows the images, since the number of ranks may change
            done = min(progress["done"] + global_batch, length)
            middle = (progress["done"] + done) / 2 / length  # of this step in the epoch
            fraction = (epoch - 1 + middle) / args.epochs  # smaller with more --epochs
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * warmup_then_decay(fraction)
            optimizer.step()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
            progress["done"] = done
            # CKPT-1: every N steps of the epoch; all ranks enter, for the collectives
            last = step == len(train_loader)
            stop = stops.vote()  # STOP-1: all ranks stop together, or some would hang
            if stop or last or done // global_batch % args.save_every == 0:
                # DDP-2: an error if a weight is NaN or differs between the ranks
                check_same_model(model)
                dist.all_reduce(total)  # DDP-5: the sum over all ranks
                if rank == 0:  # DDP-4: the others wait for rank 0 below
                    save_checkpoint(args.checkpoint, stateful, progress, must_match)
                    tqdm.write(
                        f"epoch {epoch}/{args.epochs}  {done / length:.0%}"
                        f"  loss {total[0] / total[1]:.4f}"
                    )
                wait_for_file(args.checkpoint)  # CKPT-1: an error without a shared disk
                total.zero_()  # CKPT-4: so the next loss is the same after a resume
            if stop:  # STOP-1: wait for rank 0: torchrun kills all ranks if one fails
                if rank == 0:
                    tqdm.write("stopped: the same command resumes")
                dist.barrier()
                return 1
            seed_step()  # CKPT-4: before the next batch is fetched and augmented
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, stops.iterate(test_loader), len(test_set), device)
        if rank == 0:  # DDP-4: log and save on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  accuracy {accuracy:.4f}"
                f"  {seconds:.1f} s  {(length - done_before) / seconds:.0f} images/s",
                flush=True,
            )
            save_file(model.state_dict(), args.output)
        progress["done"] = 0


@torch.no_grad()
def evaluate(model, batches, length, device):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # DDP-5: all ranks take rank 0's (BatchNorm)
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for batch in batches:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(model(images).argmax(1) == labels)
    # DDP-5: collect the results of all ranks
    correct = gather_in_order(torch.cat(correct), length)
    return correct.sum().item() / length


def rest_of_epoch(length, seed, done):  # CKPT-4: no sampler of torch starts at `done`
    """Return this rank's share of the indices after the first `done` of the epoch.

    Ranks take turns: the first `done` are used up. The first ones fill the last turn.
    """
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    turns = torch.arange(done, length, world_size)
    return order[(turns + rank) % length].tolist()


def save_checkpoint(path, stateful, progress, must_match):  # CKPT-1: on rank 0
    state = {name: each.state_dict() for name, each in stateful.items()}
    save_file(state | {"progress": progress, "must_match": must_match}, path)


def save_file(content, path):  # CKPT-2: a kill in the middle leaves the old file
    """Write a temporary file, then rename it, which replaces path in one step."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before the rename, if the power fails
    # weights_only takes tensors and plain values: fail now, not at the resume
    torch.load(temporary, "cpu", mmap=True, weights_only=True)
    os.replace(temporary, path)


def load_checkpoint(path, stateful, progress, must_match):  # CKPT-3: on all ranks
    """Load into stateful and progress. Raises if it is damaged or from another run."""
    if zipfile.ZipFile(path).testzip():  # torch.load does not compare the checksums
        raise ValueError(f"{path} is damaged")
    state = torch.load(path, "cpu", mmap=True, weights_only=True)  # 1 copy per machine
    if state["must_match"] != must_match:
        raise ValueError(f"{path} has {state['must_match']}, not {must_match}")
    for name, each in stateful.items():
        each.load_state_dict(state[name])
    progress.update(state["progress"])


if __name__ == "__main__":
    code = train(parse_args())
    dist.destroy_process_group()  # DDP-1: after train() has released the model
    sys.exit(code)  # STOP-1: 1 after a stop, so that run.sh requeues the job
