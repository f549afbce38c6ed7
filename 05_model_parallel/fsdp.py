"""Train a ConvNet on MNIST in several processes, each with a part of every parameter: fully sharded data parallel.

    bash 05_model_parallel/run.sh fsdp.py
    torchrun --standalone --nproc-per-node=2 05_model_parallel/fsdp.py --checkpoint fsdp-run1
"""

import argparse
import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn  # imported later, it would keep the group alive past its end
from torch import nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # after this folder, where a copied common/ may be
from common.data import load_mnist
from common.gather import all_gather, gather_in_order
from common.model import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate for a global batch of 256 images")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the images")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of MNIST, downloaded if need be")
    parser.add_argument("--output", type=Path, default="mnist.pt", help="file for the trained weights")
    parser.add_argument("--checkpoint", type=Path, help="folder to save each epoch in, and to go on from")  # MP-5
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it can be")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for another rank")
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    for name, value in vars(args).items():
        if name != "seed" and type(value) in (int, float) and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if args.device == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        parser.error(f"each process needs a GPU, torch finds {torch.cuda.device_count()}: start fewer, or --device cpu")
    if os.path.isdir(out := args.output) or not os.access(out if os.path.exists(out) else f"{out.parent}/", os.W_OK):
        parser.error(f"--output {out}: cannot write this file; name one in a folder that exists and is yours")
    if args.checkpoint and not os.access(f"{args.checkpoint.parent}/", os.W_OK):
        parser.error(f"--checkpoint {args.checkpoint}: cannot write there; name a folder in one that is yours")
    return args


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # one device a process, known before the group is made
    device = torch.device(args.device, local_rank)
    backend, gpu = ("nccl", device) if args.device == "cuda" else ("gloo", None)
    torch.cuda.set_device(gpu or -1)  # -1: no GPU
    dist.init_process_group(backend, device_id=gpu, timeout=timedelta(seconds=args.timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, seed=args.seed)
    images_per_epoch = train_sampler.total_size
    loading = {"collate_fn": tuple, "pin_memory": args.device == "cuda"}  # tuple: the sets give whole batches
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loading)
    test_loader = DataLoader(test_set, 250, sampler=DistributedSampler(test_set, shuffle=False), **loading)

    # 3. Model
    mesh = init_device_mesh(args.device, (world_size,))
    net = ConvNet()
    for part in (net.layer1, net.layer2, net.fc, net):  # MP-1: each rank keeps a slice of all tensors of a part, and
        fully_shard(part, mesh=mesh)  # MP-2: gathers the rest just before the part computes, then drops it again

    # 4. Loss and optimizer
    global_batch = args.batch_size * world_size
    optimizer = torch.optim.SGD(net.parameters(), args.lr * global_batch / 256, momentum=0.9, nesterov=True)
    steps = args.epochs * len(train_loader)  # the rate rises for 40 % of them, then falls to 0
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / (steps * 0.4 + 1), (steps - step) / (steps * 0.6)))
    saved = args.checkpoint.glob("epoch-*/.metadata") if args.checkpoint else []  # MP-5: which is written last
    if done := max((int(path.parent.name.removeprefix("epoch-")) for path in saved), default=0):
        state = dict(zip(("model", "optim"), distributed.get_state_dict(net, optimizer), strict=True))
        dcp.load(state, checkpoint_id=args.checkpoint / f"epoch-{done}")  # MP-5: on any number of ranks
        distributed.set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        scheduler.last_epoch = done * len(train_loader) - 1
        scheduler.step()
    held = all_gather(torch.tensor(sum(parameter.to_local().nbytes for parameter in net.parameters()), device=device))
    if rank == 0:
        print(f"bytes of parameters on each rank: {', '.join(map(str, held.tolist()))}; epochs done: {done}")

    # 5. Train and evaluate
    for epoch in range(done + 1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        start, total_loss = time.perf_counter(), torch.zeros((), device=device)
        for images, labels in tqdm(train_loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=rank > 0 or None):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()  # MP-2: gathers again, and leaves each rank its slice of the averaged gradients
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # large batches start without a jump
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total_loss += loss.detach() * len(labels)
        dist.all_reduce(total_loss)
        loss, seconds = total_loss.item() / images_per_epoch, time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images_per_epoch / seconds:.0f} images/s", flush=True)
        if args.checkpoint:
            state = dict(zip(("model", "optim"), distributed.get_state_dict(net, optimizer), strict=True))
            dcp.save(state, checkpoint_id=args.checkpoint / f"epoch-{epoch}")  # MP-5: each rank writes its slices

    # 6. Save
    options = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = distributed.get_model_state_dict(net, options=options)  # MP-5: all slices, in rank 0's memory
    if rank == 0:
        torch.save(whole, args.output)
    mesh._pg_registry.clear()  # caches keep the mesh for good, and with it the group's threads: some exits would abort


@torch.no_grad()
def evaluate(model, test_loader, device):
    """The fraction of the test set that the model classifies correctly; each image counts once."""
    for buffer in model.buffers():  # the running statistics differ from rank to rank; rank 0's are saved
        dist.broadcast(buffer, src=0)
    model.eval()
    hits = torch.cat([model(images.to(device)).argmax(1) == labels.to(device) for images, labels in test_loader])
    hits = gather_in_order(hits, len(test_loader.dataset))  # without the sampler's padding
    model.train()
    return hits.sum().item() / len(hits)


def main():
    train(parse_args())
    gc.collect()  # the model goes before the group does: in the other order some exits abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
