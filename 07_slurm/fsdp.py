"""Train a sharded transformer under Slurm: it saves at a signal, resumes if requeued.

SCRIPT=07_slurm/fsdp.py sbatch 07_slurm/run.sh --amp --recompute
torchrun --standalone --nproc-per-node=2 07_slurm/fsdp.py --amp --recompute
"""

import argparse
import ctypes
import os
import shutil
import sys
import time
from pathlib import Path

# CKPT-1: PR_SET_PDEATHSIG, SIGKILL: if torchrun dies, so does this, or two runs save
ctypes.CDLL(None).prctl(1, 9)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal, check_same_model, wait_for_file
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import VisionTransformer, warmup_then_decay
from common.stops import StopSignals


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--epochs", type=int, default=3, help="default: %(default)s")
    add("--batch-size", type=int, default=64, help="images per process: %(default)s")
    add("--lr", type=float, default=0.006, help="peak rate for 256 images: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="per process: %(default)s")
    add("--data-dir", type=Path, help="MNIST folder; default: download to ./data")
    add("--output", type=Path, default="mnist.pt", help="weights: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    # FSDP-1: the model's size; with --recompute, the backward computes activations
    add("--width", type=int, default=64, help="features per patch: %(default)s")
    add("--depth", type=int, default=3)  # blocks
    add("--recompute", action="store_true", help="recompute activations: less memory")
    add("--shards", type=int, help="ranks that share a model; default: all")
    # CKPT-1: one path per run, because what is there is resumed
    add("--checkpoint", type=Path, default="checkpoint", help="one folder per run")
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
    if args.shards and world_size % args.shards:  # FSDP-2: copies of equal size
        raise ValueError(f"--shards {args.shards} does not divide {world_size} ranks")
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
    # FSDP-1: rank 0 makes the whole model; on meta a model has shapes but no memory
    whole = VisionTransformer(args.width, args.depth) if rank == 0 else None
    with torch.device("meta"):
        model = VisionTransformer(args.width, args.depth, args.recompute)
    # FSDP-2: a mesh says which ranks share a model: without --shards, all of them
    mesh = init_device_mesh(args.device, (world_size,))
    if args.shards:  # neighbours, such as a node's GPUs; the copies are as in DDP
        size = (world_size // args.shards, args.shards)  # copies, shards of each
        mesh = init_device_mesh(args.device, size, mesh_dim_names=("copy", "shard"))
    policy = MixedPrecisionPolicy()  # float32
    if args.amp:  # not autocast: FSDP also sends bfloat16; it sums float32
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    # a block is whole only while it computes; model comes last, with all other layers.
    # It replaces the parameters by shards (DTensors): make the optimizer after it
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)  # model() is a collective
        # sum, then divide: Gloo has no mean, and torch 2.8 would take its sum instead
        module.set_force_sum_reduction_for_comms(args.device == "cpu")
    # FSDP-3: allocate the shards, then fill them with rank 0's weights
    model.to_empty(device=device)  # then, to be sure, tie shared weights again
    weights = whole.state_dict() if rank == 0 else {}
    # other strides, such as those of channels_last, would arrive permuted
    weights = {name: each.contiguous() for name, each in weights.items()}
    from_rank0 = dcp_state.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    )
    dcp_state.set_model_state_dict(model, weights, options=from_rank0)
    for name, buffer in model.named_buffers():  # not all are in state_dict()
        if rank == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
    del whole, weights

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3: images of all ranks per step
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    # CKPT-4: this start's peaks, because loading overwrites lr, weight_decay, ...
    peaks = [group["lr"] for group in optimizer.param_groups]
    # CKPT-1: saved besides the model and the optimizer
    progress = {"epoch": 1, "done": 0}  # done: images of this epoch, over all ranks
    # CKPT-3: with another length, seed or --lr the file is of another run
    must_match = {"length": length, "seed": args.seed, "lr": args.lr}
    must_match["tensors"] = len(model.state_dict())  # or a smaller model would load
    load_newest(args.checkpoint, model, optimizer, progress, must_match)
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
        seed_step()  # CKPT-4: iter() seeds workers, or a resume repeats epoch 1's noise
        batches = stops.iterate(train_loader)  # STOP-1: a signal must not end workers
        seed_step()  # CKPT-4: again, because iter() has drawn a number
        for step, batch in enumerate(batches, start=1):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            loss = criterion(model(images).float(), labels)  # float32, as in autocast
            loss.backward()  # FSDP-2: each rank gets its shards of the mean gradient
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the whole model
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
                # FSDP-2: an error if a weight is NaN or the ranks used different layers
                check_same_model(model)
                dist.all_reduce(total)  # DDP-5: the sum over all ranks
                save_checkpoint(args.checkpoint, model, optimizer, progress, must_match)
                if rank == 0:  # DDP-4: log on rank 0 only
                    print(
                        f"epoch {epoch}/{args.epochs}  {done / length:.0%}"
                        f"  loss {total[0] / total[1]:.4f}",
                        flush=True,
                    )
                total.zero_()  # CKPT-4: so the next loss is the same after a resume
            if stop:  # STOP-1: wait for rank 0: torchrun kills all ranks if one fails
                if rank == 0:
                    print("stopped: the same command resumes", flush=True)
                dist.barrier()
                return 1
            seed_step()  # CKPT-4: before the next batch is fetched and augmented
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, stops.iterate(test_loader), len(test_set), device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  accuracy {accuracy:.4f}"
                f"  {seconds:.1f} s  {(length - done_before) / seconds:.0f} images/s",
                flush=True,
            )
        progress["done"] = 0

    # 6. Save
    save_whole(model, args.output)  # FSDP-4: once, because it gathers all weights


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


