"""Train a causal language model of Hugging Face on a text: 07's fsdp.py with its model.

pip install transformers
torchrun --standalone --nproc-per-node=2 05_model_parallel/huggingface.py \
    --model FOLDER_OR_NAME --text FILE --amp --recompute
"""

import argparse
import ctypes
import os
import shutil
import sys
import time
import zlib
from functools import partial
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
from torch.utils.checkpoint import checkpoint as activation_checkpoint
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal, check_same_model, wait_for_file
from common.model import warmup_then_decay
from common.stops import StopSignals


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--model", required=True, help="a folder, or a name on the Hub")
    add("--scratch", action="store_true", help="random weights, to pretrain")
    add("--text", type=Path, required=True, help="file to train on")
    add("--length", type=int, default=1024, help="tokens per row: %(default)s")
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=1, help="rows per process: %(default)s")
    add("--accumulate", type=int, default=1, help="batches per step: %(default)s")
    add("--lr", type=float, default=1e-5, help="peak, for any batch: %(default)s")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default="tuned", help="new folder: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    add("--recompute", action="store_true", help="recompute activations: less memory")
    add("--compile", action="store_true", help="compile each layer: slow start")
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
    if args.output.exists() or args.output == args.checkpoint:  # nothing is overwritten
        raise ValueError(f"--output {args.output} must be a new folder")
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    rows = load_rows(args)
    length = (len(rows) - 2) * 9 // 10  # full rows; the last tenth is for testing
    if length < 1:
        raise ValueError(f"{args.text} has fewer than two rows of --length tokens")
    test_loader = DataLoader(
        rows, args.batch_size, sampler=share_of(torch.arange(length, len(rows) - 1))
    )

    # 3. Model
    # FSDP-1: rank 0 makes the whole model; on meta a model has shapes but no memory
    whole = build(args, random=args.scratch) if rank == 0 else None
    with torch.device("meta"):
        model = build(args, random=True)
    layers = layers_of(model)
    if not layers:  # FSDP-2: each rank would gather the whole model at once
        raise ValueError(f"{args.model} has no layers that layers_of() finds")
    for layer in layers:
        if args.compile:  # the forward only: FSDP gathers the weights outside
            layer.forward = torch.compile(layer.forward)
        if args.recompute:  # keep no activations: compute them again in backward
            layer.forward = partial(
                activation_checkpoint, layer.forward, use_reentrant=False
            )
    # FSDP-2: a mesh says which ranks share a model: without --shards, all of them
    mesh = init_device_mesh(args.device, (world_size,))
    if args.shards:  # neighbours, such as a node's GPUs; the copies are as in DDP
        size = (world_size // args.shards, args.shards)  # copies, shards of each
        mesh = init_device_mesh(args.device, size, mesh_dim_names=("copy", "shard"))
    policy = MixedPrecisionPolicy()  # float32
    if args.amp:  # not autocast: FSDP also sends bfloat16; it sums float32
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    # a layer is whole only while it computes; model comes last, with all other layers.
    # It replaces the parameters by shards (DTensors): make the optimizer after it
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)  # model() is a collective
        # sum, then divide: Gloo has no mean, and torch 2.8 would take its sum instead
        module.set_force_sum_reduction_for_comms(args.device == "cpu")
    # FSDP-3: allocate the shards, then fill them with rank 0's weights
    model.to_empty(device=device)
    model.tie_weights()  # to be sure: the head is the embedding, where it was
    weights = whole.state_dict() if rank == 0 else {}
    # other strides, such as those of a transposed weight, would arrive permuted
    weights = {name: each.contiguous() for name, each in weights.items()}
    from_rank0 = dcp_state.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    )
    dcp_state.set_model_state_dict(model, weights, options=from_rank0)
    for name, buffer in model.named_buffers():  # not all are in state_dict()
        if rank == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
    del weights
    if rank == 0:
        whole.to("meta")  # free its memory until the weights come back

    # 4. Loss and optimizer
    rows_per_step = args.batch_size * args.accumulate
    global_batch = rows_per_step * world_size  # DDP-3: rows of all ranks per step
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    # CKPT-4: this start's peaks, because loading overwrites lr, weight_decay, ...
    peaks = [group["lr"] for group in optimizer.param_groups]
    progress = {"epoch": 1, "done": 0}  # done: rows of this epoch, over all ranks
    # CKPT-3: if one of these differs, the file is of another run
    must_match = {"model": args.model, "length": args.length, "seed": args.seed}
    must_match |= {"lr": args.lr, "text": zlib.crc32(rows.numpy())}
    must_match["tensors"] = len(model.state_dict())  # or a smaller model would load
    load_newest(args.checkpoint, model, optimizer, progress, must_match)
    check_equal(**must_match, **progress)  # CKPT-3: a machine may have an old copy
    if progress["epoch"] > args.epochs:  # CKPT-3: fewer --epochs than before
        raise ValueError(f"{args.checkpoint} has {progress}: give more --epochs")
    if rank == 0:  # DDP-4: log on rank 0 only
        print(f"starting at {progress} on {world_size} ranks, {device}", flush=True)

    # 5. Train and evaluate
    # STOP-1: from here on a signal only sets a flag. Before, there is nothing to save
    stops = StopSignals()
    for epoch in range(progress["epoch"], args.epochs + 1):
        progress["epoch"] = epoch
        # CKPT-4: the rest of the epoch; it is empty if only the evaluation is missing
        shard = rest_of_epoch(length, args.seed + epoch, progress["done"])
        train_loader = DataLoader(rows, rows_per_step, sampler=shard)
        model.train()
        for batch in train_loader:
            start = time.perf_counter()
            # CKPT-4: a resume on as many ranks draws the same noise
            seen = (epoch - 1) * length + progress["done"]
            torch.manual_seed(args.seed + seen * world_size + rank)
            batch = batch.to(device)
            optimizer.zero_grad()
            # the mean is over the tokens of the whole step, on all ranks
            count = (batch[:, 1:] >= 0).sum()
            dist.all_reduce(count)
            total = 0
            parts = batch.split(args.batch_size)
            for part in parts:
                # only the last backward averages the gradients of all ranks
                model.set_requires_gradient_sync(part is parts[-1])
                loss = loss_of(model, part)
                # FSDP-2: each rank gets its shards of the mean gradient: undo the mean
                (loss * world_size / count).backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the whole model
            # CKPT-4: the rate follows the rows, since the number of ranks may change
            done = min(progress["done"] + global_batch, length)
            middle = (progress["done"] + done) / 2 / length  # of this step in the epoch
            fraction = (epoch - 1 + middle) / args.epochs  # smaller with more --epochs
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * warmup_then_decay(fraction)
            optimizer.step()
            progress["done"] = done
            dist.all_reduce(total)  # DDP-5: the sum over all ranks
            if rank == 0:  # DDP-4: log on rank 0 only
                print(  # the loss first, because it waits for the GPU
                    f"epoch {epoch}/{args.epochs}  {done / length:.0%}"
                    f"  loss {total / count:.4f}"
                    f"  {count / (time.perf_counter() - start):.0f} tokens/s"
                    f"  GPU {torch.cuda.max_memory_allocated() / 1e9:.1f} GB",
                    flush=True,
                )
            # CKPT-1: every N steps of the epoch; all ranks enter, for the collectives
            stop = stops.vote()  # STOP-1: all ranks stop together, or some would hang
            if stop or done == length or done // global_batch % args.save_every == 0:
                # FSDP-2: an error if a weight is NaN or the ranks used different layers
                check_same_model(model)
                save_checkpoint(args.checkpoint, model, optimizer, progress, must_match)
            if stop:
                break  # evaluate() then returns None, because the vote stays true
        loss = evaluate(model, test_loader, stops, device)
        if loss is None:  # STOP-1: wait for rank 0: torchrun kills all if one fails
            if rank == 0:
                print("stopped: the same command resumes")
            dist.barrier()
            return 1
        if rank == 0:  # DDP-4: log on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  held-out loss {loss:.4f}"
                f"  perplexity {loss.exp():.2f}"
            )
        progress["done"] = 0

    # 6. Save
    save_whole(model, whole, args)  # FSDP-4: once, because it gathers all weights


