"""Any number of processes compute what one does: train_alone(), without a script."""

import re

import pytest
import torch
import torch.distributed as dist
from helpers import (
    ROOT,
    SEED,
    copy_project,
    distance,
    each_row,
    edit,
    exit_codes,
    free_port,
    gradients_alone,
    module,
    order_of,
    rate_factor,
    run,
    run_ranks,
    start,
    without_batch_norm,
)
from torch.utils.data import DataLoader, DistributedSampler

from common.gather import all_gather, all_gather_ragged, check_equal, gather_in_order

pytestmark = pytest.mark.usefixtures("float64")
EPOCHS = 2
GIVEN = ["--seed", SEED, "--epochs", EPOCHS]


def train_alone(
    net,
    data,
    *,
    ranks=1,
    batch,
    peak,
    clip,
    order=order_of,
    adam=False,
    drop=False,
    accumulate=1,
    by_progress=False,
):
    """Train in one process; returns each epoch's loss and accuracy as it is printed."""
    train_set, test_set = data.load_mnist(None)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, nesterov=True)
    if adam:
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    size, length = batch * ranks * accumulate, len(train_set)
    lines, norms = [], []
    for epoch in range(1, EPOCHS + 1):
        indices, losses = order(epoch, length, ranks, mixed=by_progress), []
        steps = [indices[n : n + size] for n in range(0, len(indices), size)]
        steps = [step for step in steps if len(step) == size or not drop]
        for number, step in enumerate(steps):
            losses += gradients_alone(net, train_set, step, ranks, batch)
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip))
            middle = (number + 0.5) / len(steps)  # of the step, as a part of the epoch
            if by_progress:
                ends = [min(n * size, length) for n in (number, number + 1)]
                middle = sum(ends) / 2 / length
            factor = rate_factor((epoch - 1 + middle) / EPOCHS)
            optimizer.param_groups[0]["lr"] = peak * (size / 256) ** 0.5 * factor
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
        right = [
            net(images).argmax(1) == labels
            for images, labels in DataLoader(test_set, 47)
        ]
        net.train()
        accuracy = torch.cat(right).double().mean()
        lines.append((f"{sum(losses) / len(losses):.4f}", f"{accuracy:.4f}"))
    # or clipping could hide a wrong divisor
    assert min(norms) < clip < max(norms), norms
    return lines


def compare(project, script, started, options, rounding=1e-10, **how):
    """A copied script prints and saves what train_alone() does with its network."""
    how = {"peak": 0.6, "clip": 12, **how}
    edit(project / "common/data.py", "or 181", "or 101")  # images
    options = [*GIVEN, "--batch-size", how["batch"], *options]
    given = {"cwd": project, "CHANGES": "started", "CLIP": how["clip"]}
    result = run_ranks(script, started, *options, **given)
    torch.manual_seed(SEED)
    if script == "fsdp.py":
        net = module(project / script).VisionTransformer(16, 2)
    elif script == "tensor_parallel.py":
        net = module(project / script).Mlp()
    else:
        net = module(project / "common/model.py").ConvNet()
    lines = train_alone(net, module(project / "common/data.py"), **how)
    printed = [(line["loss"], line["accuracy"]) for line in result.epochs()]
    assert printed == lines, result
    assert distance(project / "mnist.pt", net.state_dict()) < rounding
    return net, result


def shuffled(epoch, length, ranks, mixed=False, numbers=None):
    """As DataLoader(shuffle=True) does, from torch's own random numbers."""
    [order] = DataLoader(range(length), length, shuffle=True, generator=numbers)
    return order.tolist()


# folder | ranks | images of each per step | processes that the test starts | options
WAYS = """
01_dataparallel | 1 | 24 | 1 |
02_ddp_spawn | 2 | 12 | 1 | --nprocs 2
03_ddp_multinode_spawn | 3 | 4 | 2 | -n 2 -g 2,1
04_ddp_torchrun | 1 | 24 | 1 |
04_ddp_torchrun | 2 | 12 | 2 |
04_ddp_torchrun | 3 | 8 | 3 |
04_ddp_torchrun | 7 | 4 | 7 |
"""


@each_row(WAYS)
def test_processes_compute_what_one_does(row, tmp_path):
    """With rank 0's BatchNorm statistics; the numbers of images are primes."""
    folder, ranks, batch, started, options = row
    project = copy_project(tmp_path / "a project", f"{folder}/train.py", small="data")
    how = {"ranks": int(ranks), "batch": int(batch)}
    if folder < "02":
        how["order"] = shuffled
    compare(project, "train.py", int(started), options.split(), **how)


