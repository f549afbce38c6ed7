"""Any number of processes compute what one does: train_alone(), without a script."""

import itertools
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import (
    ROOT,
    SEED,
    Running,
    copy_project,
    distance,
    each_row,
    free_port,
    module,
    order_of,
    torchrun,
    train,
    without_batch_norm,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from common.checks import check_equal
from common.gather import all_gather, gather_in_order

EPOCHS, IMAGES = 2, 101


def by_loader(epoch, length, ranks):
    [order] = DataLoader(range(length), length, shuffle=True)
    return order.tolist()


def by_seeded_loader(epoch, length, ranks):
    torch.manual_seed(SEED + epoch)
    return by_loader(epoch, length, ranks)


def train_alone(
    model,
    data,
    ranks,
    batch,
    order=order_of,
    peak=0.03,
    clip=torch.inf,
    by_images=False,
    drop=False,
):
    """Train in one process; returns each epoch's loss and accuracy as it is printed.

    by_images: the rate follows the images, and not the steps. drop: the last images.
    """
    train_set, test_set = data.load_mnist()
    size = ranks * batch
    peak *= (size / 256) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)
    lines, norms = [], []
    for epoch in range(EPOCHS):
        model.train()
        steps = torch.tensor(order(epoch + 1, IMAGES, ranks)).split(size)
        steps = steps[:-1] if drop else steps
        total = 0
        for number, step in enumerate(steps):
            optimizer.zero_grad()
            for rank in range(ranks):
                buffers = {}
                if (
                    rank > 0
                ):  # copies, because BatchNorm's statistics are those of rank 0
                    buffers = {
                        name: each.clone() for name, each in model.named_buffers()
                    }
                images, labels = [each[step[rank::ranks]] for each in train_set.tensors]
                logits = torch.func.functional_call(model, buffers, images)
                loss = criterion(logits, labels)
                (loss / len(step)).backward()
                total += loss.item()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            middle = (number + 0.5) / len(steps)  # of this step in the epoch
            if by_images:
                ends = [min(n * size, IMAGES) for n in (number, number + 1)]
                middle = sum(ends) / 2 / IMAGES
            fraction = (epoch + middle) / EPOCHS
            factor = fraction / 0.4 if fraction < 0.4 else (1 - fraction) / 0.6
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
        model.eval()
        [(images, labels)] = DataLoader(test_set, len(test_set))
        accuracy = (model(images).argmax(1) == labels).double().mean()
        lines.append((f"{total / sum(map(len, steps)):.4f}", f"{accuracy:.4f}"))
    # or clipping all gradients, or none, would be no error
    assert clip == torch.inf or min(norms) < clip < max(norms), norms
    return lines


FSDP = {"peak": 0.006, "clip": 1}
SAME_BATCH = {"ranks": 1, "order": by_seeded_loader}  # on all ranks
HOW = {
    "01_dataparallel/train.py": {"order": by_loader},
    "05_model_parallel/pipeline.py": {**SAME_BATCH, "drop": True},
    "05_model_parallel/tensor_parallel.py": SAME_BATCH,
    "05_model_parallel/fsdp.py": FSDP,
    "06_checkpointing/train.py": {"by_images": True},
    "07_slurm/fsdp.py": {**FSDP, "by_images": True},
}
# script | processes | --batch-size | options
WAYS = """
01_dataparallel/train.py | 1 | 24 |
02_ddp_spawn/train.py | 2 | 12 | --nprocs 2
03_ddp_multinode_spawn/train.py | 3 | 8 | -n 2 -g 1,2 --master-port PORT -i
04_ddp_torchrun/train.py | 1 | 24 |
04_ddp_torchrun/train.py | 3 | 8 |
05_model_parallel/train.py | 2 | 12 | --devices cpu,cpu,cpu,cpu --chunks 5
05_model_parallel/pipeline.py | 2 | 24 | --chunks 4
05_model_parallel/pipeline.py | 3 | 24 | --chunks 3 --schedule 1f1b
05_model_parallel/tensor_parallel.py | 2 | 24 |
05_model_parallel/fsdp.py | 2 | 8 | --width 16 --depth 2 --recompute
06_checkpointing/train.py | 2 | 12 |
07_slurm/fsdp.py | 4 | 4 | --width 16 --depth 2 --shards 2
"""


@each_row(WAYS)
def test_processes_compute_what_one_does(row, tmp_path, float64, monkeypatch):
    """It is printed, and saved. Without BatchNorm where a batch is split."""
    monkeypatch.setenv("TRAIN_IMAGES", f"{IMAGES}")
    path, ranks, batch, options = row
    script = path.split("/")[1]
    project = copy_project(tmp_path / "a project", path, small="data")
    if path[:2] == "05":
        without_batch_norm(project)
    options = f"--seed {SEED} --epochs {EPOCHS} --batch-size {batch} {options}"
    options = options.replace("PORT", f"{free_port()}").split()
    commands = [torchrun(script, ranks, *options)]
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
    lines = train_alone(model, module(project / "common/data.py"), **how)
    losses = re.findall(r"  loss (\d\.\d{4})", result.output)
    accuracies = [line["accuracy"] for line in result.epochs()]
    assert [*zip(losses, accuracies, strict=True)] == lines, result
    # 1e-14, but for biases before BatchNorm, whose gradients are nothing but rounding
    assert distance(project / "mnist.pt", model.state_dict()) < 1e-8


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
    result = train(ROOT / "04_ddp_torchrun/selftest.py", 2, cwd=tmp_path)
    assert "\nOK: all checks passed on 2 ranks on " in result.output, result
    found = re.search(
        r"^all_reduce +64 MiB +(\S+) ms +(\S+) GB/s$", result.output, re.M
    )
    milliseconds, speed = map(float, found.groups())
    # a bus sends 2 (n - 1) / n times the bytes
    assert speed == pytest.approx(64 * 2**20 / 1e6 / milliseconds, abs=0.006)


def gather(rank, folder):
    """What each process of the next test does, in groups of 1, 2, 3 and 5 of them."""
    for size in (1, 2, 3, 5):
        if rank < size:
            dist.init_process_group("gloo", f"file://{folder}/{size}", None, size, rank)
            columns = torch.arange(2 * size).view(2, size).t()  # not contiguous
            assert torch.equal(all_gather(columns[rank]), columns)
            for length in (1, 5, 6, 7, 20):
                shard = DistributedSampler(range(length), shuffle=False)
                rows = torch.tensor([[n, -n] for n in shard])
                gathered = gather_in_order(rows, length)
                assert gathered.tolist() == [[n, -n] for n in range(length)]
            check_equal(text="a", pair=(1, 2), nothing=None)
            if size > 1:
                with pytest.raises(ValueError, match="^x differs between the ranks: "):
                    check_equal(y=1, x=rank == 1, z="same")
            if rank == 0:  # no other rank takes part
                with pytest.raises(ValueError, match="^19 rows on this rank, not 20$"):
                    gather_in_order(torch.zeros(19), 20 * size)
            dist.destroy_process_group()


def test_results_are_gathered_in_order_on_1_2_3_and_5_processes(tmp_path):
    """And a value that differs is named on all of them."""
    train(__file__, 5, tmp_path, cwd=tmp_path, PYTHONPATH=ROOT)


if __name__ == "__main__":
    gather(int(os.environ["RANK"]), sys.argv[1])
