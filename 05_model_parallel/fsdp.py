"""Train a vision transformer on MNIST, sharded by FSDP2: stopped, it can be resumed.

torchrun --standalone --nproc-per-node=2 05_model_parallel/fsdp.py --recompute
"""

import argparse
import itertools
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as activation_checkpoint
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
if not (HERE / "common").exists():  # in this repository it is one folder above
    sys.path.append(str(HERE.parent))  # last: it may have a profile.py
from common.data import load_mnist
from common.gather import check_equal, gather_in_order, wait_for_file
from common.stops import StopSignals

MAX_GRAD_NORM = 1.0
FOLDERS = "epoch-*-done-*"  # of checkpoints


def parse_args():
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    add("--epochs", type=int, default=3, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="images per process")
    add("--lr", type=float, default=0.006, help="peak rate for 256 images per step")
    add("--seed", type=int, default=0, help="for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST; downloaded if missing")
    add("--output", type=Path, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=devices, default=devices[0], help="where to train")
    add("--amp", action="store_true", help="mixed precision: compute in bfloat16")
    # FSDP-1: how large the model is
    add("--width", type=int, default=64, help="features of each patch")
    add("--depth", type=int, default=3, help="blocks of the transformer")
    # FSDP-2: how it is sharded
    add("--shards", type=int, default=world_size, help="ranks that share one model")
    add("--recompute", action="store_true", help="less memory, slower")
    # DDP-7: for larger batches than fit
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    # CKPT-1: when and where to save
    add("--save-every", type=int, default=100, help="steps per checkpoint")
    add("--checkpoint", type=Path, default="checkpoint", help="a folder for each run")
    add("--best", type=Path, default="best.pt", help="weights of the best epoch")
    add("--workers", type=int, default=0, help="DataLoader workers per process")
    args = parser.parse_args()
    if "RANK" not in os.environ:  # DDP-1: torchrun sets it
        parser.error("start it with torchrun, as the first lines of this file show")
    for name in ("epochs", "batch_size", "width", "shards", "accumulate", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.width % 4:  # FSDP-1: each of the 4 heads has a part
        parser.error("--width must be a multiple of 4")
    if world_size % args.shards:  # FSDP-2: copies of one size
        parser.error(f"--shards {args.shards} does not divide {world_size} processes")
    files = {args.output.resolve(), args.best.resolve()}
    if len(files) < 2 or any(file.is_dir() for file in files):
        parser.error("--output and --best must be two files")
    if os.environ["RANK"] == "0":  # DDP-4: only rank 0 saves
        for folder in (args.checkpoint, args.output.parent, args.best.parent):
            folder.mkdir(parents=True, exist_ok=True)
    return args


class VisionTransformer(nn.Module):
    """Images [N, 1, 28, 28] to logits [N, 10], by 16 patches: arXiv:2010.11929."""

    def __init__(self, width, depth, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.patches = nn.Conv2d(1, width, kernel_size=7, stride=7)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            if self.recompute:  # the backward computes the block again
                tokens = activation_checkpoint(block, tokens, use_reentrant=False)
            else:
                tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))


