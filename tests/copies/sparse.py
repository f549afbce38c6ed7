"""DDP for nn.Embedding(..., sparse=True): gradients as rows, which differ per rank.

ddp_model.register_comm_hook(None, average)

On the CPU DDP itself corrupts memory with sparse gradients, and NCCL takes none. Tried
with Gloo and with NCCL. SparseAdam moves each row that a batch touches, so slice
padding off.
"""

import torch
import torch.distributed as dist

from common.gather import all_gather_ragged


def average(_, bucket):
    """The mean of a bucket of gradients over all ranks, sparse or dense.

    Of a sparse one all rows are gathered: with many ranks they need much memory.
    """
    gradient = bucket.buffer()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows = torch.cat(all_gather_ragged(gradient.indices()[0]))
        values = torch.cat(all_gather_ragged(gradient.values())) / dist.get_world_size()
        gradient = torch.sparse_coo_tensor(
            rows[None], values, gradient.shape, check_invariants=False
        )
    else:
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    future = torch.futures.Future()
    future.set_result(gradient)
    return future
