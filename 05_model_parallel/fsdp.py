r"""Train a vision transformer on MNIST with fully sharded data parallelism (FSDP2).

Each rank keeps a shard of the model. Whenever the run is stopped, the same command resumes it.

    torchrun --standalone --nproc-per-node=2 05_model_parallel/fsdp.py --epochs 3

On two machines with a shared disk, where 10.0.0.1 is an address of the first; on the second with
--node-rank=1:

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 \
        05_model_parallel/fsdp.py --checkpoint /shared/run1
"""

import argparse
import faulthandler
import gc
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn  # imported later, the exit may abort
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))  # unless common/ is next to this file
from common.data import load_mnist
from common.gather import all_gather, gather_in_order

MAX_GRAD_NORM = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # MP-5: torchrun forwards them
EPOCH_START = {"images": 0, "total": [0.0, 0.0], "seconds": 0.0}  # MP-5: done in this epoch

faulthandler.register(signal.SIGUSR1)  # kill -USR1 prints where this process is


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=3, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per process")
    add("--lr", type=float, default=0.006, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    add("--amp", action="store_true", help="mixed precision: compute in bfloat16")
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    add("--width", type=int, default=64, help="features of each patch")  # MP-1
    add("--depth", type=int, default=3, help="blocks of the transformer")  # MP-1
    add("--recompute", action="store_true", help="activation checkpointing: less memory, slower")
    world_size = int(os.environ["WORLD_SIZE"])
    add("--shards", type=int, default=world_size, help="ranks that share one copy of the model")
    add("--save-every", type=int, default=100, help="steps per checkpoint")  # MP-5
    add("--checkpoint", type=Path, default="checkpoint", help="directory shared by all nodes")
    args = parser.parse_args()
    if world_size % args.shards:  # MP-1
        parser.error(f"--shards {args.shards} does not divide the {world_size} processes")
    for path in (args.output, args.checkpoint):
        if os.environ["RANK"] == "0" and not path.parent.is_dir():  # only rank 0 saves the weights
            parser.error(f"there is no folder {path.parent} for {path.name}")
    return args


class VisionTransformer(nn.Module):
    """Images [N, 1, 28, 28] to scores [N, 10]; the 16 patches of 7 x 7 pixels are the tokens.

    Blocks, pre-norm, as in "An Image is Worth 16x16 Words" (arXiv:2010.11929), with a mean over the
    patches in place of a class token.
    """

    def __init__(self, width, depth):
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=7, stride=7)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            tokens = block(tokens)
        return self.scores(self.norm(tokens).mean(1))


