"""Train a vision transformer on MNIST, sharded by FSDP2: stopped, the same command resumes it.

    torchrun --standalone --nproc-per-node=2 05_model_parallel/fsdp.py
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

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # if common/ is not next to this
from common.data import load_mnist
from common.gather import check_equal, gather_in_order, wait_for_file

MAX_GRAD_NORM = 1.0


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
    add("--width", type=int, default=64, help="features of each patch")  # FSDP-1: how large
    add("--depth", type=int, default=3, help="blocks of the transformer")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    add("--shards", type=int, default=world_size, help="ranks that share one copy of the model")
    add("--recompute", action="store_true", help="activation checkpointing: less memory, slower")
    add("--accumulate", type=int, default=1, help="micro-batches per step")  # DDP-7: larger batches
    add("--workers", type=int, default=0, help="DataLoader workers per process")
    add("--save-every", type=int, default=100, help="steps per checkpoint")  # CKPT-1: when, where
    add("--checkpoint", type=Path, default="checkpoint", help="directory shared by all nodes")
    add("--best", type=Path, default="best.pt", help="path of the weights of the best epoch")
    args = parser.parse_args()
    if "RANK" not in os.environ:  # DDP-1: torchrun sets it
        parser.error("start it with torchrun, as the first lines of this file show")
    if min(args.epochs, args.batch_size, args.accumulate, args.save_every) < 1:  # CKPT-1: fail now
        parser.error("--epochs, --batch-size, --accumulate and --save-every must be at least 1")
    if args.shards < 1 or world_size % args.shards:  # FSDP-2: copies of one size
        parser.error(f"--shards {args.shards} does not divide the {world_size} processes")
    if args.output.is_dir() or args.best.is_dir() or args.output.resolve() == args.best.resolve():
        parser.error("--output and --best must be two different files")
    if os.environ["RANK"] == "0":  # DDP-4: only rank 0 saves
        for folder in (args.checkpoint, args.output.parent, args.best.parent):  # FSDP-4: the first
            folder.mkdir(parents=True, exist_ok=True)
    return args


class VisionTransformer(nn.Module):  # FSDP-1: your model, with a list of blocks
    """Images [N, 1, 28, 28] to logits [N, 10], by 16 patches of 7 x 7 pixels: arXiv:2010.11929."""

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
            tokens = (activation_checkpoint(block, tokens, use_reentrant=False) if self.recompute
                      else block(tokens))  # recompute: again in the backward
        return self.head(self.norm(tokens).mean(1))


class Block(nn.Module):
    """Self-attention with 4 heads, then an MLP: tokens [N, patches, width] to the same shape."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens):
        q, k, v = self.qkv(self.norm1(tokens)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        tokens = tokens + self.out(attended.transpose(1, 2).flatten(2))
        return tokens + self.down(nn.functional.gelu(self.up(self.norm2(tokens))))


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
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler, **options)

    # 3. Model
    # Only rank 0 has memory for a whole model. All ranks shard its shapes, which rank 0 then fills.
    whole = VisionTransformer(args.width, args.depth) if rank == 0 else None  # FSDP-1: or load it
    with torch.device("meta"):
        model = VisionTransformer(args.width, args.depth, args.recompute)
    copies = world_size // args.shards  # FSDP-2: HSDP, or FSDP if all ranks share one copy
    mesh = init_device_mesh(device.type, (copies, args.shards), mesh_dim_names=("copy", "shard"))
    mesh = mesh if copies > 1 else mesh["shard"]
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.amp else {}
    policy = MixedPrecisionPolicy(**dtypes)  # the shards stay in float32
    for module in (*model.blocks, model):  # each is all-gathered as a whole
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)  # FSDP-3: memory for the shards, then rank 0's weights
    shared = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(model, whole.state_dict() if rank == 0 else {}, options=shared)
    for name, buffer in model.named_buffers():  # none here; some are in no state_dict()
        if rank == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
    del whole
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = [sum(part.numel() for part in some) for some in (model.parameters(), trained)]
    if rank == 0:
        own = sum(parameter.to_local().nbytes for parameter in model.parameters())
        note = ", shards span nodes" * (int(os.environ["LOCAL_WORLD_SIZE"]) % args.shards > 0)
        print(f"{sizes[0]} parameters, {sizes[1]} trained, {own} bytes on rank 0{note}", flush=True)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * args.accumulate * world_size  # DDP-7: images per step
    lr = args.lr * (global_batch / 256) ** 0.5  # keeps the noise of a step: arXiv:1705.08741
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    total_steps = args.epochs * math.ceil(length / global_batch)  # CKPT-4: there is no loader yet
    peaks = [group["lr"] for group in optimizer.param_groups]  # a checkpoint has other rates
    progress = {"epoch": 1, "done": 0, "best": -math.inf}  # CKPT-1: add your own numbers
    fingerprint = {"length": length, "seed": args.seed, "lr": args.lr, "parameters": sizes[0]}
    check_equal("options", {"epochs": args.epochs, "batch-size": args.batch_size, **fingerprint,
                            "accumulate": args.accumulate, "save-every": args.save_every})
    check_equal("names", [*model.state_dict()])  # in the same order
    state = State(args.checkpoint, model, optimizer, progress, fingerprint, launcher)  # FSDP-4: DCP
    state.load()
    check_equal("progress in --checkpoint", (progress["epoch"], progress["done"]))

    # 5. Train and evaluate
    for epoch in range(progress["epoch"], args.epochs + 1):  # CKPT-4: only what is left
        shard = rest_of_epoch(length, hash((args.seed, epoch)), progress["done"])
        seed = hash((args.seed, epoch, progress["done"], rank))  # integers hash alike in each start
        torch.manual_seed(seed)
        train_loader = DataLoader(train_set, args.batch_size, sampler=shard, **options,
                                  generator=torch.Generator().manual_seed(seed))  # of the workers
        check_equal("batches", (len(train_loader), len(test_loader)))  # or some ranks would wait
        model.train()
        title = f"epoch {epoch}/{args.epochs}" + f", restart {again}" * (again > "0")  # CKPT-1: log
        since = f"  since {progress['done'] / length:.0%}" * (progress["done"] > 0)
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, count of images
        # DDP-4: one bar, of rank 0; None: on a terminal only
        bar = iter(tqdm(train_loader, title, leave=False, disable=rank > 0 or None))  # DDP-7: once
        while micro_batches := list(itertools.islice(bar, args.accumulate)):  # those of one step
            images_in_step = sum(len(batch[1]) for batch in micro_batches)  # or batch["labels"]
            for number, batch in enumerate(micro_batches, start=1):  # the last backward averages
                model.set_requires_gradient_sync(number == len(micro_batches))  # DDP-7: only once
                images, labels = [part.to(device, non_blocking=True) for part in batch]
                loss = criterion(model(images).float(), labels)
                (loss * (len(labels) / images_in_step)).backward()  # DDP-7: a weighted mean
                total[0] += loss.detach() * len(labels)
                total[1] += len(labels)
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).full_tensor()
            step = total_steps * (epoch - 1 + progress["done"] / length) / args.epochs
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * warmup_then_decay(step, total_steps)  # CKPT-4: by progress
            done = progress["done"] = min(progress["done"] + global_batch, length)
            optimizer.step()
            optimizer.zero_grad()
            if done // global_batch % args.save_every == 0 or done == length:  # CKPT-1: save
                check_equal("gradients", norm.item(), 1e-6)  # CKPT-5: 1e-6, as CPUs may round
                weights = nn.utils.get_total_norm(trained).full_tensor()  # of a whole copy, as norm
                check_equal("weights", weights.item(), 1e-3)  # finite; equal in all copies
                state.save()
                if rank == 0:  # CKPT-1: log it, with the loss of this rank
                    tqdm.write(f"{title}  {done / length:.0%}  "
                               f"loss {total[0] / total[1]:.4f}  rate {group['lr']:.3g}")
            torch.manual_seed(hash((args.seed, epoch, done, rank)))  # CKPT-4: as after a resume
        dist.all_reduce(total)  # DDP-5: sum over all ranks
        loss = f"{total[0] / total[1]:.4f}" if total[1] else "-"  # CKPT-1: if no step was left
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, device)
        memory = f"  {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if backend == "nccl" else ""
        if rank == 0:  # DDP-4: log on rank 0 only
            print(f"{title}  loss {loss}  accuracy {accuracy:.4f}  "  # CKPT-1: loss may be -
                  f"{seconds:.1f} s  {total[1] / seconds:.0f} images/s{memory}{since}", flush=True)
        if accuracy > progress["best"]:  # on all ranks, as they all have the same
            progress["best"] = accuracy
            save_whole(model, args.best)  # FSDP-5: on all ranks
        progress |= {"epoch": epoch + 1, "done": 0}
        state.save()

    # 6. Save
    save_whole(model, args.output)  # FSDP-5: on all ranks
    if rank == 0:  # DDP-4: log on rank 0 only
        print(f"finished after epoch {progress['epoch'] - 1}: {args.output}", flush=True)


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the network classifies correctly."""
    model.eval()
    correct = []
    for batch in test_loader:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(model(images).argmax(1) == labels)
    model.reshard()  # FSDP-2: frees the root's own layers, which only a backward would do
    correct = gather_in_order(torch.cat(correct), len(test_loader.dataset))  # DDP-5: of all ranks
    return correct.sum().item() / len(correct)


def rest_of_epoch(length, seed, done):  # CKPT-4: in place of the sampler
    """This rank's part of the indices that an epoch has left; all parts are equally long."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    order = order[done:] + order[: (done - length) % dist.get_world_size()]  # the first ones pad it
    return order[dist.get_rank() :: dist.get_world_size()]


