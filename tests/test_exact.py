"""Any number of processes compute what one does: train_alone(), without a script."""

import re
import runpy
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from faults import GroupNorm
from helpers import (
    ROOT,
    Running,
    check_close,
    copy_repository,
    each_row,
    free_port,
    order_of,
    torchrun,
    train,
)
from torch import nn
from torch.utils.data import DataLoader

from common.model import ConvNet, VisionTransformer

SEED, IMAGES, LR = 3, 101, 0.01
# script | processes | --batch-size | options
WAYS = """
04_ddp_torchrun/train.py | 3 | 8 |
05_model_parallel/pipeline.py | 2 | 24 | --chunks 4
05_model_parallel/tensor_parallel.py | 2 | 24 |
05_model_parallel/fsdp.py | 2 | 8 | --width 16 --depth 2 --recompute
06_checkpointing/train.py | 2 | 12 |
"""
MORE = """
07_slurm/fsdp.py | 4 | 4 | --width 16 --depth 2 --shards 2
05_model_parallel/train.py | 2 | 12 | --devices cpu,cpu,cpu,cpu --chunks 5
01_dataparallel/train.py | 1 | 24 |
02_ddp_spawn/train.py | 2 | 12 | --nprocs 2
03_ddp_multinode_spawn/train.py | 3 | 8 | -n 2 -g 1,2 --master-port PORT -i
04_ddp_torchrun/train.py | 1 | 24 |
05_model_parallel/pipeline.py | 3 | 24 | --chunks 3 --schedule 1f1b
"""


@pytest.fixture
def data(monkeypatch):
    """The small images, and float64 until the test ends."""
    monkeypatch.setenv("TRAIN_IMAGES", f"{IMAGES}")
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield runpy.run_path(f"{ROOT}/tests/small/data.py")["load_mnist"]()
    torch.set_default_dtype(torch.float32)


def train_alone(path, model, data, ranks, batch):
    """Train in one process; yields each epoch's loss and accuracy, as they are printed.

    If the ranks share a model, all of them get the same batches: they count as one.
    """
    images, labels = data[0].tensors
    share = "pipeline" in path or "tensor" in path
    ranks = 1 if share else ranks
    size = ranks * batch
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)
    norms = []
    for epoch in (1, 2):
        model.train()
        if share:
            torch.manual_seed(SEED + epoch)
        [order] = DataLoader(range(IMAGES), IMAGES, shuffle=True)
        if path > "02" and not share:
            order = torch.tensor(order_of(SEED + epoch, IMAGES, ranks))
        if "pipeline" in path:
            order = order[: IMAGES // size * size]
        steps = order.split(size)
        # the rate follows the steps, and in 06 and 07 the images
        length = IMAGES if path > "06" else len(steps) * size
        total = 0
        for number, step in enumerate(steps):
            optimizer.zero_grad()
            for rank in range(ranks):
                # copies, because BatchNorm's statistics are those of rank 0
                buffers = {name: each.clone() for name, each in model.named_buffers()}
                shard = step[rank::ranks]
                given = (buffers if rank else {}), images[shard]
                logits = torch.func.functional_call(model, *given)
                loss = criterion(logits, labels[shard])
                (loss / len(step)).backward()
                total += loss.item()
            if "fsdp" in path:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1))
            done = number * size, min((number + 1) * size, length)
            fraction = (epoch - 1 + sum(done) / 2 / length) / 2
            factor = min(fraction / 0.4, (1 - fraction) / 0.6)
            optimizer.param_groups[0]["lr"] = LR * (size / 256) ** 0.5 * factor
            optimizer.step()
        model.eval()
        # as in 01, whose next order is another one after this has drawn a number
        [(test_images, test_labels)] = DataLoader(data[1], len(data[1]))
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean()
        yield f"{total / len(order):.4f}"
        yield f"{accuracy:.4f}"
    # or clipping all gradients, or none, would be no error
    assert not norms or min(norms) < 1 < max(norms), norms


@each_row(WAYS, slow=MORE)
def test_processes_compute_what_one_does(row, tmp_path, data, monkeypatch):
    """It is printed, and saved. Without BatchNorm where a batch is split."""
    path, ranks, batch, options = row
    project = copy_repository(tmp_path / "a project", small=True)
    fault = None
    if path[:2] == "05":
        monkeypatch.setattr(nn, "BatchNorm2d", GroupNorm)
        fault = "group_norm"
    options = f"--seed {SEED} --lr {LR} --epochs 2 --batch-size {batch} {options}"
    options = options.replace("PORT", f"{free_port()}").split()
    command = torchrun(path, ranks, *options, fault=fault)
    if path < "04":
        command = ["python", path, *options]
    nodes = [[node] for node in range(2)] if options[-1] == "-i" else [[]]
    started = [Running([*command, *node], project, OMP_NUM_THREADS=1) for node in nodes]
    assert not any(each.finish().code for each in started), started
    torch.manual_seed(SEED)
    if "fsdp" in path:
        model = VisionTransformer(16, 2)
    elif "tensor" in path:
        model = runpy.run_path(f"{ROOT}/{path}")["Mlp"](512)
    else:
        model = ConvNet()
    expected = [*train_alone(path, model, data, int(ranks), int(batch))]
    printed = re.findall(r"  (?:loss|accuracy) (\d\.\d{4})", started[0].output)
    assert printed == expected, started
    # 1e-14, but for biases before BatchNorm, whose gradients are nothing but rounding
    check_close(project / "mnist.pt", model.state_dict())


SHARES = ["06_checkpointing/train.py", "06_checkpointing/image_folder.py"]
SHARES += ["07_slurm/train.py", "07_slurm/fsdp.py"]


@pytest.mark.parametrize("path", SHARES)
def test_shares_of_the_rest_of_an_epoch_are_equal(path):
    """Also of fewer images than ranks; together they are all images that are left."""
    source = re.search(
        r"^def rest_of_epoch.*?(?=^\S)", (ROOT / path).read_text(), re.M | re.S
    )
    names = {"torch": torch, "dist": (dist := Mock())}
    exec(source[0], names)
    for length, world_size, done in product((3, 10), (1, 2, 8), (0, 1, 2)):
        dist.get_world_size.return_value = world_size
        dist.get_rank.side_effect = range(world_size)
        shares = [names["rest_of_epoch"](length, 0, done) for _ in range(world_size)]
        dealt = [index for turn in zip(*shares, strict=True) for index in turn]
        left = order_of(0, length)[done:]
        assert dealt[: len(left)] == left and len(dealt) < len(left) + world_size


def test_the_selftest_passes(tmp_path):
    script = ROOT / "04_ddp_torchrun/selftest.py"
    result = train(script, 2, "--timeout=300", cwd=tmp_path)
    assert "\nOK: all checks passed on 2 ranks on " in result.output, result
    found = re.search(
        r"^all_reduce +64 MiB +(\S+) ms +(\S+) GB/s$", result.output, re.M
    )
    milliseconds, speed = map(float, found.groups())
    # a bus sends 2 (n - 1) / n times the bytes
    assert speed == pytest.approx(64 * 2**20 / 1e6 / milliseconds, abs=0.006)