class Block(nn.Module):
    """Self-attention with 4 heads, then an MLP: tokens [N, patches, width] to the same shape."""

    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens):
        heads = self.queries_keys_values(self.norm1(tokens)).unflatten(2, (3, 4, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values)
        tokens = tokens + self.out(seen.transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.norm2(tokens))


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # one GPU per process, set before init_process_group
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # MP-5: for the stop flag
    dist.init_process_group(backend)
    stop_signals, launcher = catch_stop_signals(), os.getppid()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = RestOfEpoch(train_set, seed=args.seed)  # MP-4: data parallel, as DDP
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": device.type == "cuda"}
    options["worker_init_fn"] = ignore_stop_signals  # MP-5: workers get the signals as well
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler, **options)

    # 3. Model
    if args.shards == world_size:  # MP-1: FSDP
        mesh = init_device_mesh(device.type, (world_size,))
    else:  # MP-1: HSDP: several copies of the model, each in shards
        sizes, names = (world_size // args.shards, args.shards), ("copy", "shard")
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    if args.amp:  # MP-2: shards, optimizer and the mean of the gradients stay in float32
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):  # MP-2: without memory
        model = VisionTransformer(args.width, args.depth)
    parameters = sum(parameter.numel() for parameter in model.parameters())

    def shard(module):  # MP-2: all ranks draw the same weights, one block at a time
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.to_empty(device="cpu", recurse=False)
            for parameter in module.parameters(recurse=False):
                parameter.data.fill_(math.nan)  # shows what reset_parameters() does not fill
            module.reset_parameters()  # what your constructor fills is lost: fill it here
        if args.recompute and isinstance(module, Block):  # MP-2: backward computes a block again
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        if isinstance(module, (Block, VisionTransformer)):  # MP-1: all-gathered as a whole
            fully_shard(module, mesh=mesh, mp_policy=policy)

    torch.manual_seed(args.seed)  # MP-2: again, in case that ranks have drawn different numbers
    model.apply(shard)  # children first
    if sum(parameter.numel() for parameter in model.parameters()) != parameters:
        raise ValueError("a weight that two modules share became two: tie it again in shard()")
    unset = [name for name, part in model.named_parameters() if part.to_local().isnan().any()]
    if unset:
        raise ValueError(f"reset_parameters() does not fill {unset}")
    bytes_here = sum(parameter.to_local().nbytes for parameter in model.parameters())
    bytes_per_rank = all_gather(torch.tensor(bytes_here, device=device)).tolist()
    if rank == 0:
        print(f"{parameters} parameters, bytes per rank: {bytes_per_rank}", flush=True)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * args.accumulate * world_size
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    total_steps = args.epochs * math.ceil(len(train_set) / global_batch)  # MP-5
    done = {"epoch": 1, **EPOCH_START}

    def steps_done():  # MP-5: as if this number of processes had taken all of them
        return total_steps * (done["epoch"] - 1 + done["images"] / len(train_set)) / args.epochs

    def where():
        return (f"{done['epoch'] - 1} of {args.epochs} epochs and "
                f"{done['images']} of {len(train_set)} images")

    scheduler = ByProgress(optimizer, lambda _: warmup_then_decay(steps_done(), total_steps))

    # MP-5: all that a resumed run needs besides the model and the optimizer. Add what has a
    # state_dict() to objects, and your own numbers to done: equal ones on all ranks.
    objects = {"scheduler": scheduler}
    settings = {"images": len(train_set), "parameters": parameters, "seed": args.seed}
    loaded = load_sharded(args.checkpoint, model, optimizer, objects, settings, done)
    if loaded and rank == 0:
        print(f"resuming from {loaded}, after {where()}", flush=True)

    def save():  # MP-5: on all ranks
        return save_sharded(args.checkpoint, model, optimizer, objects, settings, done)

    # 5. Train and evaluate
    for epoch in range(done["epoch"], args.epochs + 1):
        train_sampler.set_epoch(epoch)  # reshuffle
        train_sampler.images_done = done["images"]  # MP-5: the rest of this epoch
        model.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter() - done["seconds"]
        total = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, of the images
        if rank == 0:
            total += torch.tensor(done["total"], dtype=torch.float64, device=device)
        steps = math.ceil(len(train_loader) / args.accumulate)
        batches = in_steps(train_loader, args.accumulate)
        bar = tqdm(batches, title, steps, leave=False, disable=rank > 0 or None)  # one bar
        for step, micro_batches in enumerate(bar, start=1):
            stop = torch.tensor(len(stop_signals) + (os.getppid() != launcher))  # MP-5: any rank?
            stop_known = dist.all_reduce(stop, dist.ReduceOp.MAX, async_op=True)
            seen = (epoch - 1) * len(train_set) + done["images"]  # for dropout
            torch.manual_seed(args.seed + 10_000 * seen + rank)
            images_in_step = sum(len(batch[1]) for batch in micro_batches)  # labels
            for number, (images, labels) in enumerate(micro_batches, start=1):
                images = images.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                model.set_requires_gradient_sync(number == len(micro_batches))  # once per step
                loss = criterion(model(images).float(), labels)
                (loss * (len(labels) / images_in_step)).backward()  # reduce-scatters the gradients
                total[0] += loss.detach() * len(labels)
                total[1] += len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            done["images"] += images_in_step * world_size  # before the learning rate
            done["images"] = min(done["images"], len(train_set))  # without padding
            scheduler.step()
            optimizer.zero_grad()
            stop_known.wait()  # MP-5: all ranks stop after the same step
            if stop or step % args.save_every == 0:
                of_all_ranks = total.clone()
                dist.all_reduce(of_all_ranks)
                done |= {"total": of_all_ranks.tolist(), "seconds": time.perf_counter() - start}
                saved = save()
            if stop:
                bar.close()
                if rank == 0 and saved:
                    print(f"stopped after {where()}; rerun the same command to resume",
                          flush=True)
                return saved
        dist.all_reduce(total)  # sum over all ranks
        seconds = time.perf_counter() - start
        done |= {"total": total.tolist(), "seconds": seconds}  # MP-5: evaluation may take long
        save()
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:  # log on rank 0 only
            loss, images = total.tolist()
            print(f"{title}  loss {loss / images:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images / seconds:.0f} images/s", flush=True)
        done |= {"epoch": epoch + 1, **EPOCH_START}  # MP-5: the epoch is complete
        save()

    # 6. Save
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # MP-5: complete, on rank 0
    if rank == 0:
        torch.save(weights, args.output)
    return True


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the network classifies correctly."""
    for buffer in model.buffers():  # copy rank 0's statistics to all ranks, if there are any
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for images, labels in test_loader:
        correct.append(model(images.to(device)).argmax(1) == labels.to(device))
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))  # from all ranks
    return correct.sum().item() / len(correct)


def in_steps(loader, accumulate):
    """Yield the micro-batches of each step as a list; the last list may be shorter."""
    iterator = iter(loader)
    while micro_batches := list(itertools.islice(iterator, accumulate)):
        yield micro_batches


class RestOfEpoch(DistributedSampler):  # MP-5
    """DistributedSampler without an epoch's first images_done images, on any number of ranks."""

    images_done = 0

    def __len__(self):
        return math.ceil((len(self.dataset) - self.images_done) / self.num_replicas)

    def __iter__(self):
        order = list(DistributedSampler(self.dataset, 1, 0, seed=self.seed + self.epoch))
        rest = order[self.images_done :] + order  # the first images again as padding, if needed
        return iter(rest[self.rank : len(self) * self.num_replicas : self.num_replicas])