def save_whole(model, path):  # FSDP-5: all ranks call it, as each has a shard
    """Gather the weights in the memory of rank 0, which writes them."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        path = path.resolve()  # a symlink stays one
        torch.save(weights, f"{path}.tmp")
        with open(f"{path}.tmp", "rb") as file:
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)  # a complete file at any moment


class State:  # FSDP-4: in shards, in place of one file
    """What a resumed run needs. DCP writes each rank's shards, and loads them on any number."""
    def __init__(self, folder, model, optimizer, progress, fingerprint, launcher):
        self.folder, self.model, self.optimizer, self.launcher = folder, model, optimizer, launcher
        self.progress, self.fingerprint = progress, json.dumps(fingerprint)
        self.shared = False  # whether all nodes see the folder

    def state_dict(self):
        weights, of_optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        stepped = self.optimizer.state  # empty if the optimizer keeps no state
        for name, parameter in self.model.named_parameters():
            if stepped and parameter.requires_grad and parameter not in stepped:
                raise ValueError(f"{name} has had no gradient: use or freeze it, or no run resumes")
        return {"model": weights, "optimizer": of_optimizer,  # JSON, as DCP ignores unknown keys
                "progress": json.dumps(self.progress), "fingerprint": self.fingerprint}

    def load_state_dict(self, state):
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(f"{self.folder} has {state['fingerprint']}, not {self.fingerprint}")
        dcp_state.set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                                 optim_state_dict=state["optimizer"])
        self.progress.update(json.loads(state["progress"]))

    def save(self):
        """Save from all ranks, and keep the newest two."""
        if os.getppid() != self.launcher:  # torchrun has died, and a new run may use the folder
            raise RuntimeError("torchrun was killed, and its processes end, too")
        path = self.folder / "epoch-{epoch:08}-done-{done:012}".format(**self.progress)
        dcp.save({"state": self}, checkpoint_id=path)
        self.shared = self.shared or wait_for_file(path / ".metadata")  # rank 0's; only once
        if dist.get_rank() == 0:
            kept = sorted(self.folder.glob("epoch-*/.metadata"))[-2:]
            for older in [each for each in self.folder.glob("epoch-*") if each < kept[0].parent]:
                shutil.rmtree(older, ignore_errors=True)  # also what is incomplete

    def load(self):
        """Load the newest complete checkpoint, if there is one, on all ranks."""
        seen = [None] * dist.get_world_size()  # a node may see a file late, so ask all
        dist.all_gather_object(seen, [*self.folder.glob("epoch-*/.metadata")])
        if newest := max(itertools.chain(*seen), default=None):  # written after the shards
            self.shared = wait_for_file(newest)
            if dist.get_rank() == 0:
                print(f"resuming from {newest.parent} on {dist.get_world_size()} ranks", flush=True)
            dcp.load({"state": self}, checkpoint_id=newest.parent)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def main():
    train(parse_args())
    if dist.get_backend() == "gloo":  # DTensor keeps its threads: a busy one may abort the exit
        time.sleep(0.1)
    dist.destroy_process_group()  # DDP-1: only now, when train() has freed the model


if __name__ == "__main__":
    main()
