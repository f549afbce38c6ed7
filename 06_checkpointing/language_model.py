"""Train a language model on a text with checkpoints, as train.py does a ConvNet.

torchrun --standalone --nproc-per-node=2 06_checkpointing/language_model.py --epochs 20
"""

import argparse
import contextlib
import ctypes
import itertools
import os
import sys
import time
import zipfile
import zlib
from pathlib import Path

ctypes.CDLL(None).prctl(1, 9)  # CKPT-1: SIGKILL if torchrun dies, else two runs save

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal, check_same_model, wait_for_file
from common.gather import gather_in_order
from common.model import warmup_then_decay

EMA_DECAY = 0.98


class Sequences(Dataset):
    """Parts of a text of bytes. Labels are the next bytes, and -100 after its end."""

    def __init__(self, text, context):
        self.text, self.context = text, context

    def __len__(self):
        return -(-(len(self.text) - 1) // self.context)  # rounded up

    def __getitem__(self, index):
        first, size = index * self.context, self.context + 1
        part = self.text[first : first + size].long()
        part = nn.functional.pad(part, (0, size - len(part)), value=-100)
        return {"tokens": part[:-1].clamp(min=0), "labels": part[1:]}


class LanguageModel(nn.Module):
    """Tokens [N, context] to logits of the next ones [N, context, 256]."""

    def __init__(self, context, width=128, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device
        )
        hidden = self.tokens(tokens) + self.positions.weight
        return self.head(self.layers(hidden, mask, is_causal=True))


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=16, help="sequences per process")
    # DDP-7: for larger batches than fit
    add("--accumulate", type=int, default=1, help="batches per step: %(default)s")
    add("--context", type=int, default=128, help="tokens per sequence: %(default)s")
    add("--lr", type=float, default=0.004, help="peak for 256 sequences: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="per process: %(default)s")
    add("--text", type=Path, default=__file__, help="default: this script")
    add("--output", type=Path, default="model.pt", help="weights: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    add("--compile", action="store_true", help="compile: slow start, faster steps")
    # CKPT-1: one path per run, because what is there is resumed
    add("--checkpoint", type=Path, default="checkpoint.pt", help="one file per run")
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
    torch.manual_seed(args.seed)
    for path in (args.output, args.checkpoint):
        path.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    content = bytearray(args.text.read_bytes())
    if len(content) < 20:
        raise ValueError(f"{args.text} is too short")
    text = torch.frombuffer(content, dtype=torch.uint8)
    # DDP-3: each rank reads its own shard; the last tenth is for testing
    parts = text.tensor_split([len(text) * 9 // 10])
    train_set, test_set = [Sequences(part, args.context) for part in parts]
    length = len(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    test_loader = DataLoader(test_set, 64, sampler=test_sampler, **options)

    # 3. Model
    model = LanguageModel(args.context).to(device)
    # each rank averages the weights, which are equal on all ranks
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    ddp_model = DDP(model)  # DDP-2: all ranks get the weights of rank 0
    if args.compile:
        ddp_model = torch.compile(ddp_model)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(reduction="none")  # 0 where the label is -100
    # DDP-7: sequences of all ranks per step
    global_batch = args.batch_size * args.accumulate * world_size
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (global_batch / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    # CKPT-4: this start's peaks, because loading overwrites lr, weight_decay, ...
    peaks = [group["lr"] for group in optimizer.param_groups]
    # CKPT-1: saved is rank 0's: weights are equal, and DDP uses rank 0's buffers
    stateful = {"model": model, "optimizer": optimizer, "ema": ema}
    progress = {"epoch": 1, "done": 0}  # done: sequences of the epoch, over all ranks
    # CKPT-3: with another length, seed or --lr the file is of another run
    must_match = {"text": zlib.crc32(content), "seed": args.seed, "lr": args.lr}
    if wait_for_file(args.checkpoint):  # CKPT-3: all ranks load: DDP(...) came before
        load_checkpoint(args.checkpoint, stateful, progress, must_match)
    check_equal(**must_match, **progress)  # CKPT-3: one text, and one file
    if progress["epoch"] > args.epochs:  # CKPT-3: fewer --epochs than before
        raise ValueError(f"{args.checkpoint} has {progress}: give more --epochs")
    if rank == 0:  # DDP-4: log on rank 0 only
        print(f"starting at {progress} on {world_size} ranks", flush=True)

    def seed_step():  # CKPT-4: a resume on as many ranks draws the same noise
        seen = (progress["epoch"] - 1) * length + progress["done"]
        torch.manual_seed(args.seed + seen * world_size + rank)  # unique per step, rank

    # 5. Train and evaluate
    for epoch in range(progress["epoch"], args.epochs + 1):
        progress["epoch"] = epoch
        # CKPT-4: the rest of the epoch; it is empty if only the evaluation is missing
        shard = rest_of_epoch(length, args.seed + epoch, progress["done"])
        train_loader = DataLoader(train_set, args.batch_size, sampler=shard, **options)
        model.train()
        start, done_before = time.perf_counter(), progress["done"]
        # the sum of the losses, and the number of tokens
        total = torch.zeros(2, dtype=torch.float64, device=device)
        # DDP-4: hide the progress bar on other ranks (True) and in files (None)
        hide = rank > 0 or None
        seed_step()  # CKPT-4: iter() seeds workers, or a resume repeats epoch 1's noise
        batches = tqdm(iter(train_loader), f"epoch {epoch}", leave=False, disable=hide)
        seed_step()  # CKPT-4: again, because iter() has drawn a number
        batches = iter(batches)  # of which islice takes the next ones
        # DDP-7: the micro-batches of a step, of which the last step may have fewer
        while micro_batches := [*itertools.islice(batches, args.accumulate)]:
            optimizer.zero_grad()
            count = sum((batch["labels"] >= 0).sum() for batch in micro_batches)
            count = count.to(device)
            total[1] += count
            dist.all_reduce(count)  # DDP-7: those of the whole step, on all ranks
            for number, batch in enumerate(micro_batches, start=1):
                batch = {
                    name: part.to(device, non_blocking=True)
                    for name, part in batch.items()
                }
                # DDP-7: only the last backward averages the gradients of all ranks
                last = number == len(micro_batches)
                with contextlib.nullcontext() if last else ddp_model.no_sync():
                    with torch.autocast(args.device, torch.bfloat16, enabled=args.amp):
                        logits = ddp_model(batch["tokens"])
                        loss = criterion(logits.mT, batch["labels"]).sum()
                    # DDP-7: the mean over all tokens, as DDP divides by world_size
                    (loss * world_size / count).backward()
                total[0] += loss.detach()
            # CKPT-4: the rate follows the sequences, as the number of ranks may change
            done = min(progress["done"] + global_batch, length)
            middle = (progress["done"] + done) / 2 / length  # of this step in the epoch
            fraction = (epoch - 1 + middle) / args.epochs  # smaller with more --epochs
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * warmup_then_decay(fraction)
            optimizer.step()
            ema.update_parameters(model)
            progress["done"] = done
            # CKPT-1: every N steps of the epoch; all ranks enter, for the collectives
            if done == length or done // global_batch % args.save_every == 0:
                # DDP-2: an error if a weight is NaN or differs between the ranks
                check_same_model(model)
                dist.all_reduce(total)  # DDP-5: the sum over all ranks
                if rank == 0:  # DDP-4: the others wait for rank 0 in the next step
                    save_checkpoint(args.checkpoint, stateful, progress, must_match)
                    tqdm.write(
                        f"epoch {epoch}/{args.epochs}  {done / length:.0%}"
                        f"  loss {total[0] / total[1]:.4f}"
                    )
                total.zero_()  # CKPT-4: so the next loss is the same after a resume
            seed_step()  # CKPT-4: before the next batch is fetched and augmented
        seconds = time.perf_counter() - start
        loss = evaluate(ema.module, criterion, test_loader, len(test_set), device)
        if rank == 0:  # DDP-4: log and save on rank 0 only
            rate = (length - done_before) * args.context / seconds
            print(
                f"epoch {epoch}/{args.epochs}  perplexity {loss.exp():.4f}"
                f"  {seconds:.1f} s  {rate:.0f} tokens/s",
                flush=True,
            )
            save_file(ema.module.state_dict(), args.output)
        progress["done"] = 0


@torch.no_grad()
def evaluate(model, criterion, batches, length, device):
    """Return the mean loss of the tokens of the test set."""
    model.eval()
    sums = []  # the loss of each sequence, and the number of its tokens
    for batch in batches:
        labels = batch["labels"].to(device, non_blocking=True)
        logits = model(batch["tokens"].to(device, non_blocking=True))
        losses = criterion(logits.mT, labels).double().sum(1)
        sums.append(torch.stack([losses, (labels >= 0).sum(1)], dim=1))
    # DDP-5: collect the results of all ranks
    loss, count = gather_in_order(torch.cat(sums), length).sum(0)
    return loss / count


def rest_of_epoch(length, seed, done):  # CKPT-4: no sampler of torch starts at `done`
    """Return this rank's share of the indices after the first `done` of the epoch.

    Ranks take turns, so the first `done` are used up. Padding: empty sequences.
    """
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    padding = order.new_full([(done - length) % world_size], length)  # empty
    return torch.cat([order[done:], padding])[rank::world_size].tolist()


def save_checkpoint(path, stateful, progress, must_match):  # CKPT-1: on rank 0
    state = {name: each.state_dict() for name, each in stateful.items()}
    save_file(state | {"progress": progress, "must_match": must_match}, path)


def save_file(content, path):  # CKPT-2: a kill in the middle leaves the old file
    """Write a temporary file, then rename it, which replaces path in one step."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before the rename, if the power fails
    # weights_only takes tensors and plain values: fail now, not at the resume
    torch.load(temporary, "cpu", mmap=True, weights_only=True)
    os.replace(temporary, path)


def load_checkpoint(path, stateful, progress, must_match):  # CKPT-3: on all ranks
    """Load into stateful and progress. Raises if it is damaged or from another run."""
    if zipfile.ZipFile(path).testzip():  # torch.load does not compare the checksums
        raise ValueError(f"{path} is damaged")
    state = torch.load(path, "cpu", mmap=True, weights_only=True)  # 1 copy per machine
    if state["must_match"] != must_match:
        raise ValueError(f"{path} has {state['must_match']}, not {must_match}")
    for name, each in stateful.items():
        each.load_state_dict(state[name])
    progress.update(state["progress"])


if __name__ == "__main__":
    train(parse_args())
    dist.destroy_process_group()  # DDP-1: after train() has released the model