@pytest.mark.parametrize("steps", [1, 2, 5, 7, 181])
def test_the_rate_is_above_0_in_each_step_and_never_above_its_peak(steps):
    """Also with one step; a step too many, in a copy, has a rate of 0."""
    factor = module(ROOT / "04_ddp_torchrun/train.py").warmup_then_decay
    middles = [(n + 0.5) / steps for n in range(steps)]
    found = [factor(middle) for middle in middles]
    assert found == pytest.approx([rate_factor(middle) for middle in middles])
    assert 0 < min(found) and max(found) <= 1 and factor(1 + 0.5 / steps) == 0


# script | processes that the test starts | options | error
NOT_SAVED = """
01_dataparallel/train.py | 1 | | epoch 1/1: the loss is
02_ddp_spawn/train.py | 1 | --nprocs 2 | epoch 1/1: the loss is
03_ddp_multinode_spawn/train.py | 1 | -g 2 | epoch 1/1: the loss is
04_ddp_torchrun/train.py | 2 | | epoch 1/1: the loss is
05_model_parallel/train.py | 1 | --devices cpu,cpu | epoch 1/1: the loss is
05_model_parallel/pipeline.py | 2 | | epoch 1/1: the loss is
05_model_parallel/pipeline.py | 2 | --batch-size 184 | --batch-size is larger than the
05_model_parallel/tensor_parallel.py | 2 | | epoch 1/1: the loss is
"""


@each_row(NOT_SAVED)
def test_weights_that_are_not_finite_or_not_trained_are_not_saved(row, tmp_path):
    path, started, options, error = row
    project = copy_project(tmp_path / "a project", path, small="data")
    options = ["--lr", 1e30, "--batch-size", 8, *options.split()]
    given = {"cwd": project, "code": 1, "FLOAT32": 1, "CHANGES": "started"}
    result = run_ranks(path.split("/")[1], int(started), *options, **given)
    assert re.search(f"ValueError: {error} (nan|inf|181 images)", result.errors), result
    assert not list(project.glob("*.pt"))


def test_04_checks_the_loss_without_asserts_as_well(tmp_path):
    """`python -O` leaves them out."""
    project = copy_project(tmp_path, "04_ddp_torchrun/train.py", small="data")
    command = ["python", "-O", "train.py", "--lr", 1e30, "--batch-size", 8]
    launch = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    result = run(command, project, MASTER_PORT=free_port(), FLOAT32=1, **launch)
    assert "ValueError: epoch 1/1: the loss is" in result.errors, result
    assert not list(project.glob("*.pt"))


def test_the_selftest_passes(tmp_path):
    project = copy_project(tmp_path / "a project", "04_ddp_torchrun/selftest.py")
    printed = run_ranks("selftest.py", 2, cwd=project).output
    passed = r"^OK: all checks passed on 2 ranks on \S+$"
    assert re.search(passed, printed, re.M), printed
    found = re.findall(r"^all_reduce +(\d+) MiB +(\S+) ms +(\S+) GB/s$", printed, re.M)
    # a bus sends 2 (n - 1) / n times the bytes
    size, milliseconds, speed = map(float, found[2])
    assert speed * milliseconds == pytest.approx(size * 2**20 / 1e6, rel=0.02)


# Accumulation and model parallel: 05 and 06, without BatchNorm, to split batches


def in_one_order(epoch, length, ranks, mixed):
    """All ranks have all images, from loaders whose generators they seed alike."""
    numbers = torch.Generator().manual_seed(SEED)
    return [shuffled(epoch, length, ranks, numbers=numbers) for _ in range(epoch)][-1]


# rounding: losses in float32, and torch 2.8's norms
TENSOR = {"ranks": 1, "order": in_one_order}
HOW = {
    "06_checkpointing/train": {"by_progress": True},
    "05_model_parallel/train": {},
    "05_model_parallel/pipeline": {**TENSOR, "drop": True},
    "05_model_parallel/tensor_parallel": {**TENSOR, "clip": 2, "rounding": 1e-5},
    "05_model_parallel/fsdp": {
        "by_progress": True,
        "peak": 0.02,
        "clip": 0.7,
        "adam": True,
        "rounding": 1e-5,
    },
}
# script | ranks | images of a micro-batch | micro-batches per step | options
DIVIDED = """
06_checkpointing/train | 2 | 4 | 3 | --accumulate 3
05_model_parallel/train | 1 | 24 | 1 | --devices cpu,cpu --chunks 5
05_model_parallel/train | 2 | 12 | 1 | --devices cpu,cpu,cpu,cpu
05_model_parallel/pipeline | 2 | 24 | 1 | --chunks 4
05_model_parallel/pipeline | 2 | 24 | 1 | --chunks 3 --schedule 1f1b
05_model_parallel/tensor_parallel | 2 | 24 | 1 |
05_model_parallel/fsdp | 2 | 4 | 3 | --accumulate 3 --recompute
05_model_parallel/fsdp | 4 | 3 | 2 | --accumulate 2 --shards 2
"""


