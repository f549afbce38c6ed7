"""The scripts on GPUs, with NCCL, and with few digits.

    MNIST_DIR=data python -m pytest tests/test_cuda.py

MNIST_DIR names a folder with MNIST, for the accuracy on it. COMPILE_BACKEND=aot_eager compiles
without Triton, SDPA=math computes attention without fused kernels.
"""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from helpers.checks import bare_accuracy, check_warnings, distance
from helpers.commands import VISIBLE_GPUS, WITNESS, fake_tools, free_port, run
from helpers.paths import ROOT
from helpers.projects import (
    copy_project,
    copy_repository,
    edit,
    splittable,
    trained,
    without_batch_norm,
)
from helpers.ranks import run_ranks

CUDA = ["--device", "cuda"]
MNIST = Path(os.environ["MNIST_DIR"]).resolve() if "MNIST_DIR" in os.environ else None
ATTENTION = "seen = nn.functional.scaled_dot_product_attention("
TO_DEVICE = "images, labels = [part.to(device, non_blocking=True) for part in batch]"


def visible_gpus():
    """The GPUs that conftest.py hides from all other tests, as CUDA_VISIBLE_DEVICES names them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES")
        if VISIBLE_GPUS is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)
        count = torch.cuda.device_count()
    return (VISIBLE_GPUS or ",".join(map(str, range(count)))).split(",")[:count]


GPUS = visible_gpus()
if not GPUS:
    pytest.skip("needs a GPU", allow_module_level=True)
TWO = len(GPUS[:2])  # or one
two_gpus = pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
four_gpus = pytest.mark.skipif(len(GPUS) < 4, reason="needs four GPUs")


def first(gpus):
    """The environment in which the first GPUs are visible."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(GPUS[:gpus])}


@pytest.fixture(autouse=True)
def show_gpus(monkeypatch):
    monkeypatch.setenv(*first(2).popitem())


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """This repository with few digits, and with images that must be on `device`, index included."""
    copy = copy_repository(tmp_path_factory.mktemp("repository") / "a copy")
    for folder in ("02_ddp_spawn", "03_ddp_multinode_spawn", "04_ddp_torchrun", "06_checkpointing"):
        changes = (TO_DEVICE, f"{TO_DEVICE}; assert images.device == device")
        edit(copy, f"{folder}/train.py", changes)
    without_fused_kernels(copy / "05_model_parallel")
    return copy


def without_fused_kernels(project):
    if os.environ.get("SDPA") == "math":
        math = "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):"
        edit(project, "fsdp.py", (ATTENTION, f"{math}\n            {ATTENTION}"),
             ("import torch\n", "import torch\nimport torch.nn.attention\n"))


def launch(repository, folder, *options, gpus, cwd, **settings):
    """Run a folder's run.sh on the first GPUs, which simulated ones have no nvidia-smi for."""
    settings |= {"PATH": fake_tools(cwd / "tools", **{"nvidia-smi": ":"})}
    command = ["bash", repository / folder / "run.sh", *options]
    settings |= {"MASTER_PORT": str(free_port()), **first(gpus), **WITNESS}
    return passed(run(command, cwd, **settings), repository)


def passed(result, repository):
    assert result.code == 0, result
    check_warnings(result, repository)
    return result


def check_accuracy(result, weights=None):
    """The CPU may classify an image differently that the GPU finds equally near to two digits."""
    accuracy = float(result.epochs()[-1]["accuracy"])
    assert accuracy >= 0.6, result
    assert not weights or abs(accuracy - bare_accuracy(weights)) <= 2 / 359, result


@pytest.mark.parametrize(("folder", "gpus", "options"), [
    ("01_dataparallel", 1, ["--amp"]),
    ("01_dataparallel", 2, ["--compile"]),
    ("02_ddp_spawn", 2, []),
    ("03_ddp_multinode_spawn", 2, []),
    ("04_ddp_torchrun", 2, ["--amp", "--sync-bn"]),
    ("06_checkpointing", 2, ["--amp", "--accumulate", 2, "--sync-bn"]),
])
def test_trains_evaluates_and_saves(folder, gpus, options, copy, tmp_path):
    """With two GPUs, if there are two."""
    options = ["--data-dir", copy / "common", "--epochs", 3, *CUDA, *options]
    result = launch(copy, folder, *options, gpus=gpus, cwd=tmp_path)
    check_accuracy(result, tmp_path / "mnist.pt")


def test_04_compiled(copy, tmp_path):
    options = ["--data-dir", copy / "common", "--epochs", 3, *CUDA, "--amp", "--compile"]
    script = copy / "04_ddp_torchrun/train.py"
    result = passed(run_ranks(script, TWO, *options, cwd=tmp_path, **WITNESS), copy)
    check_accuracy(result, tmp_path / "mnist.pt")


def test_selftest(tmp_path):
    result = run_ranks(ROOT / "04_ddp_torchrun/selftest.py", TWO, cwd=tmp_path)
    assert f"OK: all checks passed on {TWO} ranks on " in result.output, result
    speeds = re.findall(r"^all_reduce .*GB/s", result.output, re.M)
    assert len(speeds) == 3 and "cuda:nccl" in result.output, result


