"""Train a vision transformer on MNIST, sharded by FSDP2: stopped, the same command resumes it.

    torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 05_model_parallel/fsdp.py
"""

import argparse
import faulthandler
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

LAUNCHER = os.getppid()  # MP-5: early, as torchrun may be killed while torch is imported

import torch
import torch._dynamo  # imported later, the model outlives the group, and exits may abort
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # if common/ is not next to this
from common.data import load_mnist
from common.gather import all_gather, gather_in_order

MAX_GRAD_NORM = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # MP-5: torchrun forwards them
received = []  # those that this process has got

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
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    add("--shards", type=int, default=world_size, help="ranks that share one copy of the model")
    add("--save-every", type=int, default=100, help="steps per checkpoint")  # MP-5
    add("--checkpoint", type=Path, default="checkpoint", help="directory shared by all nodes")
    add("--best", type=Path, default="best.pt", help="path of the weights of the best epoch")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of this file show")
    if world_size % args.shards:  # MP-1
        parser.error(f"--shards {args.shards} does not divide the {world_size} processes")
    saves = os.environ["RANK"] == "0"  # only rank 0 saves the weights
    if args.best.resolve() == args.output.resolve():  # MP-5
        parser.error("--output and --best must be different files")
    for folder in (args.output.parent, args.checkpoint.parent, args.best.parent):
        if saves and not (folder.is_dir() and os.access(folder, os.W_OK)):
            parser.error(f"{folder} is not a writable folder")
    return args


