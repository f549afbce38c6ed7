"""Any number of processes compute what one does: here train_alone(), which uses no script."""

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers import (SEED, accuracy_alone, bits, copy_project, distance, exit_codes,
    gradients_alone, load, module, order_of, rate_factor, run_ranks, start, without_batch_norm)
from torch.utils.data import DataLoader, DistributedSampler

from common.gather import all_gather, all_gather_ragged, gather_in_order

pytestmark = pytest.mark.usefixtures("float64")
STARTED = "tests/small/started.py"
EPOCHS = 2
GIVEN = ["--seed", SEED, "--epochs", EPOCHS]


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    """A prime number of them, which no number of processes divides."""
    monkeypatch.setenv("TRAIN_IMAGES", "113")


def train_alone(net, data, ranks=1, batch=24, *, peak, clip=12, order=order_of, adam=False,
                drop=False, accumulate=1, by_progress=False):
    """Train in one process; returns loss and accuracy of each epoch as they are printed."""
    train_set, test_set = data.load_mnist(None)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, nesterov=True)
    if adam:
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    size, length = batch * ranks * accumulate, len(train_set)
    lines, norms, steps_done = [], [], itertools.count()
    for epoch in range(1, EPOCHS + 1):
        indices, losses = order(epoch, length, ranks), []
        steps = [indices[n : n + size] for n in range(0, len(indices), size)]
        steps = [step for step in steps if len(step) == size or not drop]
        total = EPOCHS * len(steps)
        for number, step in enumerate(steps):
            losses += gradients_alone(net, train_set, step, ranks, batch)
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip))
            done = next(steps_done)
            if by_progress:
                done = total * (epoch - 1 + number * size / length) / EPOCHS
            rate = peak * (size / 256) ** 0.5 * rate_factor(done, total)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        accuracy = accuracy_alone(net, test_set)
        lines.append((f"{sum(losses) / len(losses):.4f}", f"{accuracy:.4f}"))
    assert min(norms) < clip < max(norms), norms  # or clipping could hide a wrong divisor
    assert float(lines[0][0]) > float(lines[-1][0]), lines  # it has learned
    return lines


def check(result, lines, weights, expected, rounding=1e-10):
    assert [(line["loss"], line["accuracy"]) for line in result.epochs()] == lines, result
    assert distance(weights, expected) < rounding


# Data parallel: 01 to 04, with BatchNorm


def shuffled(epoch, length, ranks):
    """As DataLoader(shuffle=True) does, from torch's own random numbers."""
    return torch.cat(list(DataLoader(range(length), length, shuffle=True))).tolist()


@pytest.mark.parametrize(("folder", "ranks", "batch", "started", "options"), [
    ("01_dataparallel", 1, 24, 1, []), ("02_ddp_spawn", 2, 12, 1, ["--nprocs", 2]),
    ("03_ddp_multinode_spawn", 3, 4, 2, ["-n", 2, "-g", "2,1"]),
    ("04_ddp_torchrun", 1, 24, 1, []), ("04_ddp_torchrun", 2, 12, 2, []),
    ("04_ddp_torchrun", 3, 8, 3, []), ("04_ddp_torchrun", 7, 4, 7, []),
], ids=["01", "02", "03", "04 on 1", "04 on 2", "04 on 3", "04 on 7"])
def test_processes_compute_what_one_does(folder, ranks, batch, started, options, tmp_path):
    """With the BatchNorm statistics of rank 0. 03 has two nodes, the first with two processes.

    No number of processes but 1 divides the number of images, also of those to test.
    """
    project = copy_project(tmp_path / "a project", f"{folder}/train.py", STARTED, small="data")
    result = run_ranks("started.py", started, *GIVEN, "--batch-size", batch, *options, cwd=project,
                       SCRIPT="train", CLIP=12)
    torch.manual_seed(SEED)
    net = module(project / "common/model.py").ConvNet()
    lines = train_alone(net, module(project / "common/data.py"), ranks, batch, peak=0.6,
                        order=shuffled if ranks == 1 and folder < "02" else order_of)
    check(result, lines, project / "mnist.pt", net.state_dict())


# Accumulation and model parallel: 05 and 06, without BatchNorm, so that a batch may be split


def in_one_order():
    """All ranks have all images, from loaders whose generators they seed alike."""
    generator = torch.Generator().manual_seed(SEED)
    return lambda epoch, length, ranks: torch.cat(list(
        DataLoader(range(length), length, shuffle=True, generator=generator))).tolist()


