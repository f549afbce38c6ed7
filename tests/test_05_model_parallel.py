"""05: four ways to cut a model, each against the same training on one device."""

import re
import shutil

import pytest
import torch
from helpers import (
    DIGITS,
    ROOT,
    WITNESS,
    bare_accuracy,
    copy_project,
    distance,
    edit,
    fewer_digits,
    load_script,
    run,
    torchrun,
    without_batch_norm,
)

FOLDER = ROOT / "05_model_parallel"
SCRIPTS = ("train.py", "pipeline.py", "tensor_parallel.py", "fsdp.py")
PARAMETERS = 29_034


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A copy that trains on 1,260 images."""
    small = tmp_path_factory.mktemp("small") / "a project"
    copy_project(small, FOLDER / "train.py", *SCRIPTS[1:], "run.sh")
    fewer_digits(small)
    return small


@pytest.mark.parametrize("script", SCRIPTS)
def test_trains_evaluates_and_saves(script, small, tmp_path):
    weights, threads = tmp_path / "weights.pt", tmp_path / "threads"
    command = ["bash", small / "run.sh", script, "--data-dir", small / "common", "--output", weights]
    result = run(command, tmp_path, THREADS=str(threads), **WITNESS)
    assert result.code == 0, result
    assert result.errors == "", result
    epochs = result.epochs()
    assert [line["epoch"] for line in epochs] == ["1", "2", "3"]
    assert float(epochs[-1]["accuracy"]) >= 0.6, result
    assert epochs[-1]["accuracy"] == f"{accuracy(script, weights):.4f}", result
    assert set(threads.read_text().split()) == {"0"}  # of Gloo, at the exit
    if script == "fsdp.py":
        half = PARAMETERS * 4 // 2
        assert result.output.splitlines()[0] == f"bytes of parameters on each rank: {half}, {half}; epochs done: 0"


def accuracy(script, weights):
    """That of the plain model on one device."""
    if script != "tensor_parallel.py":
        return bare_accuracy(weights)
    from common.data import load_mnist

    model = load_script(FOLDER / script).Mlp()
    model.load_state_dict(torch.load(weights, weights_only=True))
    images, labels = load_mnist(DIGITS)[1].tensors
    return (model(images / 255).argmax(1) == labels).double().mean().item()


# The same steps as one device: in float64, and without BatchNorm, which looks at a chunk or a rank at a time


@pytest.fixture(scope="module")
def exact(small, tmp_path_factory):
    """A copy in which a batch may be cut."""
    exact = shutil.copytree(small, tmp_path_factory.mktemp("exact") / "project")
    shutil.copy(ROOT / "04_ddp_torchrun/train.py", exact / "one_device.py")
    without_batch_norm(exact)
    edit(exact, "train.py", ("self.layer1(chunk)", "self.layer1(chunk.double())"))
    edit(exact, "pipeline.py", ("images.to(device", "images.double().to(device"))
    edit(exact, "pipeline.py", ("16 * 14 * 14, device", "16 * 14 * 14, dtype=torch.float64, device"))
    edit(exact, "pipeline.py", ("torch.empty(shape, device", "torch.empty(shape, dtype=torch.float64, device"))
    edit(exact, "tensor_parallel.py", ("nn.Linear(hidden, 10)", "nn.Linear(hidden, 10)\n        self.double()"))
    edit(exact, "tensor_parallel.py", ("images.flatten(1)", "images.double().flatten(1)"))
    return exact


OPTIONS = ["--epochs", 2, "--lr", 0.05]


@pytest.fixture(scope="module")
def one_device(exact):
    """What 04 prints and saves in one process, which is training on one device: 28 steps with batches of 90."""
    return trained(exact, "one_device.py", 1, "--batch-size", 90)


def train(project, script, nproc, *options):
    result = torchrun(script, nproc, "--data-dir", "common", *options, cwd=project)
    assert result.code == 0, result
    return result


def trained(project, script, nproc, *options):
    """The losses and the weights of a run."""
    result = train(project, script, nproc, *OPTIONS, "--output", f"{script}.pt", *options)
    return [line["loss"] for line in result.epochs()], project / f"{script}.pt"


@pytest.mark.parametrize(
    ("script", "nproc", "options"),
    [
        ("train.py", 1, ["--batch-size", 90, "--chunks", 3]),
        ("train.py", 2, ["--batch-size", 45, "--chunks", 5]),
        ("pipeline.py", 2, ["--batch-size", 90, "--chunks", 3]),
        ("pipeline.py", 2, ["--batch-size", 90, "--chunks", 6, "--schedule", "1f1b"]),
        ("fsdp.py", 2, ["--batch-size", 45]),
    ],
)
def test_takes_the_steps_of_one_device(script, nproc, options, exact, one_device):
    losses, weights = trained(exact, script, nproc, *options)
    assert losses == one_device[0]
    assert distance(weights, one_device[1]) < 1e-12


def test_a_pipeline_leaves_the_averages_of_batch_norm_alone(small):
    """They are those of the same chunks on one device; a stage not told its sizes tries itself, and counts that."""
    options = ["--epochs", 1, "--batch-size", 60, "--chunks", 4, "--output"]
    train(small, "train.py", 1, *options, "one.pt")
    train(small, "pipeline.py", 2, *options, "two.pt")
    one, two = (torch.load(small / name, weights_only=True) for name in ("one.pt", "two.pt"))
    for name in ("layer1.1.num_batches_tracked", "layer2.1.num_batches_tracked"):
        assert one[name] == two[name] == 84  # 21 steps of 4 chunks
    assert distance(small / "one.pt", small / "two.pt") < 1e-2


def test_cut_layers_take_the_steps_of_whole_ones(exact):
    one = shutil.copytree(exact, exact.parent / "one")
    mlp = (one / "tensor_parallel.py").read_text()
    mlp = mlp[mlp.index("class Mlp") : mlp.index("def train")].replace("class Mlp", "class ConvNet")
    (one / "common/model.py").write_text(f"from torch import nn\n\n\n{mlp}")
    losses, weights = trained(one, "one_device.py", 1, "--batch-size", 90)
    cut_losses, cut_weights = trained(exact, "tensor_parallel.py", 2, "--batch-size", 90)
    assert cut_losses == losses
    assert distance(cut_weights, weights) < 1e-12


def test_a_sharded_state_is_gone_on_from(exact, tmp_path):
    options = ["--batch-size", 45, "--checkpoint"]
    _, weights = trained(exact, "fsdp.py", 2, *options, tmp_path / "run")
    weights = shutil.copy(weights, tmp_path / "whole.pt")
    sizes = [path.stat().st_size for path in (tmp_path / "run/epoch-1").glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 0.65 * sum(sizes)
    for nproc, limit in ((2, 1e-12), (1, 1.0)):  # on another number of ranks the batches are others
        rest = tmp_path / f"on {nproc}"
        shutil.copytree(tmp_path / "run/epoch-1", rest / "epoch-1")
        shutil.copytree(tmp_path / "run/epoch-2", rest / "epoch-2", ignore=lambda *_: [".metadata"])  # not finished
        losses, gone_on = trained(exact, "fsdp.py", nproc, *options, rest)
        assert len(losses) == 1  # of the second epoch
        assert distance(gone_on, weights) < limit


@pytest.mark.parametrize(
    ("script", "world_size", "options", "line"),
    [
        ("train.py", 1, ["--devices", "cuda:0,cuda:7"], "--devices cuda:0,cuda:7: name 2, .*; torch finds 2 GPUs"),
        ("train.py", 1, ["--devices", "cpu"], "--devices cpu: name 2, "),
        ("train.py", 1, ["--devices", "cpu,cuda:0"], "--devices cpu,cuda:0: name 2, all cpu or all from cuda:0 on; "),
        ("train.py", 2, ["--devices", "cuda:0,cuda:1"], "--devices cuda:0,cuda:1: name 4, "),
        ("train.py", 1, ["--chunks", "5"], "--batch-size 64 cannot be cut into 5 equal --chunks"),
        ("pipeline.py", 2, ["--chunks", "5"], "--batch-size 64 cannot be cut into 5 equal --chunks"),
        ("pipeline.py", 3, [], "the network is cut in 2 parts: start 2 processes, not 3"),
        ("tensor_parallel.py", 3, [], "--hidden 512 cannot be cut into 3 equal parts, one for each process"),
        ("fsdp.py", 3, ["--device", "cuda"], "each process needs a GPU, torch finds 2: start fewer, or --device cpu"),
        ("fsdp.py", 2, ["--checkpoint", "no/such/folder"], "--checkpoint no/such/folder: cannot write there; "),
    ],
)
def test_what_does_not_fit_gets_one_line(script, world_size, options, line, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name, value in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", world_size), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("sys.argv", [script, *options])
    with pytest.raises(SystemExit):
        load_script(FOLDER / script).parse_args()
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2 and re.search(f"error: {line}", error[1]), error


def test_each_process_has_its_own_pair_of_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank, pair in (("0", ["cuda:0", "cuda:1"]), ("1", ["cuda:2", "cuda:3"])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setattr("sys.argv", ["train.py"])
        devices = load_script(FOLDER / "train.py").parse_args().devices
        assert [str(device) for device in devices] == pair


def test_run_sh_refuses_a_wrong_number_of_processes(tmp_path):
    result = run(["bash", FOLDER / "run.sh", "pipeline.py"], tmp_path, NPROC="3")
    assert result.code == 2, result
    line = "pipeline.py: error: the network is cut in 2 parts: start 2 processes, not 3"
    assert result.errors.splitlines() == ["usage: pipeline.py [options]", line]
