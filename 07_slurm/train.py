"""Train a ConvNet on MNIST in a Slurm job: at a signal it saves, requeued it resumes.

sbatch 07_slurm/run.sh --epochs 5
torchrun --standalone --nproc-per-node=2 07_slurm/train.py --epochs 5
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

HERE = Path(__file__).resolve().parent
if not (HERE / "common").exists():  # in this repository it is one folder above
    sys.path.append(str(HERE.parent))  # last: it may have a profile.py
from common.data import load_mnist
from common.gather import check_equal, gather_in_order, wait_for_file
from common.model import ConvNet
from common.stops import StopSignals

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up


def parse_args():
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--epochs", type=int, default=1, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per process")
    add("--lr", type=float, default=0.6, help="peak rate for 256 images per step")
    add("--seed", type=int, default=0, help="for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=devices, default=devices[0], help="where to train")
    add("--amp", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--compile", action="store_true", help="slower start, faster steps")
    # DDP-2: for small batches
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")
    # DDP-7: for larger batches than fit
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    # CKPT-1: when and where to save
    add("--save-every", type=int, default=100, help="steps per checkpoint")
    add("--checkpoint", type=Path, default="checkpoint.pt", help="one path per run")
    add("--best", type=Path, default="best.pt", help="weights of the best epoch")
    add("--workers", type=int, default=0, help="DataLoader workers per process")
    args = parser.parse_args()
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        # SLURM-1: srun python; you export MASTER_ADDR and MASTER_PORT
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
    if "RANK" not in os.environ:  # DDP-1: torchrun sets it
        parser.error("start it with torchrun, as the first lines of this file show")
    if args.sync_bn and args.device == "cpu":  # DDP-2: torch has none for it
        parser.error("--sync-bn needs GPUs")
    # CKPT-1: what cannot work fails here
    for name in ("epochs", "batch_size", "accumulate", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    files = {args.output.resolve(), args.checkpoint.resolve(), args.best.resolve()}
    if len(files) < 3 or any(file.is_dir() for file in files):
        parser.error("--output, --checkpoint and --best must be three files")
    if os.environ["RANK"] == "0":  # DDP-4: only rank 0 saves
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
    return args


def train(args):
    # 1. Setup
    torchrun = os.getppid()  # CKPT-1: see save()
    local_rank = int(os.environ["LOCAL_RANK"])  # DDP-1: its index on this machine
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
    # DDP-3: one process per machine downloads, and each rank has its own shard
    train_set, test_set = load_mnist(args.data_dir, local_rank == 0)
    length = len(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": device.type == "cuda", "num_workers": args.workers}
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    # channels_last: a third faster on the CPU; on a GPU DDP would warn (one channel)
    layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
    model = ConvNet().to(device, memory_format=layout)
    if args.sync_bn:  # DDP-2: convert BatchNorm, then wrap the model
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    if args.compile:
        ddp_model = torch.compile(ddp_model)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    # DDP-7: images per step
    global_batch = args.batch_size * args.accumulate * world_size
    # the root keeps the noise of a step: arXiv:1705.08741
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    # CKPT-4: read before the load, which brings the rates of the saved step
    peaks = [group["lr"] for group in optimizer.param_groups]

    # CKPT-1: what is saved; add an EMA or a GradScaler, and counters of your own
    stateful = {"model": model, "optimizer": optimizer}
    progress = {"epoch": 1, "done": 0, "loss_sum": 0.0, "images": 0, "best": -math.inf}
    # CKPT-3: what must be as it was; optimizers load by the order of the names
    names = list(model.state_dict())
    fingerprint = {"length": length, "seed": args.seed, "lr": args.lr, "names": names}
    check_equal(  # CKPT-5: on all ranks
        epochs=args.epochs,
        batch_size=args.batch_size,
        accumulate=args.accumulate,
        save_every=args.save_every,
        test_length=len(test_set),
        **fingerprint,
    )
    # CKPT-3: all ranks read it
    resumed = wait_for_file(args.checkpoint)
    if resumed:
        load_checkpoint(args.checkpoint, stateful, progress, fingerprint)
        # CKPT-5: a node's file may be older
        check_equal(epoch=progress["epoch"], done=progress["done"])
        if progress["done"] > 0 and progress["epoch"] > args.epochs:
            raise ValueError(f"it is in epoch {progress['epoch']}: give more --epochs")
    elif rank == 0:  # DDP-4: log on rank 0 only
        print(f"no {args.checkpoint}: starting on {world_size} ranks")
    # CKPT-5: DDP and the load made them equal; frozen weights could hide a difference
    trained = [each for each in model.parameters() if each.requires_grad]
    weights = nn.utils.get_total_norm(trained)
    check_equal(weight_norm=weights.item(), tolerance=1e-6)
    stops = StopSignals()  # STOP-1: from here on a signal is only noted

    def save():  # CKPT-1: unless torchrun was killed
        """Write the checkpoint on rank 0: DDP keeps the weights of all ranks equal."""
        nonlocal resumed
        if os.getppid() != torchrun:  # it was killed, and a new run may use the file
            raise RuntimeError("torchrun was killed, and its processes end, too")
        if rank == 0:
            # a disk that was mounted late, or the same run started twice
            if not resumed and args.checkpoint.exists():
                raise FileExistsError(f"{args.checkpoint} was not there at the start")
            resumed = True
            state = {name: each.state_dict() for name, each in stateful.items()}
            state |= {"progress": progress, "fingerprint": fingerprint}
            save_file(state, args.checkpoint)

    # 5. Train and evaluate
    for epoch in range(progress["epoch"], args.epochs + 1):
        # CKPT-4: the rest of the epoch; without the generator the loader would draw
        # from torch's numbers, and the first step have other dropout after a resume
        shard = rest_of_epoch(length, hash((args.seed, epoch)), progress["done"])
        seed = hash((args.seed, epoch, progress["done"], rank))
        generator = torch.Generator().manual_seed(seed)
        train_loader = DataLoader(
            train_set, args.batch_size, sampler=shard, generator=generator, **options
        )
        check_equal(batches=len(train_loader))  # a sampler of yours may differ
        model.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        images_before = progress["images"]  # CKPT-4: of earlier starts
        total = torch.zeros(2, dtype=torch.float64, device=device)  # loss sum, images
        # DDP-4: only rank 0 has a bar; None: on a terminal only
        no_bar = True if rank > 0 else None
        batches = stops.iterate(train_loader)  # STOP-1: its workers get no signal
        steps = len(train_loader)
        batches = iter(tqdm(batches, title, steps, leave=False, disable=no_bar))
        while True:
            # CKPT-4: each step has random numbers of its own, also after a resume
            torch.manual_seed(hash((args.seed, epoch, progress["done"], rank)))
            # DDP-7: the micro-batches of one step
            micro_batches = list(itertools.islice(batches, args.accumulate))
            if not micro_batches:
                break
            images_in_step = sum(len(batch[1]) for batch in micro_batches)
            for number, batch in enumerate(micro_batches, start=1):
                images, labels = [part.to(device, non_blocking=True) for part in batch]
                # DDP-7: only the last backward averages the gradients of all ranks
                last = number == len(micro_batches)
                with contextlib.nullcontext() if last else ddp_model.no_sync():
                    with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                        loss = criterion(ddp_model(images), labels)
                    (loss * len(labels) / images_in_step).backward()
                total[0] += loss.detach() * len(labels)
                total[1] += len(labels)
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            # CKPT-4: the rate follows the part of the run that is done, in mid-step
            done = min(progress["done"] + global_batch, length)
            middle = (progress["done"] + done) / 2 / length
            fraction = (epoch - 1 + middle) / args.epochs
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * warmup_then_decay(fraction)
            optimizer.step()
            optimizer.zero_grad()
            progress["done"] = done
            stop = stops.vote()  # STOP-1: all ranks stop after the same step
            if stop or done // global_batch % args.save_every == 0 or done == length:
                # CKPT-5: equal and finite, but CPUs may round differently
                check_equal(gradient_norm=norm.item(), tolerance=1e-6)
                weights = nn.utils.get_total_norm(trained)
                check_equal(weight_norm=weights.item(), tolerance=1e-3)
                dist.all_reduce(total)  # DDP-5: sum over all ranks
                # CKPT-1: of all ranks and the whole epoch
                progress["loss_sum"] += total[0].item()
                progress["images"] += int(total[1])
                total.zero_()
                save()
                loss = progress["loss_sum"] / progress["images"]
                if rank == 0:  # DDP-4: log on rank 0 only
                    tqdm.write(f"{title}  {done / length:.0%}  loss {loss:.4f}")
            if stop:  # STOP-1: after the save
                return stops.end(progress)
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device, stops)
        if accuracy is None:  # STOP-1: stopped in the evaluation; all is saved
            return stops.end(progress)
        if rank == 0:  # DDP-4: log on rank 0 only
            loss = progress["loss_sum"] / progress["images"]
            rate = (progress["images"] - images_before) / seconds
            print(
                f"{title}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
                f"{seconds:.1f} s  {rate:.0f} images/s",
                flush=True,
            )
        if accuracy > progress["best"]:  # CKPT-1: on all ranks
            progress["best"] = accuracy
            if rank == 0:
                save_file(model.state_dict(), args.best)
        progress |= {"epoch": epoch + 1, "done": 0, "loss_sum": 0.0, "images": 0}
        save()

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        save_file(model.state_dict(), args.output)
        print(f"finished after epoch {progress['epoch'] - 1}: {args.output}")


@torch.no_grad()
def evaluate(model, test_loader, device, stops):
    """Return the fraction of the test set classified correctly, or None at a stop."""
    for buffer in model.buffers():  # DDP-5: all take BatchNorm's of rank 0
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for batch in stops.iterate(test_loader):
        if stops.vote():  # STOP-1: an evaluation may be longer than Slurm waits
            return None
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(model(images).argmax(1) == labels)
    # DDP-5: join the results of all ranks
    correct = gather_in_order(torch.cat(correct), len(test_loader.dataset))
    return correct.sum().item() / len(correct)


def rest_of_epoch(length, seed, done):  # CKPT-4: in place of the sampler
    """Return this rank's share of the indices that an epoch has left.

    All ranks get equally many: the first indices of the epoch pad the last ones.
    """
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    rest = order[done:].tolist()
    rest += order[: -len(rest) % dist.get_world_size()].tolist()
    return rest[dist.get_rank() :: dist.get_world_size()]


def save_file(content, path):  # CKPT-2: a kill leaves no half file
    """Write a temporary file and rename it: path is always complete."""
    path = path.resolve()  # a symlink stays one
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    # what cannot be loaded fails here, and not at the next start
    torch.load(temporary, "cpu", mmap=True, weights_only=True)
    os.replace(temporary, path)


def load_checkpoint(path, stateful, progress, fingerprint):  # CKPT-3: and check it
    """Load a checkpoint into stateful and progress.

    Raises ValueError if it is damaged or of another run, and UnpicklingError if it has
    more than tensors and plain values.
    """
    # torch.load does not look at the checksums
    if not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip():
        raise ValueError(f"{path} is damaged")
    state = torch.load(path, "cpu", mmap=True, weights_only=True)  # one copy per node
    found = state.get("fingerprint")
    if found != fingerprint:
        raise ValueError(f"{path} has {found}, not {fingerprint}: move it away")
    progress.update(state["progress"])
    for name, each in stateful.items():
        each.load_state_dict(state[name])
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"resuming from {path} at {progress} on {ranks} ranks")


def warmup_then_decay(fraction):
    """The factor of the peak rate: it rises for 40 % of the run, then falls to 0."""
    return max(0, min(fraction / 0.4, (1 - fraction) / 0.6))


def main():
    code = train(parse_args())
    dist.destroy_process_group()  # DDP-1: only now, when train() has freed the model
    sys.exit(code)  # STOP-1: 1 after a stop


if __name__ == "__main__":
    main()
