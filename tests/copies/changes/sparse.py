"""Compare gradients of a sparse table, with the hook, and of a dense one."""

import torch
import torch.distributed as dist


def change(script, rank):
    def main():
        dist.init_process_group("gloo")
        sparse, dense = [
            torch.nn.Embedding(9, 4, sparse=each, _weight=torch.ones(9, 4))
            for each in (True, False)
        ]
        model = torch.nn.parallel.DistributedDataParallel(sparse)
        model.register_comm_hook(None, script.average)
        words = torch.tensor([[0, 1, 1], [1, 7, 2]])  # two rows of rank 0, three of 1
        model(words[rank]).square().mean().backward()
        dense(words).square().mean().backward()
        assert sparse.weight.grad.to_dense().allclose(dense.weight.grad)

    script.main = main
