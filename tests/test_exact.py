"""Any number of processes compute what one does: here train_alone(), which uses no script."""

import re

import pytest
import torch
import torch.distributed as dist
from helpers import (SEED, STARTED, copy_project, distance, edit, exit_codes, gradients_alone,
    module, order_of, rate_factor, run_ranks, start, without_batch_norm)
from torch.utils.data import DataLoader, DistributedSampler

from common.gather import all_gather, all_gather_ragged, check_equal, gather_in_order

pytestmark = pytest.mark.usefixtures("float64")
EPOCHS = 2
GIVEN = ["--seed", SEED, "--epochs", EPOCHS]


def train_alone(net, data, *, ranks=1, batch, peak, clip, order=order_of, adam=False, drop=False,
                accumulate=1, by_progress=False):
    """Train in one process; returns loss and accuracy of each epoch as they are printed."""
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
        total = EPOCHS * len(steps)
        for number, step in enumerate(steps):
            losses += gradients_alone(net, train_set, step, ranks, batch)
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip))
            done = len(steps) * (epoch - 1) + number
            if by_progress:
                done = total * (epoch - 1 + number * size / length) / EPOCHS
            optimizer.param_groups[0]["lr"] = peak * (size / 256) ** 0.5 * rate_factor(done, total)
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
        right = [net(images).argmax(1) == labels for images, labels in DataLoader(test_set, 47)]
        net.train()
        accuracy = torch.cat(right).double().mean()
        lines.append((f"{sum(losses) / len(losses):.4f}", f"{accuracy:.4f}"))
    assert min(norms) < clip < max(norms), norms  # or clipping could hide a wrong divisor
    return lines


def compare(project, script, started, options, rounding=1e-10, **how):
    """A copied script prints and saves what train_alone() does with its network."""
    how = {"peak": 0.6, "clip": 12, **how}
    edit(project / "common/data.py", "or 181", "or 101")  # images
    result = run_ranks(script, started, *GIVEN, "--batch-size", how["batch"], *options,
                       cwd=project, CHANGE=STARTED, CLIP=how["clip"])
    torch.manual_seed(SEED)
    if script == "fsdp.py":
        net = module(project / script).VisionTransformer(16, 2)
    elif script == "tensor_parallel.py":
        net = module(project / script).Mlp()
    else:
        net = module(project / "common/model.py").ConvNet()
    lines = train_alone(net, module(project / "common/data.py"), **how)
    assert [(line["loss"], line["accuracy"]) for line in result.epochs()] == lines, result
    assert distance(project / "mnist.pt", net.state_dict()) < rounding
    return net, result


def shuffled(epoch, length, ranks, mixed=False, numbers=None):
    """As DataLoader(shuffle=True) does, from torch's own random numbers."""
    [order] = DataLoader(range(length), length, shuffle=True, generator=numbers)
    return order.tolist()


@pytest.mark.parametrize(("folder", "ranks", "batch", "started", "options"), [
    ("01_dataparallel", 1, 24, 1, []), ("02_ddp_spawn", 2, 12, 1, ["--nprocs", 2]),
    ("03_ddp_multinode_spawn", 3, 4, 2, ["-n", 2, "-g", "2,1"]),
    ("04_ddp_torchrun", 1, 24, 1, []), ("04_ddp_torchrun", 2, 12, 2, []),
    ("04_ddp_torchrun", 3, 8, 3, []), ("04_ddp_torchrun", 7, 4, 7, []),
])
def test_processes_compute_what_one_does(folder, ranks, batch, started, options, tmp_path):
    """With rank 0's BatchNorm statistics. The numbers of images are primes. 03 has two nodes."""
    project = copy_project(tmp_path / "a project", f"{folder}/train.py", small="data")
    compare(project, "train.py", started, options, ranks=ranks, batch=batch,
            order=shuffled if folder < "02" else order_of)


@pytest.mark.parametrize(("path", "started", "options"), [
    ("01_dataparallel/train.py", 1, []), ("02_ddp_spawn/train.py", 1, ["--nprocs", 2]),
    ("03_ddp_multinode_spawn/train.py", 1, ["-g", 2]), ("04_ddp_torchrun/train.py", 2, []),
    ("05_model_parallel/train.py", 1, ["--devices", "cpu,cpu"]),
    ("05_model_parallel/pipeline.py", 2, []), ("05_model_parallel/tensor_parallel.py", 2, []),
], ids="01 02 03 04 train pipeline tensor_parallel".split())
def test_weights_that_are_not_finite_are_not_saved(path, started, options, tmp_path):
    project = copy_project(tmp_path / "a project", path, small="data")
    result = run_ranks(path.split("/")[1], started, "--lr", 1e30, "--batch-size", 8, *options,
                       cwd=project, code=1, FLOAT32=1, CHANGE=STARTED)
    assert re.search("AssertionError: epoch 1/1: the loss is (nan|inf)", result.errors), result
    assert not list(project.glob("*.pt"))