class ByProgress(LambdaLR):  # MP-5
    """LambdaLR of the progress made: a resumed run has the rates of its own --lr and processes."""

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "base_lrs": self.base_lrs})
        self.step()


def complete(folder):  # MP-5
    """The complete checkpoints in folder, newest last: .metadata is written after the shards."""
    return sorted(path.parent for path in folder.glob("epoch-*/.metadata"))


def state_of(model, optimizer, objects, settings, done):  # MP-5
    """All that is saved: DCP writes each rank's shards of it, and loads into such a dictionary."""
    weights, of_optimizer = get_state_dict(model, optimizer)
    others = {name: thing.state_dict() for name, thing in objects.items()}
    return {"model": weights, "optimizer": of_optimizer, "objects": others,
            "settings": dict(settings), "done": json.dumps(done)}


def save_sharded(folder, model, optimizer, objects, settings, done):  # MP-5
    """Save the run from all ranks, and keep the newest two; return whether that was possible.

    Raises ValueError for what could not be resumed: a parameter that has had no gradient, or shards
    on disks of different nodes.
    """
    path, rank = folder / f"epoch-{done['epoch']:04}-image-{done['images']:012}", dist.get_rank()
    is_saved = [path in complete(folder)]
    dist.broadcast_object_list(is_saved)  # as rank 0 sees the disk
    if is_saved[0]:
        return True
    for buffer in model.buffers():  # one rank's are saved
        dist.broadcast(buffer, src=0)
    state = state_of(model, optimizer, objects, settings, done)
    stepped = state["optimizer"]["state"]  # empty if the optimizer keeps no state
    for name, parameter in model.named_parameters():
        if stepped and parameter.requires_grad and name not in stepped:
            raise ValueError(f"{name} has had no gradient: use it, or freeze it, or no run resumes")
    try:
        dcp.save(state, checkpoint_id=path)
    except dcp.CheckpointException as error:  # on all ranks
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            print(f"warning: {path} was not saved ({reason_of(error)})",
                  file=sys.stderr, flush=True)
        return False
    if rank == 0:
        shards = dcp.FileSystemReader(path).read_metadata().storage_data.values()
        if not all((path / shard.relative_path).exists() for shard in shards):
            raise ValueError(f"{path} lacks shards: --checkpoint needs a disk that all nodes share")
        for older in complete(folder)[:-2]:
            shutil.rmtree(older, ignore_errors=True)
    return True


def load_sharded(folder, model, optimizer, objects, settings, done):  # MP-5
    """Load the newest checkpoint that can be loaded, on any number of ranks; return its path.

    Newer ones, which cannot be loaded, are renamed. Returns None if there is none. Raises
    SystemExit on all ranks, with one line from rank 0, if none can be loaded, or if it is of
    a different number of images or parameters.
    """
    rank, shared, damaged, problem = dist.get_rank(), [complete(folder)], [], None
    dist.broadcast_object_list(shared)  # as rank 0 sees the disk
    for path in reversed(shared[0]):
        state = state_of(model, optimizer, objects, settings, done)
        try:
            dcp.load(state, checkpoint_id=path)
        except dcp.CheckpointException as error:  # on all ranks
            damaged, problem = [*damaged, path], f"{path}: {reason_of(error)}"
            if rank == 0:
                print(f"warning: cannot load {problem}", file=sys.stderr, flush=True)
            continue
        before, problem = state["settings"], None
        for name in ("images", "parameters"):
            if before[name] != settings[name]:
                problem = f"{path} has {before[name]} {name}, not {settings[name]}"
        if problem:
            break
        set_state_dict(model, optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        done.update(json.loads(state["done"]))
        for name, thing in objects.items():
            thing.load_state_dict(state["objects"][name])
        for newer in damaged if rank == 0 else []:
            newer.rename(newer.with_name(f"damaged-{newer.name}-{time.time():.0f}"))
        if before["seed"] != settings["seed"] and rank == 0:
            print("a different --seed: some images of this epoch come again, others do not come",
                  flush=True)
        return path
    if problem:
        time.sleep(0.1)  # Gloo's threads must be idle, or the exit may hang (torch < 2.8)
        dist.destroy_process_group()
        line = f"error: cannot resume ({problem}): move {folder} away to start from scratch"
        sys.exit(line if rank == 0 else 1)
    return None


def reason_of(error):  # MP-5
    """The first rank's reason, in one line, without its traceback."""
    [reason, *_] = error.failures.values()
    return " ".join(f"{type(reason[0]).__name__}: {reason[0]}".split())


def catch_stop_signals():  # MP-5
    """From now on, stop signals do not end this process but are appended to the returned list."""
    received = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    return received


def ignore_stop_signals(worker_id=None):  # MP-5
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def main():
    saved = train(parse_args())
    ignore_stop_signals()  # MP-5: a second signal must not end the process now
    gc.collect()  # free the model before destroying the group, or the exit may abort
    time.sleep(0.1)  # Gloo's threads must be idle, or the exit may hang (torch < 2.8)
    dist.destroy_process_group()
    sys.exit(0 if saved else "error: stopped without saving the last steps")


if __name__ == "__main__":
    main()
