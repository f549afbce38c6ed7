"""Learn with a contrastive loss over all ranks which halves of MNIST's images match.

torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/contrastive.py --epochs 5
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal, check_same_model
from common.data import load_mnist
from common.gather import all_gather, gather_in_order
from common.model import warmup_then_decay


class TwoEncoders(nn.Module):
    """Images [N, 1, 28, 28] to embeddings [N, 2, 64] of their halves, as in CLIP.

    All have one length, which is trained: its square is CLIP's logit scale. Outside the
    model it would not be averaged, checked or saved.
    """

    def __init__(self):
        super().__init__()
        self.left, self.right = [
            nn.Sequential(
                nn.Flatten(), nn.Linear(392, 256), nn.GELU(), nn.Linear(256, 64)
            )
            for _ in range(2)
        ]
        self.log_length = nn.Parameter(torch.tensor(1.0))

    def forward(self, images):
        left, right = images.chunk(2, dim=3)
        pairs = torch.stack([self.left(left), self.right(right)], dim=1)
        return self.log_length.exp() * F.normalize(pairs, dim=2)


class AllGather(torch.autograd.Function):
    """DDP-6: join the ranks' rows, with gradients: [n, ...] to [ranks * n, ...]."""

    @staticmethod
    def forward(ctx, rows):
        return all_gather(rows).flatten(0, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)  # the loss of each rank depends on the rows of all
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def contrastive_loss(pairs):
    """The mean loss of this rank's pairs, each compared with the pairs of all ranks.

    It needs no factor: AllGather adds up the gradients, and DDP averages them.
    """
    left, right = pairs.unbind(1)
    all_left, all_right = AllGather.apply(pairs).unbind(1)
    # the partner of this rank's first pair is row rank * n of all ranks' rows
    own = dist.get_rank() * len(pairs) + torch.arange(len(pairs), device=pairs.device)
    left_loss = F.cross_entropy(left @ all_right.T, own)
    right_loss = F.cross_entropy(right @ all_left.T, own)
    return (left_loss + right_loss) / 2


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=64, help="pairs per process: %(default)s")
    add("--lr", type=float, default=3e-3, help="peak rate for 256 pairs: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="per process: %(default)s")
    add("--data-dir", type=Path, help="MNIST folder; default: download to ./data")
    add("--output", type=Path, default="contrastive.pt", help="weights: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    add("--compile", action="store_true", help="compile: slow start, faster steps")
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")
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
    model = TwoEncoders().to(device)
    if args.sync_bn:  # DDP-2: convert BatchNorm before the model is wrapped
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp_model = DDP(model)  # DDP-2: all ranks get the weights of rank 0
    if args.compile:
        ddp_model = torch.compile(ddp_model)
    torch.manual_seed(args.seed + rank)  # DDP-3: for dropout, differs between ranks

    # 4. Loss and optimizer
    global_batch = args.batch_size * world_size  # DDP-3: pairs of all ranks per step
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    steps = args.epochs * len(train_loader)
    # taken in the middle of a step, so that no step has a rate of 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_decay((step + 0.5) / steps)
    )

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP-3: shuffle again
        model.train()
        start = time.perf_counter()
        # the sum of the losses, and the number of pairs
        total = torch.zeros(2, dtype=torch.float64, device=device)
        # DDP-4: hide the progress bar on other ranks (True) and in files (None)
        hide = rank > 0 or None
        for batch in tqdm(train_loader, f"epoch {epoch}", leave=False, disable=hide):
            images = batch[0].to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(args.device, torch.bfloat16, enabled=args.amp):
                pairs = ddp_model(images)
            loss = contrastive_loss(pairs.float())
            loss.backward()  # DDP-2: averages the gradients of all ranks
            optimizer.step()
            scheduler.step()
            total[0] += loss.detach() * len(images)
            total[1] += len(images)
        # DDP-2: an error if a weight is NaN or differs between the ranks
        check_same_model(model)
        dist.all_reduce(total)  # DDP-5: the sum over all ranks
        loss = (total[0] / total[1]).item()  # waits for the GPU
        seconds = time.perf_counter() - start
        recall = evaluate(model, test_loader, len(test_set), device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  recall@1 {recall:.4f}"
                f"  {seconds:.1f} s  {total[1] / seconds:.0f} pairs/s",
                flush=True,
            )

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        torch.save(model.state_dict(), args.output)


@torch.no_grad()
def evaluate(model, batches, length, device):
    """Return how often the right half that is nearest to a left half is its own."""
    for buffer in model.buffers():  # DDP-5: all ranks take rank 0's (BatchNorm)
        dist.broadcast(buffer, src=0)
    model.eval()
    rows = []
    for images, _ in batches:
        rows.append(model(images.to(device, non_blocking=True)))
    # DDP-5: collect the embeddings of all ranks
    left, right = gather_in_order(torch.cat(rows), length).unbind(1)
    correct = (left @ right.T).argmax(1) == torch.arange(length, device=device)
    return correct.sum().item() / length


if __name__ == "__main__":
    train(parse_args())
    dist.destroy_process_group()  # DDP-1: after train() has released the model
