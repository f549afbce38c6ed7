"""The peak memory of one of N ranks in a training step, with fake tensors: no GPU is needed.

    python memory.py fsdp --ranks 8 --amp
"""

import argparse

import torch
import torch.distributed as dist
from fsdp import Block
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, DEPTH, WORDS = 4096, 4096, 32, 32000


class Model(nn.Module):  # 1. your model, with a list of blocks
    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text):
        x = self.words(text) + self.positions.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x)).float()


def loss_of(model):  # 2. one rank's batch, and the loss
    text = torch.zeros(1, TOKENS + 1, dtype=torch.int64)
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("ddp", "fsdp"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--shards", type=int, help="HSDP: ranks that share a copy of the model")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    shards = args.shards or args.ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks // shards, shards), mesh_dim_names=("copy", "shard"))
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.amp else {}
    with FakeTensorMode():
        model, tracker = Model(args.recompute), MemTracker()
        for module in (*model.blocks, model) if args.way == "fsdp" else ():
            fully_shard(module, mesh=mesh if args.ranks > shards else mesh["shard"],
                        mp_policy=MixedPrecisionPolicy(**dtypes))
        tracker.memory_tracking = {}  # its own one, with weak keys, takes half of the time
        tracker.track_external(model)
        trained = [part for part in model.parameters() if part.requires_grad]
        with tracker:
            own = [part.to_local() if args.way == "fsdp" else part for part in trained]
            held = [torch.zeros_like(part) for part in own for _ in range(2)]  # AdamW's state
            for part in own if args.way == "ddp" else ():
                part.grad = torch.zeros_like(part)  # in DDP's buckets, at all times
            with torch.autocast("cpu", torch.bfloat16, args.amp and args.way == "ddp"):
                loss = loss_of(model)
            loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    step = 5 * sum(part.nbytes for part in own)  # AdamW copies its state once, if not fused
    print(f"peak {max(peak, step) / 1e9:.2f} GB")