@torch.no_grad()
def evaluate(model, batches, stops, device):
    """Return the mean loss of the tokens of the test rows, or None after a signal."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        if stops.vote():  # STOP-1: an evaluation may take long; a resume repeats it
            return None
        batch = batch.to(device)
        total[0] += loss_of(model, batch)
        total[1] += (batch[:, 1:] >= 0).sum()
    dist.all_reduce(total)  # DDP-5: the sum over all ranks
    return total[0] / total[1]


def rest_of_epoch(length, seed, done):  # CKPT-4: no sampler of torch starts at `done`
    """Return this rank's share of the indices after the first `done` of the epoch."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    return share_of(order[done:])


def share_of(order):  # DDP-3: ranks take turns, so the first `done` are used up
    """Return this rank's indices. -1, the row without tokens, pads to equal length."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    padding = order.new_full([-len(order) % world_size], -1)
    return torch.cat([order, padding])[rank::world_size].tolist()


def load_rows(args):  # DDP-3: rank 0 reads the text, all ranks map its file of rows
    """Return rows [N, length] of tokens, filled up with -100, and a row of -100."""
    path = Path(f"{args.checkpoint}.rows")
    if dist.get_rank() == 0:
        shutil.rmtree(f"{args.output}.tmp", ignore_errors=True)  # a kill left it
        first, tokens = [torch.tensor(each).long() for each in tokenize(args)]
        size = args.length - len(first)
        tokens = nn.functional.pad(tokens, (0, 2 * size), value=-100)
        tokens = tokens.unfold(0, size, size)
        rows = torch.cat([first.expand(len(tokens), -1), tokens], dim=1)
        torch.save(rows, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    wait_for_file(path)
    return torch.load(path, mmap=True)


def save_whole(model, whole, args):  # FSDP-4: all take part, rank 0 gets the weights
    to_rank0 = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=to_rank0)
    if dist.get_rank() == 0:
        whole.load_state_dict(weights, assign=True)
        whole.tie_weights()  # to("meta") has untied them: they would be saved twice
        export(args, whole, f"{args.output}.tmp")
        os.replace(f"{args.output}.tmp", args.output)  # CKPT-2: never a partial folder


def save_checkpoint(folder, model, optimizer, progress, must_match):
    """Write a checkpoint on all ranks. Of the older ones keep one complete spare."""
    path = folder / "epoch-{epoch:06}-done-{done:012}".format(**progress)  # sortable
    if dist.get_rank() == 0:  # on a parallel disk mkdir by several ranks may fail
        path.mkdir(parents=True, exist_ok=True)
    wait_for_file(path)  # FSDP-5: then all write shards, and rank 0 .metadata last
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


# The model and its tokens. EDIT the following functions for your own model


def tokenize(args):
    """Return the tokens with which each row must begin, and those of the text."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.save_pretrained(f"{args.output}.tmp")  # now, or it could fail at the end
    text = args.text.read_text(encoding="utf-8")
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer("")["input_ids"][:1], tokens