class VisionTransformer(nn.Module):
    """Images [N, 1, 28, 28] to scores [N, 10], by 16 patches of 7 x 7 pixels: arXiv:2010.11929."""

    def __init__(self, width, depth, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.patches = nn.Conv2d(1, width, kernel_size=7, stride=7)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            tokens = (checkpoint(block, tokens, use_reentrant=False) if self.recompute  # MP-2
                      else block(tokens))
        return self.scores(self.norm(tokens).mean(1))


class Block(nn.Module):
    """Self-attention with 4 heads, then an MLP: tokens [N, patches, width] to the same shape."""

    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, tokens):
        heads = self.queries_keys_values(self.norm1(tokens)).unflatten(2, (3, 4, -1))
        seen = nn.functional.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4))
        tokens = tokens + self.out(seen.transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.norm2(tokens))


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it
    device = torch.device(f"cuda:{local_rank}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # one GPU per process, set before init_process_group
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")  # MP-5
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = []  # MP-5: the indices of this rank's shard, set at the start of each epoch
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"pin_memory": device.type == "cuda", "worker_init_fn": ignore_stop_signals}  # MP-5
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler, **options)

    # 3. Model
    sizes = (world_size // args.shards, args.shards)  # MP-1: copies of the model, shards of each
    names = ("copy", "shard") if sizes[0] > 1 else ("shard",)  # HSDP, or FSDP
    mesh = init_device_mesh(device.type, sizes[-len(names) :], mesh_dim_names=names)
    dtypes = (torch.bfloat16, torch.float32) if args.amp else ()  # MP-2: to compute, to average
    with torch.device("meta"):  # MP-2: without memory
        model = VisionTransformer(args.width, args.depth, args.recompute)
    parameters = sum(parameter.numel() for parameter in model.parameters())

    def shard(module):  # MP-2: all ranks draw the same weights, one block at a time
        module.to_empty(device="cpu", recurse=False)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in own:
            tensor.untyped_storage().fill_(255)  # NaN, or -1: what stays so, nothing fills
        if own:
            module.reset_parameters()  # what your constructor fills is lost: fill it here
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            in_bytes = tensor.data.reshape(-1).view(torch.uint8)
            if tensor.sum().isnan() or len(in_bytes) and in_bytes.min() == 255:
                raise ValueError(f"reset_parameters() of {type(module)} leaves tensors unset")
        if isinstance(module, (Block, VisionTransformer)):  # MP-1: all-gathered as a whole
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(*dtypes))

    torch.manual_seed(args.seed)  # MP-2: the same on all ranks
    model.apply(shard)  # children first
    if sum(parameter.numel() for parameter in model.parameters()) != parameters:
        raise ValueError("a weight that two modules share became two: tie it again in shard()")
    local = [parameter.to_local() for parameter in model.parameters()]
    here = [sum(part.nbytes for part in local), sum(part.sum().item() for part in local)]
    ranks = all_gather(torch.tensor(here, dtype=torch.float64, device=device))
    if (ranks.view(*sizes, 2) != ranks[: args.shards]).any():  # MP-1: each copy against the first
        raise ValueError("the copies of the model differ: draw weights with torch's numbers only")
    if rank == 0:
        print(f"{parameters} parameters, bytes per rank: {ranks[:, 0].long().tolist()}", flush=True)
    torch.manual_seed(args.seed + rank)  # MP-4: different augmentation per rank

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * args.accumulate * world_size
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    total_steps = args.epochs * math.ceil(len(train_set) / global_batch)  # MP-5
    done = {"epoch": 1, "images": 0, "best": None}  # MP-5: add your own numbers, equal on all ranks

    def steps_done():  # MP-5: as if this number of processes had taken all of them
        return total_steps * (done["epoch"] - 1 + done["images"] / len(train_set)) / args.epochs

    scheduler = ByProgress(optimizer, lambda _: warmup_then_decay(steps_done(), total_steps))
    objects = {"scheduler": scheduler}  # MP-5: add what has all keys of its state_dict() by now
    run = {"images": len(train_set), "seed": args.seed, "lr": args.lr, "parameters": parameters}
    state = State(args.checkpoint, model, optimizer, objects, done, run)
    state.load()
    for number in STOP_SIGNALS:  # MP-5: from here on they no longer end the process
        signal.signal(number, lambda number, _: received.append(number))

    def stopped():
        if rank == 0:
            print(f"stopped at {done}; rerun the same command to resume", flush=True)

    # 5. Train and evaluate
    for epoch in range(done["epoch"], args.epochs + 1):
        train_sampler[:] = rest_of_epoch(len(train_set), args.seed + epoch, done["images"])  # MP-4
        model.train()
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, of the images
        steps = math.ceil(len(train_loader) / args.accumulate)
        batches = in_steps(train_loader, args.accumulate)
        bar = tqdm(batches, title, steps, leave=False, disable=rank > 0 or None)  # one bar
        for step, micro_batches in enumerate(bar, start=1):
            images_in_step = sum(len(batch[1]) for batch in micro_batches)  # or batch["labels"]
            torch.manual_seed(hash((args.seed, epoch, done["images"], rank)))  # MP-5: dropout
            for number, batch in enumerate(micro_batches, start=1):
                images, labels = [part.to(device, non_blocking=True) for part in batch]
                model.set_requires_gradient_sync(number == len(micro_batches))  # once per step
                loss = criterion(model(images).float(), labels)
                (loss * (len(labels) / images_in_step)).backward()  # reduce-scatters the gradients
                total[0] += loss.detach() * len(labels)
                total[1] += len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            done["images"] += len(micro_batches) * args.batch_size * world_size  # MP-5
            done["images"] = min(done["images"], len(train_set))  # the last batch may be smaller
            scheduler.step()
            optimizer.zero_grad()
            stop = stop_asked()  # MP-5: all ranks stop after the same step
            if stop or step % args.save_every == 0:
                state.save()
            if stop:
                bar.close()
                return stopped()
        dist.all_reduce(total)  # sum over all ranks
        loss = (total[0] / total[1]).item()  # waits for the GPU
        seconds = time.perf_counter() - start
        state.save()  # MP-5: evaluation may take long
        score = evaluate(model, test_loader, device)
        if score is None:
            return stopped()
        if rank == 0:  # log on rank 0 only
            print(f"{title}  loss {loss:.4f}  accuracy {score:.4f}  {seconds:.1f} s  "
                  f"{total[1] / seconds:.0f} images/s", flush=True)
        if done["best"] is None or score > done["best"]:  # MP-5
            done["best"] = score
            save_whole(model, args.best)  # all ranks, as each has a shard
        done |= {"epoch": epoch + 1, "images": 0}
        state.save()

    # 6. Save
    save_whole(model, args.output)


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set classified correctly, or None if stopped."""
    for buffer in model.buffers():  # copy rank 0's statistics to all ranks, if there are any
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for images, labels in test_loader:
        if stop_asked():  # MP-5: all ranks have the same number of batches
            return None
        correct.append(model(images.to(device)).argmax(1) == labels.to(device))
    model.reshard()  # MP-1: after a forward alone the root's own layers stay whole
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))  # from all ranks
    return correct.sum().item() / len(correct)


def in_steps(loader, accumulate):
    """Yield the micro-batches of each step as a list; the last list may be shorter."""
    iterator = iter(loader)
    while micro_batches := list(itertools.islice(iterator, accumulate)):
        yield micro_batches


def rest_of_epoch(length, seed, images_done):  # MP-5
    """This rank's part of the indices that an epoch has left; all parts are equally long."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    rest, world_size = order[images_done:], dist.get_world_size()
    rest += order[: -len(rest) % world_size]  # the epoch's first images again, as padding
    return rest[dist.get_rank() :: world_size]


