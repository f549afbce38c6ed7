r"""Train a ConvNet on MNIST with checkpoints: whenever it is stopped, the same command resumes it.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarted processes need new addresses
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 06_checkpointing/train.py

On one or two machines with a shared disk (elastic), the same commands on each:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d \
        --rdzv-endpoint=10.0.0.1:29400 06_checkpointing/train.py --checkpoint /shared/run1.pt
"""

import argparse
import contextlib  # DDP-7
import faulthandler
import gc  # DDP-1
import itertools  # DDP-7
import math  # CKPT-4
import os
import signal
import sys
import time
import zipfile  # CKPT-3
from pathlib import Path

import torch
import torch.distributed as dist  # DDP-1
import torch.distributed.nn  # DDP-1: if DDP imports it later, the exit may abort
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP-2
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler  # DDP-3
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))  # unless common/ is next to this file
from common.data import load_mnist
from common.gather import gather_in_order  # DDP-5
from common.model import ConvNet

MAX_GRAD_NORM = 0.7  # for this model: stabilises the warm-up
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # CKPT-5: torchrun forwards them
EPOCH_START = {"images": 0, "total": [0.0, 0.0], "seconds": 0.0}  # CKPT-4: done in this epoch
MAY_CHANGE = {  # CKPT-3: from one start to the next, and what a change means
    "epochs": "the learning rate follows the new length",
    "batch_size": "each image of this epoch still comes once",
    "accumulate": "each image of this epoch still comes once",
    "lr": "from the next step on",
    "seed": "a different order for the rest of this epoch: some images come again, others never",
}

