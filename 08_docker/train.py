r"""Train a ConvNet on MNIST with checkpoints: whenever it is stopped, the same command resumes it.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarted processes need new addresses
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 06_checkpointing/train.py
    bash 06_checkpointing/run.sh --checkpoint run1.pt --save-every 50

On one or two machines with a shared disk (elastic), the same commands on each:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d \
        --rdzv-endpoint=10.0.0.1:29400 06_checkpointing/train.py --checkpoint /shared/run1.pt
"""

import argparse
import contextlib  # DDP-7
import gc  # DDP-1
import math
import os
import pickle  # CKPT-3
import signal  # CKPT-5
import sys
import time
import zipfile  # CKPT-3
from datetime import timedelta  # DDP-1
from pathlib import Path

import torch
import torch.distributed as dist  # DDP-1
import torch.distributed.nn  # DDP-1: here, as a later import by DDP keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP-2
from torch.utils.data import DataLoader, DistributedSampler  # DDP-3
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # a common/ next to this file wins
from common.data import already_batched, load_mnist
from common.gather import gather_in_order  # DDP-5
from common.model import ConvNet

EVAL_BATCH_SIZE = 250  # images; the accuracy does not depend on it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # CKPT-5: torchrun forwards both
EPOCH_START = {"images": 0, "loss": 0.0, "seconds": 0.0}  # CKPT-4: progress within an epoch


def parse_args():
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=positive_int, default=1, help="passes over the training set")
    add("--batch-size", type=positive_int, default=64, help="images per process")
    add("--lr", type=positive_float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=writable_file, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if available")
    add("--amp", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--compile", action="store_true", help="compile the model: slower start, faster steps")
    add("--timeout", type=positive_int, default=300, help="collective timeout in seconds")  # DDP-1
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # DDP-2
    add("--accumulate", type=positive_int, default=1, help="micro-batches per step")  # DDP-7
    add("--save-every", type=positive_int, default=100, help="steps per checkpoint")  # CKPT-1
    add("--checkpoint", type=writable_file, default="checkpoint.pt", help="checkpoint path")
    add("--check", action="store_true", help="check the options and the checkpoint, and exit")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):  # DDP-0
        parser.error(f"--device cuda needs a GPU per process, and PyTorch finds {gpus}")
    if args.device == "cpu" and args.sync_bn:  # DDP-2
        parser.error("--sync-bn needs GPUs")
    if args.checkpoint == args.output:  # CKPT-1
        parser.error("--checkpoint and --output must be different files")
    if args.check:  # CKPT-3: train() runs in one process on the CPU and returns after loading
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        args.device = "cpu"
    if "LOCAL_RANK" not in os.environ:  # DDP-0: torchrun sets it
        parser.error(f"run: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    return args


def train(args):
    # 1. Setup
    use_cuda = args.device == "cuda"
    local_rank = int(os.environ["LOCAL_RANK"])  # DDP-1
    if use_cuda:
        torch.cuda.set_device(local_rank)  # one device per process, set before init_process_group
    timeout = timedelta(seconds=args.timeout)
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"  # CKPT-5: Gloo for the stop flag
    dist.init_process_group(backend, timeout=timeout)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = RestOfEpoch(train_set, seed=args.seed)  # DDP-3, CKPT-4
    test_sampler = DistributedSampler(test_set, shuffle=False)
    images_per_epoch = train_sampler.total_size
    loader_options = {"collate_fn": already_batched, "pin_memory": use_cuda}
    images_per_step = args.batch_size * args.accumulate  # DDP-7: per process
    loader_options["worker_init_fn"] = ignore_stop_signals  # CKPT-5: workers get them as well
    train_loader = DataLoader(train_set, images_per_step, sampler=train_sampler, **loader_options)
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE, sampler=test_sampler, **loader_options)

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    state = load_checkpoint(args, net, len(train_set))  # CKPT-3
    if args.check:
        return
    if args.sync_bn:  # DDP-2
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, device_ids=[local_rank] if use_cuda else None, gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # evaluate() broadcasts them
    torch.manual_seed(args.seed + rank)  # different dropout per rank
    if args.compile:
        model = torch.compile(model)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = images_per_step * world_size  # DDP-3
    peak_lr = args.lr * math.sqrt(global_batch / 256)
    optimizer = torch.optim.SGD(model.parameters(), peak_lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)
    first_epoch = 1  # CKPT-4
    done = EPOCH_START
    if state:
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"]
        done = state["done"]
        if rank == 0:
            print(f"resuming from {args.checkpoint}, after {first_epoch - 1} of {args.epochs} "
                  f"epochs and {done['images']} of {len(train_set)} images", flush=True)

    def save(epoch, done):  # CKPT-1: on rank 0; DDP keeps the weights of the others equal
        if rank == 0:
            state = {"run": describe_run(args, len(train_set)), "epoch": epoch, "done": done}
            state["model"] = net.state_dict()
            state["optimizer"] = optimizer.state_dict()
            save_checkpoint(state, args.checkpoint)

    # 5. Train and evaluate
    steps_done = (first_epoch - 1) * len(train_loader)  # CKPT-4
    steps_done += math.ceil(done["images"] / global_batch)
    stop_signals = catch_stop_signals()  # CKPT-5
    for epoch in range(first_epoch, args.epochs + 1):  # CKPT-4
        train_sampler.set_epoch(epoch)  # DDP-3: reshuffle
        title = f"epoch {epoch}/{args.epochs}"
        images_done = done["images"]  # CKPT-4: the rest of this epoch
        train_sampler.images_done = images_done
        start = time.perf_counter() - done["seconds"]
        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        if rank == 0:  # CKPT-4
            total_loss += done["loss"]
        disable = None if rank == 0 else True  # DDP-4: one progress bar
        progress = tqdm(train_loader, title, leave=False, disable=disable)
        for step, (images, labels) in enumerate(progress):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            stop = torch.tensor(len(stop_signals))  # CKPT-5: has any rank received a signal?
            stop_known = dist.all_reduce(stop, dist.ReduceOp.MAX, async_op=True)
            torch.manual_seed(args.seed + 10_000 * steps_done + rank)  # CKPT-4: dropout
            images_in_step = len(labels)  # DDP-7: accumulate gradients
            parts = zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True)
            for part, (images, labels) in enumerate(parts, start=1):
                is_last_micro_batch = part * args.batch_size >= images_in_step
                with contextlib.nullcontext() if is_last_micro_batch else model.no_sync():
                    with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                        loss = criterion(model(images), labels)
                    (loss * (len(labels) / images_in_step)).backward()  # DDP-7
                total_loss += loss.detach() * len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)  # stabilises the warm-up
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * warmup_then_decay(steps_done, total_steps)
            optimizer.step()
            optimizer.zero_grad()
            steps_done += 1
            if step % 50 == 0:
                progress.set_postfix(loss=f"{loss.item():.4f}")
            images_done = min(images_done + global_batch, len(train_set))  # CKPT-4
            stop_known.wait()  # CKPT-5: all ranks stop after the same step
            if stop or steps_done % args.save_every == 0:  # CKPT-1
                loss_done = total_loss.clone()
                dist.all_reduce(loss_done)
                seconds = time.perf_counter() - start
                save(epoch, {"images": images_done, "loss": loss_done.item(), "seconds": seconds})
            if stop:  # CKPT-5
                progress.close()
                if rank == 0:
                    print(f"stopped after {epoch - 1} of {args.epochs} epochs and {images_done} of "
                          f"{len(train_set)} images; rerun the same command to resume", flush=True)
                return
        dist.all_reduce(total_loss)  # DDP-5: sum over all ranks
        mean_loss = total_loss.item() / images_per_epoch
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        speed = images_per_epoch / seconds
        if rank == 0:  # DDP-4: log on rank 0 only
            print(f"{title}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{speed:.0f} images/s", flush=True)
        done = EPOCH_START  # CKPT-1: the epoch is complete
        save(epoch + 1, done)

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
        torch.save(weights, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # DDP-5: copy rank 0's to all ranks
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for images, labels in test_loader:
        predictions = model(images.to(device)).argmax(1)
        correct.append(predictions == labels.to(device))
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))  # DDP-5: from all ranks
    model.train()
    return correct.sum().item() / len(correct)


