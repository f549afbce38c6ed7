"""The blocks of code on 04's pages, on two ranks and against one process."""

import copy
import re
from itertools import chain

import torch
import torch.distributed as dist
from helpers import ROOT, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.gather import all_gather_objects

TEXT = "".join(
    (ROOT / "04_ddp_torchrun" / name).read_text()
    for name in ("README.md", "your_script.md")
)
CPU = torch.device("cpu")


def test_the_blocks_compute_what_one_process_does(tmp_path):
    train(__file__, 2, cwd=tmp_path, PYTHONPATH=ROOT)


def block(words):
    """The block with these words, which has at most twenty lines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
    [found] = [each for each in blocks if words in each]
    assert found.count("\n") <= 20, found
    return found


def define(words):
    """What this block defines."""
    names = {}
    exec(block(words), names)
    return names


def joined(part):
    """The parts of both ranks, in the order in which DistributedSampler deals them."""
    return [*chain(*zip(*all_gather_objects([*part]), strict=True))]


def step(loss, *models):
    """A step of SGD, because Adam would hide a wrong factor; all models stay equal."""
    loss.backward()
    for weights in zip(*[model.parameters() for model in models], strict=True):
        for weight in weights:
            weight.data -= 0.1 * weight.grad
            weight.grad = None
        torch.testing.assert_close(weights[0], weights[-1], rtol=0, atol=1e-12)


def pair(alone):
    """A model with DDP, and the same one alone."""
    return DDP(copy.deepcopy(alone)), alone


class WithScale(nn.Linear):
    """The scale gets gradients of all pairs."""

    def forward(self, pairs):
        left, right = super().forward(pairs)
        return self.scale * left, right


def contrastive():
    loss_of = define("def contrastive_loss")["contrastive_loss"]
    alone = WithScale(8, 6)
    alone.scale = nn.Parameter(torch.tensor(3.0))
    ddp_model, alone = pair(alone)
    for batch in torch.randn(10, 2, 4, 8):  # [side, pair, numbers]
        loss = loss_of(*ddp_model(batch.chunk(2, dim=1)[dist.get_rank()]))
        left, right = alone(batch)
        own = torch.arange(4)
        whole = nn.functional.cross_entropy(left @ right.T, own)
        whole = (whole + nn.functional.cross_entropy(right @ left.T, own)) / 2
        torch.testing.assert_close(loss, 2 * whole)
        step(loss + whole, ddp_model, alone)


def accumulation(drop_last):
    """Each rank has 100 samples: a step of 64, and one of 36 (drop_last: 32)."""
    ddp_model, alone = pair(nn.Linear(3, 2))
    data = TensorDataset(torch.randn(200, 3), torch.arange(200) % 2)
    sampler = DistributedSampler(data)
    names = {"nn": nn, "device": CPU, "ddp_model": ddp_model}
    names["optimizer"] = torch.optim.SGD(ddp_model.parameters(), 0.1)
    loader = DataLoader(data, 16, sampler=sampler, drop_last=drop_last)
    names["train_loader"] = loader
    exec(block("no_sync"), names)
    order = joined(sampler)
    for samples in (order[:128], order[128 : 192 if drop_last else 200]):
        x, y = data[samples]
        step(nn.functional.cross_entropy(alone(x), y), alone)
    weights = [[*model.parameters()] for model in (ddp_model, alone)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


def pixels():
    """The class 255 does not count, and rank 1 has fewer other ones."""
    ddp_model, alone = pair(nn.Conv2d(3, 5, 1))
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(5, (4, 8, 8))
    labels[1, :5] = 255
    part = slice(dist.get_rank(), None, 2)
    names = {"dist": dist, "world_size": 2, "ddp_model": ddp_model}
    names |= {"images": images[part], "labels": labels[part]}
    names["criterion"] = nn.CrossEntropyLoss(reduction="sum", ignore_index=255)
    exec(block("valid = "), names)
    whole = nn.CrossEntropyLoss(ignore_index=255)(alone(images), labels)
    step(names["loss"] + whole, ddp_model, alone)


def longer_schedule():
    """After five of ten steps, a run of twenty has the rate of one that is whole."""
    rates = []
    for steps in 10, 20:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(5):
            optimizer.step()
            scheduler.step()
        if steps == 10:
            names = {"torch": torch, "optimizer": optimizer}
            exec(block("steps_done"), names | {"total_steps": 20, "steps_done": 5})
        rates.append(optimizer.param_groups[0]["lr"])
    assert abs(rates[0] - rates[1]) < 1e-12


def early_stopping():
    """After three epochs that are not better than the second; it has the best file."""
    loop = (
        "best, patience = 0, 3\nfor epoch, number in enumerate((5, 8, 7, 8, 6, 9)):\n"
    )
    loop += " model.bias.data.fill_(epoch)\n"
    loop += " correct = torch.tensor((number, 10))\n "
    names = {"torch": torch, "dist": dist, "model": nn.Linear(1, 1)}
    exec(loop + block("patience -= 1").replace("\n", "\n "), names)
    dist.barrier()  # rank 0 has written the file
    assert names["epoch"] == 4 and torch.load("best.pt")["bias"] == 1


def predictions():
    model = nn.Linear(3, 5)
    data = TensorDataset(torch.randn(47, 3), torch.zeros(47))
    found = define("def predict")["predict"](model, data, CPU)
    assert torch.equal(found, model(data.tensors[0]).argmax(1))


def collectives():
    names = {"torch": torch, "dist": dist, "device": CPU}
    exec(block("reduce_scatter("), names)
    results = [names["total"], names["first"], *names["parts"], names["half"]]
    assert torch.cat(results).tolist() == [3, 1, 1, 2, [2, 20][dist.get_rank()]]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    contrastive()
    accumulation(drop_last=False)
    accumulation(drop_last=True)
    pixels()
    longer_schedule()
    early_stopping()
    predictions()
    collectives()
    dist.destroy_process_group()
