"""Fine-tune a causal language model of Hugging Face on a text: fsdp.py with its model.

pip install transformers
torchrun --standalone --nproc-per-node=2 05_model_parallel/huggingface.py \
    --model FOLDER_OR_NAME --text FILE --amp --recompute

Checkpoints as in 07: cp 07_slurm/fsdp.py 05_model_parallel/checkpoints.py
patch 05_model_parallel/huggingface.py tests/copies/huggingface_resume.diff
"""

import argparse
import os
import sys
import tempfile
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal
from common.model import warmup_then_decay


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--model", required=True, help="a folder, or a name on the Hub")
    add("--text", type=Path, required=True, help="file to train on")
    add("--length", type=int, default=1024, help="tokens per sequence: %(default)s")
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=1, help="sequences per process: %(default)s")
    add("--accumulate", type=int, default=1, help="batches per step: %(default)s")
    add("--lr", type=float, default=1e-5, help="peak rate: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="per process: %(default)s")
    add("--output", type=Path, default="tuned", help="folder: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    # FSDP-1: recompute: compute activations again in backward, keep none
    add("--recompute", action="store_true", help="recompute activations: less memory")
    add("--compile", action="store_true", help="each layer, by torch.compile")
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
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        config = AutoConfig.from_pretrained(args.model)
    except OSError as error:  # it may not name what it did not find
        where = "neither a folder with a config.json, nor found on the Hub"
        raise FileNotFoundError(f"{args.model} is {where}") from error

    # 2. Data
    # DDP-3: one process per machine tokenises, and each rank reads its own shard
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_set = load_rows(args.text, tokenizer, args.length, rank, local_rank)
    sampler = DistributedSampler(train_set, seed=args.seed)
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    rows_per_step = args.batch_size * args.accumulate
    train_loader = DataLoader(train_set, rows_per_step, sampler=sampler, **options)

    # 3. Model
    # FSDP-1: rank 0 reads the weights; on meta a model has shapes but no memory
    whole = load_whole(args.model) if rank == 0 else None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if args.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # FSDP-2: a mesh says which ranks share a model: here all of them. Their shards
    # differ, so check_same_model cannot compare them
    mesh = init_device_mesh(args.device, (world_size,))
    policy = MixedPrecisionPolicy()  # float32
    if args.amp:  # not autocast: FSDP also sends bfloat16; it sums float32
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    # FSDP-2: nearly all decoder layers of transformers are of this class
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    # a layer is whole only while it computes; model, the last, has all other layers
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)  # model() is a collective
        # sum, then divide: Gloo has no mean, and torch 2.8 would take its sum instead
        module.set_force_sum_reduction_for_comms(args.device == "cpu")
    # FSDP-3: allocate the shards, then fill them with rank 0's weights
    model.to_empty(device=device)
    model.tie_weights()  # the head is the embedding again, in models where it was
    weights = whole.state_dict() if rank == 0 else {}
    # other strides, such as those of channels_last, would arrive permuted
    weights = {name: each.contiguous() for name, each in weights.items()}
    from_rank0 = dcp_state.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    )
    dcp_state.set_model_state_dict(model, weights, options=from_rank0)
    for name, buffer in model.named_buffers():  # state_dict() lacks rotary angles
        if rank == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
    del weights
    if rank == 0:
        whole.to("meta")  # free its memory until the weights come back
    if args.compile:
        for layer in layers:  # the forward only: FSDP gathers the weights outside
            layer.forward = torch.compile(layer.forward)
    torch.manual_seed(args.seed + rank)  # DDP-3: for dropout, differs between ranks

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(reduction="sum")  # it leaves out labels of -100
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    steps = args.epochs * len(train_loader)
    # taken in the middle of a step, so that no step has a rate of 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_decay((step + 0.5) / steps)
    )

    # 5. Train
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP-3: shuffle again
        model.train()
        for step, rows in enumerate(train_loader, start=1):
            start = time.perf_counter()
            rows = rows.to(device, non_blocking=True)
            optimizer.zero_grad()
            # DDP-5: the mean is over the tokens of all ranks, not of each
            tokens = (rows[:, 1:] >= 0).sum()
            dist.all_reduce(tokens)
            total = torch.zeros((), device=device)
            batches = rows.split(args.batch_size)
            for number, batch in enumerate(batches, start=1):
                # DDP-7: only the last backward of a step sums over the ranks
                model.set_requires_gradient_sync(number == len(batches))
                logits = model(batch.clamp(min=0), use_cache=False).logits.float()
                # each token is predicted from those before it
                loss = criterion(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
                # FSDP-2: each rank gets its shards of the mean gradient: undo the mean
                (loss * world_size / tokens.clamp(min=1)).backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all ranks' shards
            optimizer.step()
            scheduler.step()
            dist.all_reduce(total)  # DDP-5: the sum over all ranks
            loss = (total / tokens).item()  # waits for the GPU
            seconds = time.perf_counter() - start
            if rank == 0:  # DDP-4: log on rank 0 only
                print(
                    f"epoch {epoch}/{args.epochs}  step {step}/{len(train_loader)}"
                    f"  loss {loss:.4f}  {tokens / seconds:.0f} tokens/s",
                    flush=True,
                )

    # 6. Save
    # FSDP-4: all ranks take part, and rank 0 gets the whole weights in CPU memory
    to_rank0 = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=to_rank0)
    if rank == 0:  # DDP-4: save on rank 0 only
        whole.load_state_dict(weights, assign=True)
        whole.tie_weights()  # or a tied weight would be saved twice
        whole.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)


def load_rows(path, tokenizer, length, rank, local_rank):
    """Return the tokens of a text as rows [N, length]; -100 fills up the last one."""
    with tempfile.TemporaryDirectory() as folder:
        if local_rank == 0:
            tokens = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
            if len(tokens) < length:
                raise ValueError(f"{path} has {len(tokens)} tokens: --length {length}")
            tokens += [-100] * (-len(tokens) % length)
            torch.save(torch.tensor(tokens).view(-1, length), f"{folder}/rows.pt")
        # DDP-3: torchrun numbers the ranks of a machine one after another
        folders = [None] * dist.get_world_size()
        dist.all_gather_object(folders, folder)  # waits for the file
        rows = torch.load(f"{folders[rank - local_rank]}/rows.pt", mmap=True)
        # all have opened it before it is deleted, and all machines have one text
        check_equal(rows=rows.shape, text=rows.sum().item())
    return rows


def load_whole(path):
    """Return a model with its weights, in float32."""
    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    if found["missing_keys"] or found["unexpected_keys"]:  # else only a warning
        raise ValueError(f"{path} has weights of another architecture: {found}")
    return model


if __name__ == "__main__":
    train(parse_args())
    if dist.get_backend() == "gloo":
        time.sleep(0.1)  # FSDP keeps Gloo's threads; a busy one may abort the exit
    dist.destroy_process_group()  # DDP-1: after train() has released the model
