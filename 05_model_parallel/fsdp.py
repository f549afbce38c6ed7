"""Train a vision transformer on MNIST with FSDP2: as DDP, but a rank holds a shard.

torchrun --standalone --nproc-per-node=2 05_model_parallel/fsdp.py --amp --recompute
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal, check_same_model
from common.data import load_mnist
from common.gather import gather_in_order
from common.model import VisionTransformer, warmup_then_decay


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
    args.output.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    # DDP-3: one process per machine downloads; each rank trains on its own shard
    train_set, test_set = load_mnist(args.data_dir, download=local_rank == 0)
    sampler = DistributedSampler(train_set, seed=args.seed)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    test_loader = DataLoader(test_set, 250, sampler=test_sampler, **options)

    # 3. Model
    # FSDP-1: rank 0 makes the whole model; on meta a model has shapes but no memory
    whole = VisionTransformer(args.width, args.depth) if rank == 0 else None
    with torch.device("meta"):
        model = VisionTransformer(args.width, args.depth, args.recompute)
    # FSDP-2: a mesh says which ranks share a model: here all of them
    mesh = init_device_mesh(args.device, (world_size,))
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
    torch.manual_seed(args.seed + rank)  # DDP-3: for dropout, differs between ranks

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3: images of all ranks per step
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    steps = args.epochs * len(train_loader)
    # taken in the middle of a step, so that no step has a rate of 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_decay((step + 0.5) / steps)
    )
    if rank == 0:  # DDP-4: log on rank 0 only
        print(f"starting on {world_size} ranks, {device}", flush=True)

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP-3: shuffle again
        model.train()
        start = time.perf_counter()
        # the sum of the losses, and the number of images
        total = torch.zeros(2, dtype=torch.float64, device=device)
        # DDP-4: hide the progress bar on other ranks (True) and in files (None)
        hide = rank > 0 or None
        for batch in tqdm(train_loader, f"epoch {epoch}", leave=False, disable=hide):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            loss = criterion(model(images).float(), labels)  # float32, as in autocast
            loss.backward()  # FSDP-2: each rank gets its shards of the mean gradient
            # transformers need it; the norm is that of all ranks' shards together
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
        # FSDP-2: an error if a weight is NaN or the ranks used different layers
        check_same_model(model)
        dist.all_reduce(total)  # DDP-5: the sum over all ranks
        total, count = total.tolist()  # waits for the GPU
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, len(test_set), device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  loss {total / count:.4f}"
                f"  accuracy {accuracy:.4f}  {seconds:.1f} s"
                f"  {count / seconds:.0f} images/s",
                flush=True,
            )

    # 6. Save
    # FSDP-4: all ranks take part, and rank 0 gets the whole weights in CPU memory.
    # Once, because it gathers all weights; for saves during a run see 07's fsdp.py
    to_rank0 = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=to_rank0)
    if rank == 0:  # DDP-4: save on rank 0 only
        torch.save(weights, args.output)


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


if __name__ == "__main__":
    train(parse_args())
    if dist.get_backend() == "gloo":
        time.sleep(0.1)  # FSDP keeps Gloo's threads; a busy one may abort the exit
    dist.destroy_process_group()  # DDP-1: after train() has released the model
