"""What common/ promises: ranks that differ are an error, and results stay in order."""

import time

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

from common.checks import check_equal, check_same_model
from common.gather import all_gather, gather_in_order


def test_on_three_ranks(tmp_path):
    """All that is below, in three processes."""
    train(__file__, 3, cwd=tmp_path, PYTHONPATH=ROOT)


def results_are_gathered_in_order(rank):
    columns = torch.arange(6).view(2, 3).t()  # not contiguous
    assert torch.equal(all_gather(columns[rank]), columns)
    for length in (1, 5, 6, 7, 20):
        shard = DistributedSampler(range(length), shuffle=False)
        gathered = gather_in_order(torch.tensor([[n, -n] for n in shard]), length)
        assert gathered.tolist() == [[n, -n] for n in range(length)]
    if rank == 0:  # no other rank takes part
        with pytest.raises(ValueError, match="^19 rows on this rank, not 20$"):
            gather_in_order(torch.zeros(19), 60)


def a_value_that_differs_is_named(rank):
    check_equal(text="a", pair=(1, 2), nothing=None)
    with pytest.raises(ValueError, match="^x differs between the ranks: "):
        check_equal(y=1, x=rank == 1, z="same")


class Heads(nn.Module):
    """Two equal layers, and an embedding."""

    def __init__(self, first="left", second="right"):
        super().__init__()
        for name in (first, second):
            self.add_module(name, nn.Linear(4, 4))
        self.words = nn.Embedding(1000, 8)

    def use(self, name, factor=1):
        (factor * self.get_submodule(name)(torch.ones(1, 4)).sum()).backward()


def wrong_models(rank):
    """The error of check_same_model, and a model that has it."""
    torch.manual_seed(0)
    model = Heads()
    model.left.weight.data += 0.01 * rank
    yield "the weight of left.weight differs", model
    model = Heads()
    model.words.weight.data[777] = torch.nan  # the embedding's other rows are finite
    yield "the weight of words.weight differs .*or is NaN", model
    # as of a model that registers its layers from a set
    names = ["left", "right"][:: 1 - 2 * (rank == 1)]
    yield "the position of ", Heads(*names)
    model = Heads()
    model.use("left", rank)  # as if the loss came from the plain model
    yield "the gradient of left.weight differs", model
    mesh = init_device_mesh("cpu", (3,))
    model = fully_shard(Heads(), mesh=mesh)
    model.words.weight.data.to_local()[-1] = torch.nan
    yield "the weight of words.weight differs .*or is NaN", model
    # FSDP would add up the gradients of both
    model = fully_shard(Heads(), mesh=mesh)
    model.unshard()
    model.use(names[0])
    yield "the position of ", model


def a_model_that_differs_is_named(rank):
    for error, model in wrong_models(rank):
        with pytest.raises(ValueError, match=f"^{error}"):
            check_same_model(model)
    model = Heads()  # nothing is wrong
    model.use("left", 1 + 1e-5 * rank)  # as another CPU rounds
    model.left.bias.grad.fill_(torch.nan)  # a GradScaler skips this step
    check_same_model(model)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results_are_gathered_in_order(rank)
    a_value_that_differs_is_named(rank)
    a_model_that_differs_is_named(rank)
    time.sleep(0.1)  # FSDP keeps Gloo's threads; a busy one may abort the exit
    dist.destroy_process_group()