class RestOfEpoch(DistributedSampler):  # CKPT-4
    """DistributedSampler without an epoch's first images_done images, on any number of ranks."""

    images_done = 0

    def __len__(self):
        return math.ceil((len(self.dataset) - self.images_done) / self.num_replicas)

    def __iter__(self):
        order = list(DistributedSampler(self.dataset, 1, 0, seed=self.seed + self.epoch))
        rest = order[self.images_done :] + order  # the first images again as padding, if needed
        return iter(rest[self.rank : len(self) * self.num_replicas : self.num_replicas])


def describe_run(args, images):  # CKPT-3: what must not change when a run is resumed
    return {"--epochs": args.epochs, "--batch-size": args.batch_size, "--lr": args.lr,
            "--seed": args.seed, "the number of training images": images}


def save_checkpoint(state, path):  # CKPT-2
    """Write a temporary file and rename it, so that path is a complete checkpoint at any moment."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        reason = error if isinstance(error, OSError) else error.__context__ or error
        print(f"warning: {path} was not saved ({reason}); the previous checkpoint stays",
              file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # the disk may be read-only
            temporary.unlink()


def load_checkpoint(args, net, images):  # CKPT-3
    """Load --checkpoint into net on rank 0; return the rest of it on all ranks, or None.

    Raises SystemExit on all ranks, with one line from rank 0, if it is damaged or unsafe, or if it
    belongs to another model or to a run with other options.
    """
    rank = dist.get_rank()
    state = None
    problem = ""
    if rank == 0 and args.checkpoint.exists():
        try:
            if zipfile.ZipFile(args.checkpoint).testzip():  # torch.load ignores the checksums
                raise ValueError("wrong checksum")
            state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or "run" not in state:
                raise ValueError("not a checkpoint of this script")
            for name, value in describe_run(args, images).items():
                if state["run"].get(name) != value:
                    raise ValueError(f"made with {name} {state['run'].get(name)}, not {value}")
            net.load_state_dict(state.pop("model"))
        except pickle.UnpicklingError:
            problem = "torch.load(weights_only=True) rejects it, as it could run code"
        except Exception as error:
            problem = " ".join(str(error).split())
    shared = [state, problem]
    dist.broadcast_object_list(shared)
    state, problem = shared
    if problem:
        dist.destroy_process_group()
        advice = "delete it to start from scratch"
        sys.exit(f"error: --checkpoint {args.checkpoint}: {problem}; {advice}" if rank == 0 else 1)
    return state


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
    ignore_stop_signals()  # CKPT-5: a second signal must not end the process now
    gc.collect()  # DDP-1: free the model before destroying the group, or the exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