faulthandler.register(signal.SIGUSR1)  # kill -USR1 prints where this process is


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
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # DDP-2
    add("--accumulate", type=int, default=1, help="micro-batches per step")  # DDP-7
    add("--save-every", type=int, default=100, help="steps per checkpoint")  # CKPT-1
    add("--checkpoint", type=Path, default="checkpoint.pt", help="checkpoint path; one per run")
    add("--best", type=Path, default="best.pt", help="path of the weights of the best epoch")
    args = parser.parse_args()
    for path in (args.output, args.checkpoint, args.best):  # CKPT-1
        if os.environ["RANK"] == "0" and not path.parent.is_dir():  # DDP-4: only rank 0 saves
            parser.error(f"there is no folder {path.parent} for {path.name}")
    return args


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # DDP-1: torchrun sets it
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # one GPU per process, set before init_process_group
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # CKPT-5: for the stop flag
    dist.init_process_group(backend)
    stop_signals, launcher = catch_stop_signals(), os.getppid()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = RestOfEpoch(train_set, seed=args.seed)  # DDP-3, CKPT-4: one shard per rank
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": device.type == "cuda"}
    options["worker_init_fn"] = ignore_stop_signals  # CKPT-5: workers get the signals as well
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)  # DDP-3
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    if args.sync_bn:  # DDP-2
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, gradient_as_bucket_view=True)  # DDP-2: backward averages the gradients
    if args.compile:
        model = torch.compile(model)
    torch.manual_seed(args.seed + rank)  # DDP-3: different dropout per rank

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * args.accumulate * world_size  # DDP-7
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * math.ceil(len(train_set) / global_batch)  # CKPT-4
    done = {"epoch": 1, **EPOCH_START, "best": None}

    def steps_done():  # CKPT-4: as if this number of processes had taken all of them
        return total_steps * (done["epoch"] - 1 + done["images"] / len(train_set)) / args.epochs

    def where():
        return (f"{done['epoch'] - 1} of {args.epochs} epochs and "
                f"{done['images']} of {len(train_set)} images")

    scheduler = ByProgress(optimizer, lambda _: warmup_then_decay(steps_done(), total_steps))

    # CKPT-1: all that a resumed run needs. Add what has a state_dict(), such as an EMA, to objects,
    # and your own numbers, such as the patience left, to done.
    objects = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    settings = {name: getattr(args, name) for name in MAY_CHANGE} | {"images": len(train_set)}
    if load_checkpoint(args.checkpoint, settings, objects, done) and rank == 0:  # CKPT-3
        print(f"resuming from {args.checkpoint}, after {where()}", flush=True)

    def save():  # CKPT-1: on rank 0; DDP keeps the weights of the others equal
        return rank > 0 or save_checkpoint(args.checkpoint, settings, objects, done)

    # 5. Train and evaluate
    for epoch in range(done["epoch"], args.epochs + 1):  # CKPT-4
        train_sampler.set_epoch(epoch)  # DDP-3: reshuffle
        train_sampler.images_done = done["images"]  # CKPT-4: the rest of this epoch
        net.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter() - done["seconds"]  # CKPT-4
        total = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, of the images
        if rank == 0:  # CKPT-4
            total += torch.tensor(done["total"], dtype=torch.float64, device=device)
        steps = math.ceil(len(train_loader) / args.accumulate)  # DDP-7
        batches = in_steps(train_loader, args.accumulate)
        bar = tqdm(batches, title, steps, leave=False, disable=rank > 0 or None)  # DDP-4: one bar
        for step, micro_batches in enumerate(bar, start=1):
            stop = torch.tensor(len(stop_signals) + (os.getppid() != launcher))  # CKPT-5: any rank?
            stop_known = dist.all_reduce(stop, dist.ReduceOp.MAX, async_op=True)
            seen = (epoch - 1) * len(train_set) + done["images"]  # CKPT-4: for dropout
            torch.manual_seed(args.seed + 10_000 * seen + rank)
            images_in_step = sum(len(batch[1]) for batch in micro_batches)  # DDP-7: labels
            for number, (images, labels) in enumerate(micro_batches, start=1):
                images = images.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                is_last = number == len(micro_batches)  # DDP-7: average the gradients once per step
                with contextlib.nullcontext() if is_last else model.no_sync():
                    with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                        loss = criterion(model(images), labels)
                    (loss * (len(labels) / images_in_step)).backward()  # DDP-7
                total[0] += loss.detach() * len(labels)
                total[1] += len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            done["images"] += images_in_step * world_size  # CKPT-4: before the learning rate
            done["images"] = min(done["images"], len(train_set))  # without padding
            scheduler.step()
            optimizer.zero_grad()
            stop_known.wait()  # CKPT-5: all ranks stop after the same step
            if stop or step % args.save_every == 0:  # CKPT-1
                of_all_ranks = total.clone()
                dist.all_reduce(of_all_ranks)
                done |= {"total": of_all_ranks.tolist(), "seconds": time.perf_counter() - start}
                saved = save()
            if stop:  # CKPT-5
                bar.close()
                if rank == 0 and saved:
                    print(f"stopped after {where()}; rerun the same command to resume",
                          flush=True)
                return saved
        dist.all_reduce(total)  # DDP-5: sum over all ranks
        seconds = time.perf_counter() - start
        done |= {"total": total.tolist(), "seconds": seconds}  # CKPT-1: evaluation may take long
        save()
        accuracy = evaluate(net, test_loader, device)
        if rank == 0:  # DDP-4: log on rank 0 only
            loss, images = total.tolist()
            print(f"{title}  loss {loss / images:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images / seconds:.0f} images/s", flush=True)
        if done["best"] is None or accuracy > done["best"]:  # CKPT-1
            best_saved = [rank == 0 and save_file(net.state_dict(), args.best)]
            dist.broadcast_object_list(best_saved)  # all ranks keep the same best score
            if best_saved[0]:
                done["best"] = accuracy
        done |= {"epoch": epoch + 1, **EPOCH_START}  # CKPT-1: the epoch is complete
        save()

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        torch.save(net.state_dict(), args.output)
    return True  # CKPT-5


@torch.no_grad()
def evaluate(net, test_loader, device):
    """Return the fraction of the test set that the network classifies correctly."""
    for buffer in net.buffers():  # DDP-5: copy rank 0's BatchNorm statistics to all ranks
        dist.broadcast(buffer, src=0)
    net.eval()
    correct = []
    for images, labels in test_loader:
        correct.append(net(images.to(device)).argmax(1) == labels.to(device))
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))  # DDP-5: from all ranks
    return correct.sum().item() / len(correct)


def in_steps(loader, accumulate):  # DDP-7
    """Yield the micro-batches of each step as a list; the last list may be shorter."""
    iterator = iter(loader)
    while micro_batches := list(itertools.islice(iterator, accumulate)):
        yield micro_batches