def save_whole(model, path):  # FSDP-4: all ranks take part, rank 0 gets the weights
    to_rank0 = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=to_rank0)
    if dist.get_rank() == 0:
        torch.save(weights, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)  # CKPT-2: a kill leaves no partial file


def save_checkpoint(folder, model, optimizer, progress, must_match):
    """Write a checkpoint on all ranks. Of the older ones keep one complete spare."""
    path = folder / "epoch-{epoch:06}-done-{done:012}".format(**progress)  # sortable
    if dist.get_rank() == 0:  # on a parallel disk mkdir by several ranks may fail
        path.mkdir(parents=True, exist_ok=True)
    wait_for_file(path)  # FSDP-5: then all write shards, and rank 0 .metadata last
    for buffer in model.buffers():  # DDP-5: all ranks take rank 0's, as after a resume
        dist.broadcast(buffer, src=0)
    dcp.save(state_of(model, optimizer, progress, must_match), checkpoint_id=path)
    if dist.get_rank() == 0:
        kept = sorted(file.parent for file in folder.glob("epoch-*/.metadata"))[-2:]
        for old in folder.glob("epoch-*-done-*"):  # even if a kill left it incomplete
            if old < kept[0]:  # older than the last two complete ones
                (old / ".metadata").unlink(missing_ok=True)  # first: it is incomplete
                shutil.rmtree(old, ignore_errors=True)


def load_newest(folder, model, optimizer, progress, must_match):
    """Load the newest complete checkpoint, if any, into model, optimizer, progress."""
    newest = [max(folder.glob("epoch-*/.metadata"), default=None)]
    dist.broadcast_object_list(newest)  # rank 0's: others may see it late
    [path] = newest
    if path and wait_for_file(path):
        state = state_of(model, optimizer, progress, must_match)
        dcp.load(state, checkpoint_id=path.parent)  # FSDP-5: all tensors, in place
        saved_progress, saved = state["run"]
        if saved != must_match:
            raise ValueError(f"{folder} has {saved}, not {must_match}")
        progress.update(saved_progress)
        dcp_state.set_optimizer_state_dict(model, optimizer, state["optimizer"])


def state_of(model, optimizer, progress, must_match):  # FSDP-5: to save and load
    # load() fills the moments of a new optimizer. In a tuple, it overwrites no dict
    weights, moments = dcp_state.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "run": (progress, must_match)}


if __name__ == "__main__":
    code = train(parse_args())
    if dist.get_backend() == "gloo":
        time.sleep(0.1)  # FSDP keeps Gloo's threads; a busy one may abort the exit
    dist.destroy_process_group()  # DDP-1: after train() has released the model
    sys.exit(code)  # STOP-1: 1 after a stop, so that run.sh requeues the job