FSDP = ["--width", 16, "--depth", 2, "--lr", 0.02]
OF_FSDP = {"peak": 0.02, "clip": 0.7, "adam": True, "by_progress": True}
TENSOR = {"peak": 0.6, "order": in_one_order, "batch": 24}
PIPELINE = {**TENSOR, "drop": True}


@pytest.mark.parametrize(("path", "ranks", "batch", "options", "how"), [
    ("06_checkpointing/train.py", 2, 4, ["--accumulate", 3],
     {"peak": 0.6, "accumulate": 3, "by_progress": True}),
    ("05_model_parallel/train.py", 1, 24, ["--devices", "cpu,cpu", "--chunks", 5], {"peak": 0.6}),
    ("05_model_parallel/train.py", 2, 12, ["--devices", "cpu,cpu,cpu,cpu"], {"peak": 0.6}),
    ("05_model_parallel/pipeline.py", 2, 24, ["--chunks", 4], PIPELINE),
    ("05_model_parallel/pipeline.py", 2, 24, ["--chunks", 3, "--schedule", "1f1b"], PIPELINE),
    ("05_model_parallel/tensor_parallel.py", 2, 24, [], {**TENSOR, "clip": 2}),
    ("05_model_parallel/fsdp.py", 2, 4, [*FSDP, "--accumulate", 3, "--recompute"],
     {**OF_FSDP, "accumulate": 3}),
    ("05_model_parallel/fsdp.py", 2, 12, [*FSDP, "--shards", 1], OF_FSDP),
    ("05_model_parallel/fsdp.py", 4, 3, [*FSDP, "--accumulate", 2, "--shards", 2],
     {**OF_FSDP, "accumulate": 2}),
], ids=["06", "05 two devices", "05 two copies", "pipeline gpipe", "pipeline 1f1b",
        "tensor_parallel", "fsdp", "fsdp copies", "fsdp hsdp"])
def test_a_divided_batch_or_model_computes_what_one_device_does(
        path, ranks, batch, options, how, tmp_path):
    """Micro-batches, stages and shards add up; fsdp.py begins with the weights of one process."""
    script = path.split("/")[1]
    project = without_batch_norm(copy_project(tmp_path / "a project", path, STARTED, small="data"))
    result = run_ranks("started.py", ranks, *GIVEN, "--batch-size", batch, *options, cwd=project,
                       SCRIPT=script.removesuffix(".py"), CLIP=how.get("clip", 12))
    torch.manual_seed(SEED)
    if script == "fsdp.py":
        net = module(project / script).VisionTransformer(16, 2)
    elif script == "tensor_parallel.py":
        net = module(project / script).Mlp()
    else:
        net = module(project / "common/model.py").ConvNet()
    how = {"ranks": ranks, "batch": batch} | how
    if "order" in how:
        how |= {"ranks": 1, "order": how["order"]()}
    lines = train_alone(net, module(project / "common/data.py"), **how)
    check(result, lines, project / "mnist.pt", net.state_dict(),
          1e-10 if script in ("train.py", "pipeline.py") else 1e-5)  # float32 losses; 2.8's norms


# fsdp.py: what its model may be

@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (4, 4), (4, 2)])
def test_fsdp_begins_with_the_weights_of_one_process(ranks, shards, tmp_path):
    """Bit for bit: at a rate of 0 they stay as they are."""
    project = copy_project(tmp_path / "a project", "05_model_parallel/fsdp.py", small="data")
    options = ["--lr", 0, "--epochs", 1, "--seed", SEED, "--batch-size", 60, "--shards", shards]
    result = run_ranks("fsdp.py", ranks, *options, cwd=project)
    torch.manual_seed(SEED)
    model = module(project / "fsdp.py").VisionTransformer(64, 3)
    count = sum(parameter.numel() for parameter in model.parameters())
    line = f"\n{count} parameters, {count} trained, {8 * count // 2} bytes on rank 0\n"
    assert line in f"\n{result.output}" or shards > 2, result
    assert bits(load(project / "mnist.pt")) == bits(dict(model.state_dict()))


# The helpers of common/gather.py


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
            if rank == 0:  # no other rank takes part
                for rows in (20 // size - 1, 21):
                    with pytest.raises(ValueError, match=f"rank 0 has {rows}: use all_gather_r"):
                        gather_in_order(torch.zeros(rows), 20)
            dist.destroy_process_group()


def test_results_are_gathered_in_order_on_1_2_3_and_7_processes(tmp_path):
    """Of padded shards, as DistributedSampler has them, and of those of a range."""
    assert exit_codes(start(gather, [(rank, tmp_path) for rank in range(7)])) == [0] * 7