def build(args, random):
    """Return the model in float32, which AdamW needs, with random or saved weights."""
    config = AutoConfig.from_pretrained(args.model)
    if hasattr(config.get_text_config(), "router_aux_loss_coef"):
        raise ValueError("this script lacks the loss that balances the experts")
    if random:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model, found = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, output_loading_info=True
    )
    if found["missing_keys"] or found["unexpected_keys"]:  # else only a warning
        raise ValueError(f"{args.model} has weights of another architecture: {found}")
    model.generation_config.save_pretrained(f"{args.output}.tmp")  # it may be invalid
    return model


def layers_of(model):
    """Return the layers, nearly always of this class of transformers."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def loss_of(model, rows):
    """Return the sum of the losses of all tokens but each row's first."""
    logits = model(rows.clamp(min=0), use_cache=False).logits.float()
    # each token is predicted from those before it; -100, at the end, is left out
    logits, labels = logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def export(args, whole, path):
    """Write a folder for from_pretrained, in the dtype of the model's config."""
    whole.to(AutoConfig.from_pretrained(args.model).dtype).save_pretrained(path)


if __name__ == "__main__":
    code = train(parse_args())
    if dist.get_backend() == "gloo":
        time.sleep(0.1)  # FSDP keeps Gloo's threads; a busy one may abort the exit
    dist.destroy_process_group()  # DDP-1: after train() has released the model
    sys.exit(code)  # STOP-1: 1 after a stop, so that run.sh requeues the job