class RestOfEpoch(DistributedSampler):  # CKPT-4
    """DistributedSampler without an epoch's first images_done images, on any number of ranks."""

    images_done = 0

    def __len__(self):
        return math.ceil((len(self.dataset) - self.images_done) / self.num_replicas)

    def __iter__(self):
        order = list(DistributedSampler(self.dataset, 1, 0, seed=self.seed + self.epoch))
        rest = order[self.images_done :] + order  # the first images again as padding, if needed
        return iter(rest[self.rank : len(self) * self.num_replicas : self.num_replicas])


class ByProgress(LambdaLR):  # CKPT-4
    """LambdaLR of the progress made: a resumed run has the rates of its own --lr and processes."""

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "base_lrs": self.base_lrs})
        self.step()


def save_checkpoint(path, settings, objects, done):  # CKPT-1
    """Save the run; return whether that was possible."""
    states = {name: thing.state_dict() for name, thing in objects.items()}
    return save_file({"settings": settings, "done": done, "objects": states}, path)


def save_file(content, path):  # CKPT-2
    """Write a temporary file and rename it, so that path is a complete file at any moment.

    Returns False after a warning if the disk fails. Raises pickle.UnpicklingError if the content
    could not be loaded again.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        torch.load(temporary, "cpu", mmap=True, weights_only=True)  # raises if it cannot be resumed
        os.replace(temporary, path)
        return True
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        reason = error if isinstance(error, OSError) else error.__context__ or error
        last = f"is of {time.ctime(path.stat().st_mtime)}" if path.exists() else "does not exist"
        print(f"warning: {path} was not saved ({reason}); the previous one {last}",
              file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # the disk may be read-only
            temporary.unlink()
        return False


def load_checkpoint(path, settings, objects, done):  # CKPT-3
    """Load a checkpoint, which rank 0 reads, into objects and done on all ranks, if there is one.

    Raises SystemExit on all ranks, with one line from rank 0, if it is damaged or could run code,
    or if it belongs to a different model or to different data.
    """
    rank, state, problem = dist.get_rank(), None, ""
    if rank == 0 and path.exists():
        try:
            if zipfile.ZipFile(path).testzip():  # torch.load ignores the checksums
                raise ValueError("wrong checksum")
            state = torch.load(path, map_location="cpu", weights_only=True)
            restore(state, settings, objects, done)
        except OSError:
            raise  # a problem of the disk
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())
    shared = [state, problem]
    dist.broadcast_object_list(shared)
    state, problem = shared
    if problem:
        time.sleep(0.1)  # as in main, but with any torch: the model still exists
        dist.destroy_process_group()
        line = f"error: cannot resume from {path} ({problem}): move it away to start from scratch"
        sys.exit(line if rank == 0 else 1)
    if state and rank > 0:
        restore(state, settings, objects, done)
    return state is not None


def restore(state, settings, objects, done):  # CKPT-3
    """Load what save_checkpoint saved; raises if it does not fit, and rank 0 logs what changed."""
    before = state["settings"]
    if before["images"] != settings["images"]:
        raise ValueError(f"it has {before['images']} training images, not {settings['images']}")
    done.update(state["done"])
    for name, thing in objects.items():
        thing.load_state_dict(state["objects"][name])
    for name, meaning in MAY_CHANGE.items():
        if before[name] != settings[name] and dist.get_rank() == 0:
            option = "--" + name.replace("_", "-")
            print(f"{option} {settings[name]} in place of {before[name]}: {meaning}", flush=True)


def catch_stop_signals():  # CKPT-5
    """From now on, stop signals do not end this process but are appended to the returned list."""
    received = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    return received


def ignore_stop_signals(worker_id=None):  # CKPT-5
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def main():
    saved = train(parse_args())  # CKPT-5
    ignore_stop_signals()  # CKPT-5: a second signal must not end the process now
    gc.collect()  # DDP-1: free the model before destroying the group, or the exit may abort
    time.sleep(0.1)  # DDP-1: Gloo's threads must be idle, or the exit may hang (torch < 2.8)
    dist.destroy_process_group()
    sys.exit(0 if saved else "error: stopped without saving the last steps")  # CKPT-5


if __name__ == "__main__":
    main()