def test_06_stops_on_gpus_and_resumes_there_and_then_on_the_cpu(tmp_path):
    """With --accumulate, and with the weights of an undisturbed run on the CPU."""
    project = copy_project(tmp_path / "project", ROOT / "06_checkpointing/train.py")
    without_batch_norm(project)
    options = ["--data-dir", "common", "--batch-size", 64 // TWO, "--accumulate", 2]

    def train(device, *more, stop=0):
        settings = {"SIGNAL_AT_BATCH": f"0 {signal.SIGTERM:d} {stop}", "TORCHELASTIC_RUN_ID": "any"}
        more = ["--device", device, *options, *more]
        result = run_ranks("train.py", TWO, *more, cwd=project, **WITNESS, **settings)
        return passed(result, project).output

    first, second = [{"epoch": 1, "images": images, "best": None} for images in (512, 896)]
    assert train("cuda", stop=7).startswith(f"stopped at {first}; ")
    lines = train("cuda", stop=5).splitlines()
    assert lines[0] == f"resuming from checkpoint.pt at {first}"
    assert lines[1].startswith(f"stopped at {second}; "), lines
    assert f" at {second}\nepoch 1/1  " in train("cpu")
    train("cpu", "--checkpoint", "whole-run.pt", "--output", "whole.pt")
    assert distance(project / "mnist.pt", project / "whole.pt") < 1e-9


@pytest.mark.parametrize(("script", "gpus", "options"), [
    ("train.py", 1, ["--devices", "cuda:0,cuda:0"]),
    ("tensor_parallel.py", 1, CUDA),
    pytest.param("train.py", 2, ["--devices", "cuda:0,cuda:1"], marks=two_gpus),
    pytest.param("train.py", 2, ["--devices", "cuda:0,cuda:0,cuda:1,cuda:1"], marks=two_gpus),
    pytest.param("tensor_parallel.py", 2, CUDA, marks=two_gpus),
    pytest.param("pipeline.py", 2, CUDA, marks=two_gpus),
    pytest.param("pipeline.py", 2, [*CUDA, "--schedule", "1f1b"], marks=two_gpus),
])
def test_05_in_each_way(script, gpus, options, copy, tmp_path):
    nproc = len(options[1].split(",")) // 2 if script == "train.py" else gpus
    options = ["--data-dir", copy / "common", "--epochs", 3, *options]
    script = copy / "05_model_parallel" / script
    check_accuracy(passed(run_ranks(script, nproc, *options, cwd=tmp_path), copy))


@pytest.mark.parametrize("options", [
    ["--amp", "--recompute", "--accumulate", 2],
    pytest.param(["--amp", "--shards", 1], id="hsdp", marks=two_gpus),
])
def test_fsdp_in_bfloat16(options, copy, tmp_path):
    options = ["--data-dir", copy / "common", "--batch-size", 16, *CUDA, *options]
    script = copy / "05_model_parallel/fsdp.py"
    result = passed(run_ranks(script, TWO, *options, cwd=tmp_path), copy)
    first, *_, last = [float(line["loss"]) for line in result.epochs()]
    assert first > last + 0.1, result


def test_fsdp_stops_on_gpus_and_resumes_on_the_cpu(tmp_path):
    """With the weights of an undisturbed run on the CPU."""
    project = copy_project(tmp_path / "project", ROOT / "05_model_parallel/fsdp.py")
    without_batch_norm(project)
    without_fused_kernels(project)
    edit(project, "fsdp.py", ("model(images).float()", "model(images)"))
    options = ["--epochs", 1, "--data-dir", "common", "--width", 16, "--batch-size", 64 // TWO]
    settings = {"SIGNAL_AT_BATCH": f"0 {signal.SIGTERM:d} 7", "TORCHELASTIC_RUN_ID": "any"}
    given = [*options, "--recompute", *CUDA]
    stopped = passed(run_ranks("fsdp.py", TWO, *given, cwd=project, **WITNESS, **settings), project)
    done = {"epoch": 1, "images": 448}
    assert f"stopped at {done}; " in stopped.output, stopped
    resumed = passed(run_ranks("fsdp.py", TWO, *options, "--device", "cpu", cwd=project), project)
    assert f" at {done}\n" in resumed.output, resumed
    whole = ["--device", "cpu", "--checkpoint", "whole", "--output", "whole.pt"]
    passed(run_ranks("fsdp.py", TWO, *options, *whole, cwd=project), project)
    assert distance(project / "mnist.pt", project / "whole.pt") < 1e-9


@four_gpus
def test_05_takes_two_gpus_per_process_of_its_own_accord(copy, tmp_path):
    options = ["--data-dir", copy / "common", "--epochs", 3]
    result = launch(copy, "05_model_parallel", *options, gpus=4, cwd=tmp_path)
    assert "on the CPU" not in result.output, result
    check_accuracy(result, tmp_path / "mnist.pt")


@two_gpus
def test_two_gpus_take_the_steps_of_one_with_the_whole_batch(tmp_path):
    project = splittable(tmp_path / "project")
    one, two = [trained(project, nproc, *CUDA, "--batch-size", 192 // nproc) for nproc in (1, 2)]
    assert distance(one, two) < 1e-9  # atomic additions vary


@pytest.mark.skipif(MNIST is None, reason="MNIST_DIR is not set")
def test_accuracy_on_mnist(tmp_path):
    data = ["--data-dir", MNIST]
    result = launch(ROOT, "04_ddp_torchrun", *data, gpus=2, cwd=tmp_path)
    assert float(result.epochs()[-1]["accuracy"]) >= 0.99, result
