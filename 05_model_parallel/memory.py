"""The peak memory of one of N ranks in a training step, with fake tensors: no GPU.

python 05_model_parallel/memory.py fsdp --ranks 8 --amp
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.model import Block

TOKENS, WIDTH, DEPTH, WORDS = 4096, 4096, 32, 32000


class Model(nn.Module):  # 1. your model, with a list of blocks
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text):
        x = self.words(text) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


# 2. one rank's batch, here one sequence, and the loss; call the model only once
def loss_of(model):
    text = torch.zeros(1, TOKENS + 1, dtype=torch.int64)
    logits = model(text[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Tracker(MemTracker):
    """Without hooks for gradients, which are an error for frozen weights."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=False):
        return super()._track_module_params_and_buffers(module, False)


def shard(model, mesh, amp):
    policy = MixedPrecisionPolicy()
    if amp:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("way", choices=("ddp", "fsdp"))
    add("--ranks", type=int, default=8)
    add("--shards", type=int, help="HSDP: ranks that share a copy of the model")
    add("--amp", action="store_true")
    add("--recompute", action="store_true")
    args = parser.parse_args()
    fsdp = args.way == "fsdp"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    shards = args.shards or args.ranks
    copies = args.ranks // shards
    mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=("copy", "shard"))
    with FakeTensorMode():
        model = Model()
        if args.recompute:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if fsdp:
            shard(model, mesh if copies > 1 else mesh["shard"], args.amp)
        tracker = Tracker()
        tracker.memory_tracking = {}  # its own, with weak keys, takes half of the time
        tracker.track_external(model)
        own = [part for part in model.parameters() if part.requires_grad]
        with tracker:
            if fsdp:
                own = [part.to_local() for part in own]
            held = [torch.zeros_like(part) for part in (*own, *own)]  # AdamW's state
            if not fsdp:  # DDP's buckets always hold the gradients
                for part in own:
                    part.grad = torch.zeros_like(part)
            with torch.autocast("cpu", torch.bfloat16, args.amp and not fsdp):
                loss = loss_of(model)
            loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    # weights, gradients, AdamW's state and, if not fused, a copy of half of it
    step = 5 * sum(part.nbytes for part in own)
    print(f"peak {max(peak, step) / 1e9:.2f} GB")
