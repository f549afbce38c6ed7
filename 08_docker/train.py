"""Train a ConvNet on MNIST, started by torchrun; whatever stops it, the same command goes on where it was.

    bash 06_checkpointing/run.sh
    torchrun --standalone --nproc-per-node=2 06_checkpointing/train.py --checkpoint run1.pt --save-every 50
"""

import argparse
import contextlib  # DDP-7
import gc  # DDP-1
import math  # DDP-7
import os
import sys
import time
from datetime import timedelta  # DDP-1
from pathlib import Path

import torch
import torch.distributed as dist  # DDP-1
import torch.distributed.nn  # DDP-1: imported later, by DDP, it would keep the group alive past its end
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP-2
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler  # DDP-3
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # after this folder, where a copied common/ may be
import checkpoint  # CKPT-2, CKPT-3: how to write and to read it
from common.data import load_mnist
from common.gather import gather_in_order  # DDP-5
from common.model import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate for a global batch of 256 images")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the images")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of MNIST, downloaded if need be")
    parser.add_argument("--output", type=Path, default="mnist.pt", help="file for the trained weights")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it can be")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--compile", action="store_true", help="compile the model: a slower start, faster steps")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for another rank")  # DDP-1
    parser.add_argument("--no-sync-bn", action="store_true", help="BatchNorm statistics per GPU")  # DDP-2
    parser.add_argument("--accumulate", type=int, default=1, help="batches to add up for a step")  # DDP-7
    parser.add_argument("--checkpoint", type=Path, default="checkpoint.pt", help="file to go on from")  # CKPT-1
    parser.add_argument("--save-every", type=int, default=100, help="steps from one checkpoint to the next")  # CKPT-1
    parser.add_argument("--resume", choices=("auto", "never", "must"), default="auto", help="auto: if there")  # CKPT-3
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    for name, value in vars(args).items():
        if name != "seed" and type(value) in (int, float) and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if "LOCAL_RANK" not in os.environ:  # DDP-0: torchrun says in the environment who is who
        parser.error(f"start it with torchrun: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if args.device == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        parser.error(f"each process needs a GPU, torch finds {torch.cuda.device_count()}: start fewer, or --device cpu")
    if os.path.isdir(out := args.output) or not os.access(out if os.path.exists(out) else f"{out.parent}/", os.W_OK):
        parser.error(f"--output {out}: cannot write this file; name one in a folder that exists and is yours")
    if (out := args.checkpoint).is_dir() or out == args.output or not os.access(f"{out.parent}/", os.W_OK):  # CKPT-2
        parser.error(f"--checkpoint {out}: cannot write this file; name another in a folder that exists and is yours")
    args.state = checkpoint.read(args, ConvNet(), parser.error)  # CKPT-3: on rank 0; what does not fit is refused here
    return args


def train(args):
    # 1. Setup
    local_rank = int(os.environ["LOCAL_RANK"])  # DDP-1: one device a process, known before the group is made
    device = torch.device(args.device, local_rank)
    backend, gpu = ("cpu:gloo,cuda:nccl", device) if args.device == "cuda" else ("gloo", None)  # CKPT-5
    torch.cuda.set_device(gpu or -1)  # -1: no GPU
    dist.init_process_group(backend, device_id=gpu, timeout=timedelta(seconds=args.timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = checkpoint.RestOfEpoch(train_set, seed=args.seed)  # DDP-3, CKPT-4
    images_per_epoch = train_sampler.total_size  # DDP-3: of all ranks
    loading = {"collate_fn": tuple, "pin_memory": args.device == "cuda"}  # tuple: the sets give whole batches
    loading["worker_init_fn"] = checkpoint.ignore_signals  # CKPT-5: workers that a signal ends take the step with them
    loading["generator"] = torch.Generator()  # CKPT-4: what starts an epoch draws from it, not from the rank's own
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loading)
    test_loader = DataLoader(test_set, 250, sampler=DistributedSampler(test_set, shuffle=False), **loading)  # DDP-3

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if gpu and not args.no_sync_bn else net  # DDP-2: CUDA only
    model = DDP(net, forward_sync_buffers=False, gradient_as_bucket_view=True)  # DDP-2: averages gradients
    model = torch.compile(model) if args.compile else model

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss()
    global_batch = args.batch_size * args.accumulate * world_size  # DDP-3, DDP-7
    optimizer = torch.optim.SGD(model.parameters(), args.lr * global_batch / 256, momentum=0.9, nesterov=True)
    steps = args.epochs * math.ceil(len(train_loader) / args.accumulate)  # DDP-7; the rate rises for 40 %, then falls
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / (steps * 0.4 + 1), (steps - step) / (steps * 0.6)))

    def save(epoch, offset=0, seconds=0.0, loss=0.0):  # CKPT-1: all that the run is, but for the images
        ranks = [None] * world_size
        dist.all_gather_object(ranks, {"loss": loss, "random": checkpoint.get_random_states(gpu)})
        place = {"epoch": epoch, "offset": offset, "seconds": seconds, "ranks": ranks}
        sizes = {"images": len(train_set), "global_batch": global_batch}
        states = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        return checkpoint.write(args, {"run": checkpoint.describe(args, net), "place": place, **sizes, **states})

    place = {"epoch": 1, "offset": 0, "seconds": 0.0, "ranks": []}  # CKPT-4: in the run: here at the start
    if state := checkpoint.share(args, len(train_set)):  # CKPT-3: what rank 0 has read
        with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):  # a step for nothing: after its first
            model(torch.zeros(args.batch_size, 1, 28, 28, device=device)).sum().backward()  # DDP sums in another order
        optimizer.zero_grad()
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"] | {"base_lrs": scheduler.base_lrs})
        place = state["place"]
        if state["global_batch"] != global_batch:  # CKPT-4: on other processes: other steps, another learning rate
            steps_done = (place["epoch"] - 1) * steps // args.epochs + math.ceil(place["offset"] / global_batch)
            scheduler.last_epoch = steps_done - 1
            scheduler.step()
        checkpoint.set_random_states(place["ranks"][rank % len(place["ranks"])]["random"], gpu)
        del state, args.state  # a second copy of everything

    # 5. Train and evaluate
    signals, launcher = checkpoint.catch_signals(), os.getppid()  # CKPT-5: from here on there is something to save
    for epoch in range(place["epoch"], args.epochs + 1):  # CKPT-4
        train_sampler.set_epoch(epoch)  # DDP-3: another order each epoch
        start, total_loss = time.perf_counter(), torch.zeros((), device=device)
        train_sampler.offset = place["offset"]  # CKPT-4: the images, time and loss of this epoch that lie behind
        start -= place["seconds"]
        total_loss += sum(each["loss"] for each in place["ranks"][rank::world_size])
        bar = tqdm(train_loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=rank != 0 or None)  # DDP-4
        for step, (images, labels) in enumerate(bar):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            stop = torch.tensor(len(signals) + (os.getppid() != launcher))  # CKPT-5: on any rank, by a signal or alone
            agreed = dist.all_reduce(stop, dist.ReduceOp.MAX, async_op=True)
            first = step - step % args.accumulate  # DDP-7: add up some batches, synchronise and step with the last
            last = step + 1 == first + args.accumulate or step + 1 == len(train_loader)
            window = min(args.accumulate * args.batch_size, len(train_sampler) - first * args.batch_size)  # images
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                    loss = criterion(model(images), labels)
                (loss * (len(labels) / window)).backward()  # DDP-7: part of the mean over the window
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # large batches start without a jump
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            total_loss += loss.detach() * len(labels)
            if step % 50 == 0 and not bar.disable:
                bar.set_postfix(loss=f"{loss.item():.4f}")
            agreed.wait()  # CKPT-5: on the same step for all
            if last and (stop or scheduler.last_epoch % args.save_every == 0):  # CKPT-1
                offset = min(place["offset"] + (step + 1) * args.batch_size * world_size, len(train_set))
                saved = save(epoch, offset, time.perf_counter() - start, total_loss.item())
                if stop:
                    bar.close()
                    if rank == 0:
                        print(f"stopped in epoch {epoch}/{args.epochs} after {offset} of {len(train_set)} images: "
                              f"{'the same command goes on' if saved else 'NOT saved'}", flush=True)
                    return os.EX_TEMPFAIL if saved else 1
        dist.all_reduce(total_loss)  # DDP-5: the sum of all ranks
        loss, seconds = total_loss.item() / images_per_epoch, time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        if rank == 0:  # DDP-4: one rank speaks for all
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{images_per_epoch / seconds:.0f} images/s", flush=True)
        save(epoch + 1)  # CKPT-1
        place = {"offset": 0, "seconds": 0.0, "ranks": []}  # CKPT-4

    # 6. Save
    if rank == 0:  # DDP-4: one rank writes
        torch.save({name: tensor.cpu() for name, tensor in net.state_dict().items()}, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """The fraction of the test set that the model classifies correctly; each image counts once."""
    for buffer in model.buffers():  # DDP-5: the running statistics differ from rank to rank; rank 0's are saved
        dist.broadcast(buffer, src=0)
    model.eval()
    hits = torch.cat([model(images.to(device)).argmax(1) == labels.to(device) for images, labels in test_loader])
    hits = gather_in_order(hits, len(test_loader.dataset))  # DDP-5: without the sampler's padding
    model.train()
    return hits.sum().item() / len(hits)


def main():
    code = train(parse_args())  # CKPT-5: None, which is 0, or that of a stop
    gc.collect()  # DDP-1: the model goes before the group does: in the other order some exits abort
    dist.destroy_process_group()
    checkpoint.ignore_signals()  # CKPT-5: Python's end would let one more of them change the code
    sys.exit(code)


if __name__ == "__main__":
    main()
