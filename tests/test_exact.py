"""Any number of processes compute what one does: train_alone(), without a script."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from faults import GroupNorm
from helpers import (
    ROOT,
    SEED,
    Running,
    check_close,
    copy_project,
    each_row,
    free_port,
    module,
    order_of,
    torchrun,
    train,
)
from torch import nn
from torch.utils.data import DataLoader

IMAGES = 101


def by_loader(epoch, length, ranks):
    [order] = DataLoader(range(length), length, shuffle=True)
    return order.tolist()


def by_seeded_loader(epoch, length, ranks):
    torch.manual_seed(SEED + epoch)
    return by_loader(epoch, length, ranks)


SAME_BATCH = {"ranks": 1, "order": by_seeded_loader}  # on all ranks
HOW = {
    "01_dataparallel/train.py": {"order": by_loader},
    "05_model_parallel/pipeline.py": {**SAME_BATCH, "drop": IMAGES % 24},
    "05_model_parallel/tensor_parallel.py": SAME_BATCH,
    "05_model_parallel/fsdp.py": {"peak": 0.006, "clip": 1},
    "06_checkpointing/train.py": {"length": IMAGES},
    "07_slurm/fsdp.py": {"peak": 0.006, "clip": 1, "length": IMAGES},
}
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


def train_alone(
    model,
    data,
    ranks,
    batch,
    order=order_of,
    peak=0.03,
    clip=torch.inf,
    length=None,
    drop=0,
):
    """Train in one process; yields each epoch's loss and accuracy, as they are printed.

    drop: the last images. length: the rate follows the images, and not the steps.
    """
    train_set, test_set = data.load_mnist()
    images, labels = train_set.tensors
    size, count = ranks * batch, IMAGES + -IMAGES % ranks - drop
    peak *= (size / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)
    norms = []
    for epoch in range(2):
        model.train()
        steps = torch.tensor(order(epoch + 1, IMAGES, ranks)[:count]).split(size)
        total = 0
        for number, step in enumerate(steps):
            optimizer.zero_grad()
            for rank in range(ranks):
                # copies, because BatchNorm's statistics are those of rank 0
                buffers = {name: each.clone() for name, each in model.named_buffers()}
                shard = step[rank::ranks]
                given = (buffers if rank else {}), images[shard]
                loss = criterion(
                    torch.func.functional_call(model, *given), labels[shard]
                )
                (loss / len(step)).backward()
                total += loss.item()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            middle = (number + 0.5) / len(steps)
            if length:
                middle = (number * size + min((number + 1) * size, length)) / 2 / length
            fraction = (epoch + middle) / 2
            factor = min(fraction / 0.4, (1 - fraction) / 0.6)
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
        model.eval()
        [(test_images, test_labels)] = DataLoader(test_set, len(test_set))
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean()
        yield f"{total / count:.4f}", f"{accuracy:.4f}"
    # or clipping all gradients, or none, would be no error
    assert clip == torch.inf or min(norms) < clip < max(norms), norms


@each_row(WAYS, slow=MORE)
def test_processes_compute_what_one_does(row, tmp_path, float64, monkeypatch):
    """It is printed, and saved. Without BatchNorm where a batch is split."""
    monkeypatch.setenv("TRAIN_IMAGES", f"{IMAGES}")
    path, ranks, batch, options = row
    script = path.split("/")[1]
    project = copy_project(tmp_path / "a project", path, small=True)
    fault = None
    if path[:2] == "05":
        monkeypatch.setattr(nn, "BatchNorm2d", GroupNorm)
        fault = "group_norm"
    options = f"--seed {SEED} --epochs 2 --batch-size {batch} {options}"
    options = options.replace("PORT", f"{free_port()}").split()
    commands = [torchrun(script, ranks, *options, fault=fault)]
    if path < "04":
        commands = [["python", script, *options]]
    if options[-1] == "-i":
        commands = [[*commands[0], node] for node in range(2)]
    started = [Running(command, project, OMP_NUM_THREADS=1) for command in commands]
    result, *others = [each.finish() for each in started]
    assert not any(each.code for each in (result, *others)), (result, others)
    torch.manual_seed(SEED)
    models = module(project / "common/model.py")
    if script == "fsdp.py":
        model = models.VisionTransformer(16, 2)
    elif script == "tensor_parallel.py":
        model = module(project / script).Mlp(512)
    else:
        model = models.ConvNet()
    how = {"ranks": int(ranks), "batch": int(batch), **HOW.get(path, {})}
    expected = [*train_alone(model, module(project / "common/data.py"), **how)]
    losses, accuracies = [
        re.findall(rf"  {what} (\d\.\d{{4}})", result.output)
        for what in ("loss", "accuracy")
    ]
    assert [*zip(losses, accuracies, strict=True)] == expected, result
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
    ranks = SimpleNamespace()
    names = {"torch": torch, "dist": ranks}
    exec(source[0], names)
    for length, world_size, done in itertools.product((1, 3, 10), (1, 2, 8), (0, 1, 9)):
        if done < length:
            ranks.get_world_size = lambda size=world_size: size
            shares = []
            for rank in range(world_size):
                ranks.get_rank = lambda rank=rank: rank
                shares.append(names["rest_of_epoch"](length, SEED, done))
            assert len({len(share) for share in shares}) == 1
            dealt = [index for turn in zip(*shares, strict=True) for index in turn]
            left = order_of(0, length, 1)[done:]
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
