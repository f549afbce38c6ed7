"""The blocks of code on 04's pages, on two ranks and against one process."""

import contextlib
import json
import re
import textwrap

import torch
import torch.distributed as dist
from helpers import ROOT, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PAGES = [ROOT / "04_ddp_torchrun" / name for name in ("README.md", "your_script.md")]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
]
CPU = torch.device("cpu")


def test_the_blocks_compute_what_one_process_does(tmp_path):
    train(__file__, 2, cwd=tmp_path, PYTHONPATH=ROOT)


def block(words):
    """The block with these words, which has at most twenty lines."""
    [found] = [block for block in BLOCKS if words in block]
    assert found.count("\n") <= 20, found
    return found


def define(words):
    """What this block defines."""
    names = {}
    exec(block(words), names)
    return names


def joined(value):
    """The values of both ranks, in the order in which DistributedSampler deals them."""
    every = [None] * 2
    dist.all_gather_object(every, value)
    return [each for pair in zip(*every, strict=True) for each in pair]


class Both:
    """A model with DDP, and the same model alone, each with an optimizer."""

    def __init__(self, model):
        torch.manual_seed(1)
        self.alone, self.model = model(), model()
        self.model.load_state_dict(self.alone.state_dict())
        self.ddp_model = DDP(self.model)
        # Adam would hide a wrong factor
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in self.models()]

    def models(self):
        return self.model, self.alone

    def step_alone(self, loss):
        loss.backward()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()

    def check(self):
        weights = [list(model.parameters()) for model in self.models()]
        torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


class WithScale(nn.Linear):
    """Its scale gets gradients of all pairs."""

    def __init__(self):
        super().__init__(8, 6)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, pairs):
        left, right = super().forward(pairs)
        return self.scale * left, right


def contrastive():
    loss_of = define("def contrastive_loss")["contrastive_loss"]
    both = Both(WithScale)
    pairs = torch.randn(10, 2, 4, 8, generator=torch.Generator().manual_seed(2))
    for batch in pairs:  # [side, pair, numbers]
        own = batch.chunk(2, dim=1)[dist.get_rank()]
        loss = loss_of(*both.ddp_model(own))
        loss.backward()
        both.optimizers[0].step()
        both.optimizers[0].zero_grad()
        left, right = both.alone(batch)
        right_one = torch.arange(4)
        losses = [
            nn.functional.cross_entropy(matrix, right_one)
            for matrix in (left @ right.T, right @ left.T)
        ]
        torch.testing.assert_close(loss / 2, sum(losses) / 2)
        both.step_alone(sum(losses) / 2)
    both.check()


def accumulation():
    """Each rank has 70 samples: a step of 64, and one of 6."""
    both = Both(lambda: nn.Linear(3, 2))
    data = TensorDataset(torch.randn(140, 3), torch.arange(140) % 2)
    sampler = DistributedSampler(data)
    names = {
        "contextlib": contextlib,
        "nn": nn,
        "device": CPU,
        "ddp_model": both.ddp_model,
        "optimizer": both.optimizers[0],
        "train_loader": DataLoader(data, 16, sampler=sampler),
    }
    exec(block("no_sync"), names)
    order = joined([*sampler])
    for step in (order[:128], order[128:]):
        x, y = data[step]
        both.step_alone(nn.functional.cross_entropy(both.alone(x), y))
    both.check()


def early_stopping():
    """After three epochs that are not better than the second; it has the best file."""
    model = nn.Linear(1, 1)
    names = {"torch": torch, "dist": dist, "model": model}
    names["corrects"] = torch.tensor([5, 8, 7, 8, 6, 9])
    loop = """
        best, patience = 0, 3
        for epoch, number in enumerate(corrects):
            model.bias.data.fill_(epoch)
            correct = number, 10
        """
    block_in_loop = textwrap.indent(block("patience -= 1"), " " * 4)
    exec(textwrap.dedent(loop).rstrip() + "\n" + block_in_loop, names)
    assert names["epoch"] == 4
    dist.barrier()  # rank 0 has written the file
    assert torch.load("best.pt")["bias"] == 1


def predictions():
    model = nn.Linear(3, 5)
    data = TensorDataset(torch.randn(47, 3), torch.zeros(47))
    found = define("def predict")["predict"](model, data, CPU)
    assert torch.equal(found, model(data.tensors[0]).argmax(1))


def weighted_sampling():
    """The samples of one process; half of them are of a class with a tenth of all."""
    sampler_of = define("class WeightedSampler")["WeightedSampler"]
    labels = (torch.arange(1000) % 10 == 0).long()
    weights = 1 / labels.bincount()[labels]
    epochs = []
    for epoch in range(2):
        sampler = sampler_of(range(1000), weights, seed=3)
        alone = sampler_of(range(1000), weights, seed=3, num_replicas=1, rank=0)
        for each in (sampler, alone):
            each.set_epoch(epoch)
        epochs.append(joined([*sampler]))
        assert epochs[-1] == [*alone]
        assert 400 < labels[epochs[-1]].sum() < 600
    assert epochs[0] != epochs[1]


def stream():
    """Each sample once. One worker of a rank has one sample more than the others."""
    both = Both(lambda: nn.Linear(3, 2))
    x, y = torch.randn(45, 3), torch.arange(45) % 2
    samples = [*zip(x, y, strict=True)]
    names = define("class Stream") | define("def while_all_have_one")
    loader = DataLoader(names["Stream"](samples), 6, num_workers=2)
    used = 0
    for batch, part in names["while_all_have_one"](loader, CPU):
        loss = nn.functional.cross_entropy(both.ddp_model(batch[0]), batch[1])
        (loss * part * 2).backward()
        both.optimizers[0].step()
        both.optimizers[0].zero_grad()
        every = [None] * 2
        dist.all_gather_object(every, batch)
        x, y = [torch.cat(parts) for parts in zip(*every, strict=True)]
        both.step_alone(nn.functional.cross_entropy(both.alone(x), y))
        used += len(x)
    assert used == 45
    both.check()


def profile():
    """One file for each rank, with three steps and their communication."""
    both = Both(lambda: nn.Linear(3, 2))
    names = {"torch": torch, "dist": dist, "nn": nn, "device": CPU}
    names |= {"ddp_model": both.ddp_model, "optimizer": both.optimizers[0]}
    names["train_loader"] = [(torch.randn(4, 3), torch.arange(4) % 2)] * 9
    exec(block("torch.profiler.profile"), names)
    with open(f"trace-{dist.get_rank()}.json") as file:
        events = {event["name"] for event in json.load(file)["traceEvents"]}
    steps = {name for name in events if name.startswith("ProfilerStep")}
    assert steps == {f"ProfilerStep#{n}" for n in (4, 5, 6)}
    assert "gloo:all_reduce" in events


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    for check in (
        contrastive,
        accumulation,
        early_stopping,
        predictions,
        weighted_sampling,
        stream,
        profile,
    ):
        check()
    dist.destroy_process_group()
