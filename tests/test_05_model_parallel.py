"""05: four ways to split a model, each against the same training on one device."""

import shutil

import pytest
import torch
from helpers import (
    DIGITS,
    ROOT,
    bare_accuracy,
    clip_at,
    copy_project,
    distance,
    edit,
    fewer_digits,
    load_script,
    parse,
    rejected,
    run_ranks,
    without_batch_norm,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

FOLDER = ROOT / "05_model_parallel"
SCRIPTS = ("train.py", "pipeline.py", "tensor_parallel.py", "fsdp.py")


def launch(script, *options):
    """Both ranks have batches of 30 images, or one of 60, and so 21 steps per epoch."""
    settings = {"SCRIPT": script, "NPROC": "2"}
    mark = pytest.mark.launch("05_model_parallel", "--epochs", 2, *options, **settings)
    return pytest.param(script, marks=mark, id=script)


@pytest.mark.parametrize("script", [
    launch("train.py", "--batch-size", 30, "--chunks", 3),
    launch("pipeline.py", "--batch-size", 60, "--chunks", 3),
    launch("tensor_parallel.py", "--batch-size", 60),
    launch("fsdp.py", "--batch-size", 30),
])
def test_trains_evaluates_and_saves(script, launched):
    accuracy_of = mlp_accuracy if script == "tensor_parallel.py" else bare_accuracy
    ranks = 2 if script in ("train.py", "fsdp.py") else 1  # whose shares of the loss are summed
    result = launched.check(epochs=2, ranks=ranks, at_least=0.5, accuracy_of=accuracy_of)
    assert result.errors == "", result
    if script == "fsdp.py":  # 29,034 parameters of 4 bytes, on two ranks
        shards = "bytes of parameters per rank: [58068, 58068]; epochs done: 0"
        assert result.output.splitlines()[0] == shards
    if script == "pipeline.py":  # no trial run counts in BatchNorm's statistics
        state = torch.load(launched.place / "mnist.pt", weights_only=True)
        counts = [state[f"layer{n}.1.num_batches_tracked"] for n in (1, 2)]
        assert counts == [2 * 21 * 3] * 2  # micro-batches


def mlp_accuracy(weights):
    from common.data import load_mnist

    model = load_script(FOLDER / "tensor_parallel.py").Mlp()
    model.load_state_dict(torch.load(weights, weights_only=True))
    images, labels = load_mnist(DIGITS)[1].tensors
    return (model(images).argmax(1) == labels).double().mean().item()


# The same steps as on one device: in float64, and without BatchNorm, so that a batch may be split


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A copy whose batches may be split, and in which only the larger gradients are clipped."""
    exact = copy_project(tmp_path_factory.mktemp("exact") / "0", FOLDER / "train.py", *SCRIPTS[1:])
    shutil.copy(ROOT / "04_ddp_torchrun/train.py", exact / "one_device.py")
    fewer_digits(exact, now=140, digits=60)
    without_batch_norm(exact)
    clip_at(exact, 10.0, "one_device.py", *SCRIPTS)
    order = "shuffle=True, generator=generator"
    same_order = "sampler=torch.utils.data.DistributedSampler(train_set, 1, 0, seed=args.seed + 1)"
    for script in ("pipeline.py", "tensor_parallel.py"):
        edit(exact, script, (order, same_order))
    return exact


def trained(project, script, nproc, *options, epochs=1):
    """The losses and the weights of a run."""
    options = ["--epochs", epochs, "--lr", 0.05, "--data-dir", "common", *options]
    options = [*options, "--output", f"{script}.pt"]
    result = run_ranks(script, nproc, *options, cwd=project)
    assert result.code == 0, result
    return [line["loss"] for line in result.epochs()], project / f"{script}.pt"


@pytest.fixture(scope="module")
def one_device(exact):
    """The losses and weights of 04 in one process: 6 steps with batches of 90."""
    return trained(exact, "one_device.py", 1, "--batch-size", 90)


is_2_6 = torch.__version__.startswith("2.6.")


@pytest.mark.parametrize(("script", "nproc", "options"), [
    ("train.py", 1, ["--batch-size", 90, "--chunks", 3]),
    ("train.py", 2, ["--batch-size", 45, "--chunks", 5]),
    ("pipeline.py", 2, ["--batch-size", 90, "--chunks", 3]),
    pytest.param(
        *("pipeline.py", 2, ["--batch-size", 90, "--chunks", 6, "--schedule", "1f1b"]),
        marks=pytest.mark.skipif(is_2_6, reason="torch 2.6.0 hangs with 1f1b on the CPU"),
    ),
    ("fsdp.py", 2, ["--batch-size", 45]),
])
def test_takes_the_steps_of_one_device(script, nproc, options, exact, one_device):
    if is_2_6 and script == "fsdp.py":  # a defect of torch 2.6.0 on the CPU
        defect = "AttributeError: 'Stream' object has no attribute 'record_event'"
        with pytest.raises(AssertionError, match=defect):
            trained(exact, script, nproc, *options)
        return
    losses, weights = trained(exact, script, nproc, *options)
    assert losses == one_device[0]
    assert distance(weights, one_device[1]) < 1e-12


def test_split_linear_layers_take_the_steps_of_whole_ones(exact):
    one = shutil.copytree(exact, exact.parent / "one")
    mlp = (one / "tensor_parallel.py").read_text()
    mlp = mlp[mlp.index("class Mlp") : mlp.index("def train")].replace("Mlp", "ConvNet")
    (one / "common/model.py").write_text(f"from torch import nn\n\n\n{mlp}")
    losses, weights = trained(one, "one_device.py", 1, "--batch-size", 90)
    split_losses, split_weights = trained(exact, "tensor_parallel.py", 2, "--batch-size", 90)
    assert split_losses == losses
    assert distance(split_weights, weights) < 1e-12


def test_tensor_parallel_fails_if_the_hidden_features_cannot_be_split(exact):
    options = ["--hidden", 511, "--data-dir", "common"]
    result = run_ranks("tensor_parallel.py", 2, *options, cwd=exact)
    assert result.code == 1 and "a and b must have same reduction dim" in result.errors, result


def test_fsdp_resumes_from_the_last_complete_checkpoint(exact, tmp_path):
    """On the same number of ranks or another, with the learning rates of the new command."""
    options = ["--batch-size", 45, "--checkpoint"]
    _, weights = trained(exact, "fsdp.py", 2, *options, tmp_path / "run", epochs=2)
    weights = shutil.copy(weights, tmp_path / "whole.pt")
    sizes = [path.stat().st_size for path in (tmp_path / "run/epoch-1").glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 0.65 * sum(sizes)
    (tmp_path / "run/epoch-2/.metadata").unlink()  # written last: epoch 2 is incomplete
    for ranks, images, rates in ((2, 45, []), (1, 90, []), (1, 90, ["--lr", 0])):
        run = shutil.copytree(tmp_path / "run", tmp_path / f"on {ranks}{rates}")
        options = ["--batch-size", images, "--checkpoint", run, *rates]
        losses, resumed = trained(exact, "fsdp.py", ranks, *options, epochs=2)
        assert len(losses) == 1
        if rates:  # 0 leaves the weights as they are
            dcp_to_torch_save(run / "epoch-1", tmp_path / "epoch-1.pt")
            state = torch.load(tmp_path / "epoch-1.pt", weights_only=True)["model"]
            torch.save(state, weights)
        assert distance(resumed, weights) < 1e-12


@pytest.mark.parametrize(("script", "nproc", "options", "line"), [
    ("train.py", 1, "--devices cuda:0", "--devices cuda:0: name 2 devices, two per process"),
    ("train.py", 2, "--devices cuda:0,cuda:1", "--devices cuda:0,cuda:1: name 4 devices, "),
    ("pipeline.py", 2, "--chunks 5", "--batch-size 64 cannot be split into 5 --chunks"),
    ("pipeline.py", 2, "--schedule 1f1b --chunks 1", "--schedule 1f1b needs at least 2 --chunks"),
    ("pipeline.py", 3, "", "the network has 2 stages: start 2 processes, not 3"),
    ("fsdp.py", 2, "--checkpoint no/such/folder", "there is no folder no/such for folder"),
])
def test_rejects_what_does_not_fit(script, nproc, options, line, monkeypatch, capsys):
    settings = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": nproc, "WORLD_SIZE": nproc}
    error = rejected(monkeypatch, capsys, FOLDER / script, *options.split(), **settings)
    assert error.startswith(line)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_output_folder_is_looked_for_on_rank_0(script, monkeypatch, capsys):
    """It is the only one that saves there, and other machines need not have the folder."""
    launch = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 2}
    wrong = ["--output", "no/such/mnist.pt"]
    error = rejected(monkeypatch, capsys, FOLDER / script, *wrong, RANK=0, **launch)
    assert "there is no folder no/such" in error
    parse(monkeypatch, FOLDER / script, *wrong, RANK=1, **launch)


@pytest.mark.parametrize(("gpus", "rank", "devices"), [
    (4, 0, ["cuda:0", "cuda:1"]),
    (4, 1, ["cuda:2", "cuda:3"]),
    (3, 0, ["cpu", "cpu"]),
    (3, 1, ["cpu", "cpu"]),
    (0, 0, ["cpu", "cpu"]),
])
def test_each_process_has_its_own_two_gpus_or_the_cpu(gpus, rank, devices, monkeypatch, capsys):
    launch = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    args = parse(monkeypatch, FOLDER / "train.py", gpus=gpus, **launch)
    assert [str(device) for device in args.devices] == devices
    line = "training on the CPU: it needs 4 GPUs, and PyTorch finds 3\n"
    assert capsys.readouterr().out == (line if (gpus, rank) == (3, 0) else "")