class Block(nn.Module):
    """Self-attention with 4 heads and an MLP: [N, patches, width] to the same shape."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens):
        qkv = self.qkv(self.norm1(tokens)).unflatten(2, (3, 4, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [N, 4, patches, width / 4]
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        tokens = tokens + self.out(attended.transpose(1, 2).flatten(2))
        return tokens + self.down(nn.functional.gelu(self.up(self.norm2(tokens))))


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
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler, **options)

    # 3. Model
    # FSDP-1: only rank 0 has memory for a whole model; the others have its shapes
    whole = VisionTransformer(args.width, args.depth) if rank == 0 else None
    with torch.device("meta"):
        model = VisionTransformer(args.width, args.depth, args.recompute)
    # FSDP-2: one copy of the model, or several copies (HSDP), each sharded
    copies = world_size // args.shards
    mesh = init_device_mesh(
        device.type, (copies, args.shards), mesh_dim_names=("copy", "shard")
    )
    if copies == 1:
        mesh = mesh["shard"]
    policy = MixedPrecisionPolicy()  # the shards stay in float32
    if args.amp:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for module in (*model.blocks, model):  # each is all-gathered as a whole
        fully_shard(module, mesh=mesh, mp_policy=policy)
    # FSDP-3: memory for the shards, then rank 0's weights, and its buffers if any
    model.to_empty(device=device)
    dcp_state.set_model_state_dict(
        model,
        whole.state_dict() if rank == 0 else {},
        options=dcp_state.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True
        ),
    )
    for name, buffer in model.named_buffers():  # some are in no state_dict()
        if rank == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
    del whole
    parameters = list(model.parameters())
    trained = [each for each in parameters if each.requires_grad]
    size = sum(each.numel() for each in parameters)
    if rank == 0:  # DDP-4: log on rank 0 only
        own = sum(each.to_local().nbytes for each in parameters)
        some = sum(each.numel() for each in trained)
        print(f"{size} parameters, {some} trained, {own} bytes on rank 0")

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    # DDP-7: images per step
    global_batch = args.batch_size * args.accumulate * world_size
    # the root keeps the noise of a step: arXiv:1705.08741
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(parameters, lr, weight_decay=0.05)
    # CKPT-4: read before the load, which brings the rates of the saved step
    peaks = [group["lr"] for group in optimizer.param_groups]

    # CKPT-1: what is saved, besides the model and the optimizer
    progress = {"epoch": 1, "done": 0, "loss_sum": 0.0, "images": 0, "best": -math.inf}
    # CKPT-3: what must be as it was
    fingerprint = {"length": length, "seed": args.seed, "lr": args.lr, "size": size}
    check_equal(  # CKPT-5: on all ranks
        epochs=args.epochs,
        batch_size=args.batch_size,
        accumulate=args.accumulate,
        save_every=args.save_every,
        test_length=len(test_set),
        names=list(model.state_dict()),  # not saved: DCP itself loads by name
        **fingerprint,
    )
    # CKPT-3: all ranks read it
    resumed = load_newest(args.checkpoint, model, optimizer, progress, fingerprint)
    if rank == 0 and not resumed:
        print(f"no {args.checkpoint}: starting on {world_size} ranks")
    if progress["done"] > 0 and progress["epoch"] > args.epochs:
        raise ValueError(f"it is in epoch {progress['epoch']}: give more --epochs")
    stops = StopSignals()  # STOP-1: from here on a signal is only noted

    def save():  # CKPT-1: unless torchrun was killed
        """Write a checkpoint from all ranks, and delete all but the newest two."""
        nonlocal resumed
        if os.getppid() != torchrun:  # it was killed, and a new run may use the folder
            raise RuntimeError("torchrun was killed, and its processes end, too")
        # a disk that was mounted late, or the same run started twice
        if not resumed and any(args.checkpoint.glob(f"{FOLDERS}/.metadata")):
            raise FileExistsError(f"{args.checkpoint} had no checkpoint at the start")
        resumed = True
        path = args.checkpoint / "epoch-{epoch:08}-done-{done:012}".format(**progress)
        # .metadata is written last, when all shards are complete
        dcp.save(state_of(model, optimizer, progress, fingerprint), checkpoint_id=path)
        wait_for_file(path / ".metadata")  # raises if the nodes do not share the disk
        if rank == 0:
            kept = sorted(args.checkpoint.glob(f"{FOLDERS}/.metadata"))[-2:]
            for folder in args.checkpoint.glob(FOLDERS):
                if folder < kept[0].parent:  # also what is incomplete
                    shutil.rmtree(folder, ignore_errors=True)

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
                model.set_requires_gradient_sync(number == len(micro_batches))
                loss = criterion(model(images).float(), labels)
                (loss * len(labels) / images_in_step).backward()
                total[0] += loss.detach() * len(labels)
                total[1] += len(labels)
            norm = nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).full_tensor()
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
                weights = nn.utils.get_total_norm(trained).full_tensor()
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
                f"{seconds:.1f} s  {rate:.0f} images/s{memory()}",
                flush=True,
            )
        if accuracy > progress["best"]:  # CKPT-1: on all ranks
            progress["best"] = accuracy
            save_whole(model, args.best)  # FSDP-5: on all ranks
        progress |= {"epoch": epoch + 1, "done": 0, "loss_sum": 0.0, "images": 0}
        save()

    # 6. Save
    save_whole(model, args.output)  # FSDP-5: on all ranks
    if rank == 0:  # DDP-4: log on rank 0 only
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


def save_whole(model, path):  # FSDP-5: all ranks call it, as each has shards
    """Gather the weights on rank 0, which writes them."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        path = path.resolve()  # a symlink stays one
        temporary = f"{path}.tmp"
        with open(temporary, "wb") as file:
            torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # it is always complete


def state_of(model, optimizer, progress, fingerprint):  # FSDP-4: in shards
    """Return what a resumed run needs: DCP writes and reads each rank's part."""
    weights, moments = dcp_state.get_state_dict(model, optimizer)
    for name, parameter in model.named_parameters():
        unused = parameter.requires_grad and parameter not in optimizer.state
        if optimizer.state and unused:  # DCP would save less than it wants to load
            raise ValueError(f"{name} has had no gradient: use it, or freeze it")
    return {
        "model": weights,
        "optimizer": moments,
        # as texts: of a dictionary DCP would load only the keys that it is given
        "progress": json.dumps(progress),
        "fingerprint": json.dumps(fingerprint),
    }


def load_newest(folder, model, optimizer, progress, fingerprint):
    """Load the newest complete checkpoint of a folder; return it, or None."""
    found = [None] * dist.get_world_size()  # a node may see a file late, so ask all
    dist.all_gather_object(found, list(folder.glob(f"{FOLDERS}/.metadata")))
    newest = max(itertools.chain(*found), default=None)
    if not newest:
        return
    wait_for_file(newest)
    state = state_of(model, optimizer, progress, fingerprint)
    expected = state["fingerprint"]
    dcp.load(state, checkpoint_id=newest.parent)
    if state["fingerprint"] != expected:
        raise ValueError(f"{folder} has {state['fingerprint']}, not {expected}")
    dcp_state.set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    progress.update(json.loads(state["progress"]))
    if dist.get_rank() == 0:
        print(f"resuming from {newest.parent} on {len(found)} ranks")
    return newest


def memory():
    """The peak of this rank, as text, on a GPU."""
    if not torch.cuda.is_initialized():
        return ""
    return f"  {torch.cuda.max_memory_allocated() / 1e9:.2f} GB"


def warmup_then_decay(fraction):
    """The factor of the peak rate: it rises for 40 % of the run, then falls to 0."""
    return max(0, min(fraction / 0.4, (1 - fraction) / 0.6))


def main():
    code = train(parse_args())
    # DTensor keeps Gloo's threads until the exit, which a busy one may abort
    time.sleep(0.1)
    dist.destroy_process_group()  # DDP-1: only now, when train() has freed the model
    sys.exit(code)  # STOP-1: 1 after a stop


if __name__ == "__main__":
    main()