@each_row(DIVIDED)
def test_a_divided_batch_or_model_computes_what_one_device_does(row, tmp_path):
    """Micro-batches, stages and shards add up; fsdp.py begins with rank 0's weights."""
    script, ranks, batch, accumulate, options = row
    project = copy_project(tmp_path / "a project", f"{script}.py", small="data")
    without_batch_norm(project)
    numbers = {"batch": int(batch), "accumulate": int(accumulate)}
    how = {"ranks": int(ranks), **numbers, **HOW[script]}
    name = script.split("/")[1]
    if name == "fsdp":
        options += " --width 16 --depth 2 --lr 0.02"
    net, result = compare(project, f"{name}.py", int(ranks), options.split(), **how)
    if name == "fsdp":
        count = sum(parameter.numel() for parameter in net.parameters())
        own = 8 * count // 2  # in float64, on two shards
        line = f"{count} parameters, {count} trained, {own} bytes on rank 0\n"
        assert line in result.output


def differences(rank):
    """Arguments of check_equal in which only x differs between the ranks."""
    yield {"x": 1 + 1e-5 * rank, "y": 1, "tolerance": 1e-6}
    yield {"y": 2, "x": 1e999, "tolerance": 1e-6}  # infinite
    yield {"x": 1e999 * 0, "tolerance": 1}  # not a number
    yield {"y": (3,), "x": rank}
    yield {"x": {rank: 1}, "y": "same"}
    yield {"x": rank * ["layer"] * 9999}
    yield {"y": 1} | ({"x": None} if rank == 0 else {})  # the others have none
    yield {"y": 1} | ({"x": None} if rank > 0 else {})


def check_rejects(given, size):
    """check_equal must name x on all ranks, and show a value of each."""
    if size == 1:
        given = {"x": 1e999, "tolerance": 1}
    with pytest.raises(ValueError, match="^x differs between the ranks, or") as error:
        check_equal(**given)
    assert "y" not in str(error.value).split("[")[0] and len(str(error.value)) < 3000


def gather(rank, folder):
    """In groups of 1, 2, 3 and 7 of the processes."""
    torch.set_num_threads(1)
    for size in (1, 2, 3, 7):
        if rank < size:
            dist.init_process_group("gloo", f"file://{folder}/{size}", None, size, rank)
            columns = torch.arange(2 * size).view(2, size).t()  # not contiguous
            assert torch.equal(all_gather(columns[rank]), columns)
            for length in (lambda r: r, lambda r: 3 * (r == 1), lambda r: 0):
                parts = all_gather_ragged(torch.full((length(rank), 2), rank))
                assert [each.tolist() for each in parts] == [
                    [[r, r]] * length(r) for r in range(size)
                ]
            for length in (1, 5, 6, 7, 20):
                padded = DistributedSampler(range(length), shuffle=False)
                for shard in (list(padded), list(range(rank, length, size))):
                    rows = torch.tensor([[n, -n] for n in shard], dtype=torch.int64)
                    gathered = gather_in_order(rows.view(-1, 2), length)
                    assert gathered.tolist() == [[n, -n] for n in range(length)]
            check_equal(x=1 + 1e-7 * rank, y=1, tolerance=1e-6)
            check_equal(text="a", pair=(1, 2), nothing=None)
            for given in differences(rank):
                check_rejects(given, size)
            if rank == 0:  # no other rank takes part
                for rows in (20 // size - 1, 21):
                    with pytest.raises(
                        ValueError, match=f"rank 0 has {rows}: use all_gather_r"
                    ):
                        gather_in_order(torch.zeros(rows), 20)
            dist.destroy_process_group()


def test_results_are_gathered_in_order_on_1_2_3_and_7_processes(tmp_path):
    """Of padded shards, as DistributedSampler has them, and of those of a range."""
    assert exit_codes(start(gather, [(rank, tmp_path) for rank in range(7)])) == [0] * 7