class ByProgress(LambdaLR):  # MP-5
    """LambdaLR whose rates follow the progress, also on another number of processes."""
    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "base_lrs": self.base_lrs})
        self.step()


def save_whole(model, path):  # MP-5
    """Gather the weights in the memory of rank 0, which writes them; all ranks must call it."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(weights, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)  # a complete file at any moment


class State:  # MP-5
    """What a resumed run needs. DCP writes each rank's shards, and loads them on any number."""
    def __init__(self, folder, model, optimizer, objects, done, run):
        self.folder, self.model, self.optimizer, self.objects = folder, model, optimizer, objects
        self.done, self.run, self.newest = done, run, None

    def state_dict(self):
        weights, of_optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        stepped = of_optimizer["state"]  # empty if the optimizer keeps no state
        for name, parameter in self.model.named_parameters():
            if stepped and parameter.requires_grad and name not in stepped:
                raise ValueError(f"{name} has had no gradient: use or freeze it, or no run resumes")
        objects = {name: each.state_dict() for name, each in self.objects.items()}
        return {"model": weights, "optimizer": of_optimizer, "objects": objects,
                "done": json.dumps(self.done), "run": json.dumps(self.run)}

    def load_state_dict(self, state_dict):
        if state_dict["run"] != json.dumps(self.run):
            raise ValueError(f"{self.folder} is of {state_dict['run']}, not {json.dumps(self.run)}")
        dcp_state.set_state_dict(self.model, self.optimizer, model_state_dict=state_dict["model"],
                                 optim_state_dict=state_dict["optimizer"])
        self.done.update(json.loads(state_dict["done"]))
        for name, each in self.objects.items():
            each.load_state_dict(state_dict["objects"][name])

    def save(self):
        """Save from all ranks, unless it is the newest already, and keep the newest two."""
        path = self.folder / f"epoch-{self.done['epoch']:04}-image-{self.done['images']:012}"
        if path == self.newest:
            return
        for buffer in self.model.buffers():  # one rank's are saved
            dist.broadcast(buffer, src=0)
        dcp.save({"state": self}, checkpoint_id=path)
        if not (path / ".metadata").exists():  # which rank 0 has written
            raise ValueError(f"{path} is not on a disk that all nodes share")
        self.newest = path
        if dist.get_rank() == 0:
            for older in sorted(self.folder.glob("epoch-*/.metadata"))[:-2]:
                shutil.rmtree(older.parent, ignore_errors=True)

    def load(self):
        """Load the newest complete checkpoint, if there is one, on all ranks."""
        found = [sorted(self.folder.glob("epoch-*/.metadata"))]  # written after the shards
        dist.broadcast_object_list(found)  # as rank 0 sees the disk
        [before, self.newest] = [None, None, *[path.parent for path in found[0]]][-2:]
        if self.newest:
            try:
                dcp.load({"state": self}, checkpoint_id=self.newest)
            except dcp.CheckpointException as error:
                raise ValueError(f"cannot load {self.newest}; before it: {before}") from error
            if dist.get_rank() == 0:
                print(f"resuming from {self.newest} at {self.done}", flush=True)


def stop_asked():  # MP-5
    """Whether any rank has got a stop signal or lost its launcher; all ranks ask together."""
    flag = torch.tensor(len(received) + (os.getppid() != LAUNCHER))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag.item() > 0


def ignore_stop_signals(worker_id=None):  # MP-5
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def main():
    train(parse_args())
    ignore_stop_signals()  # MP-5: a second signal must not end the process while it exits
    dist.destroy_process_group()  # only now, when train() has freed the model


if __name__ == "__main__":
    main()