def test_the_selftest_passes(tmp_path):
    project = copy_project(tmp_path / "a project", "04_ddp_torchrun/selftest.py")
    printed = run_ranks("selftest.py", 2, cwd=project).output
    assert re.search(r"^OK: all checks passed on 2 ranks on \S+$", printed, re.M), printed
    found = re.findall(r"^all_reduce +(\d+) MiB +(\S+) ms +(\S+) GB/s$", printed, re.M)
    size, milliseconds, speed = map(float, found[2])  # a bus sends 2 (n - 1) / n times the bytes
    assert speed * milliseconds == pytest.approx(size * 2**20 / 1e6, rel=0.02)


# Accumulation and model parallel: 05 and 06, without BatchNorm, so that a batch may be split


def in_one_order(epoch, length, ranks, mixed):
    """All ranks have all images, from loaders whose generators they seed alike."""
    numbers = torch.Generator().manual_seed(SEED)
    return [shuffled(epoch, length, ranks, numbers=numbers) for _ in range(epoch)][-1]


FSDP = ["--width", 16, "--depth", 2, "--lr", 0.02]
OF_FSDP = {"peak": 0.02, "clip": 0.7, "adam": True, "by_progress": True, "rounding": 1e-5}
TENSOR = {"ranks": 1, "order": in_one_order}  # rounding: float32 losses, torch 2.8's norms
PIPELINE = {**TENSOR, "drop": True}


@pytest.mark.parametrize(("path", "ranks", "batch", "options", "how"), [
    ("06_checkpointing/train.py", 2, 4, ["--accumulate", 3],
     {"accumulate": 3, "by_progress": True}),
    ("05_model_parallel/train.py", 1, 24, ["--devices", "cpu,cpu", "--chunks", 5], {}),
    ("05_model_parallel/train.py", 2, 12, ["--devices", "cpu,cpu,cpu,cpu"], {}),
    ("05_model_parallel/pipeline.py", 2, 24, ["--chunks", 4], PIPELINE),
    ("05_model_parallel/pipeline.py", 2, 24, ["--chunks", 3, "--schedule", "1f1b"], PIPELINE),
    ("05_model_parallel/tensor_parallel.py", 2, 24, [], {**TENSOR, "clip": 2, "rounding": 1e-5}),
    ("05_model_parallel/fsdp.py", 2, 4, [*FSDP, "--accumulate", 3, "--recompute"],
     {**OF_FSDP, "accumulate": 3}),
    ("05_model_parallel/fsdp.py", 4, 3, [*FSDP, "--accumulate", 2, "--shards", 2],
     {**OF_FSDP, "accumulate": 2}),
])
def test_a_divided_batch_or_model_computes_what_one_device_does(
        path, ranks, batch, options, how, tmp_path):
    """Micro-batches, stages and shards add up; fsdp.py begins with the weights of one process."""
    project = without_batch_norm(copy_project(tmp_path / "a project", path, small="data"))
    how = {"ranks": ranks, "batch": batch} | how
    net, result = compare(project, path.split("/")[1], ranks, options, **how)
    if path.endswith("fsdp.py"):
        count = sum(parameter.numel() for parameter in net.parameters())
        own = 8 * count // (options[-1] if "--shards" in options else ranks)  # in float64
        assert f"{count} parameters, {count} trained, {own} bytes on rank 0\n" in result.output


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
                    [[r, r]] * length(r) for r in range(size)]
            for length in (1, 5, 6, 7, 20):
                padded = DistributedSampler(range(length), shuffle=False)
                for shard in (list(padded), list(range(rank, length, size))):
                    rows = torch.tensor([[n, -n] for n in shard], dtype=torch.int64)
                    gathered = gather_in_order(rows.view(-1, 2), length)
                    assert gathered.tolist() == [[n, -n] for n in range(length)]
            check_equal("x", 1 + 1e-7 * rank, 1e-6)
            for given in ((1 + 1e-5 * rank, 1e-6), (1e999, 1e-6), (1e999 * 0, 1), (rank,),
                          ({"same": 1, "a": rank},), ({rank: 1},), (["layer"] * 9999 + [rank],)):
                with pytest.raises(ValueError, match="x of the ranks differ") as error:
                    check_equal("x", *given) if size > 1 else check_equal("x", 1e999, 1)
                assert "same" not in str(error.value) and len(str(error.value)) < 3000
            if rank == 0:  # no other rank takes part
                for rows in (20 // size - 1, 21):
                    with pytest.raises(ValueError, match=f"rank 0 has {rows}: use all_gather_r"):
                        gather_in_order(torch.zeros(rows), 20)
            dist.destroy_process_group()


def test_results_are_gathered_in_order_on_1_2_3_and_7_processes(tmp_path):
    """Of padded shards, as DistributedSampler has them, and of those of a range."""
    assert exit_codes(start(gather, [(rank, tmp_path) for rank in range(7)])) == [0] * 7
