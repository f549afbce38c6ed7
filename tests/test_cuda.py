"""The scripts on GPUs, with NCCL, and with few digits.

    MNIST_DIR=data python -m pytest tests/test_cuda.py

MNIST_DIR names a folder with MNIST, for the accuracy on it. COMPILE_BACKEND=aot_eager compiles
without Triton, SDPA=math computes attention without fused kernels.
"""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers.checks import bare_accuracy, check_warnings, distance
from helpers.commands import VISIBLE_GPUS, WITNESS, fake_tools, free_port, run
from helpers.paths import FOLDERS, ROOT
from helpers.projects import (
    copy_project,
    copy_repository,
    edit,
    splittable,
    trained,
    without_batch_norm,
)
from helpers.ranks import run_ranks

MNIST = Path(os.environ["MNIST_DIR"]).resolve() if "MNIST_DIR" in os.environ else None
ATTENTION = "seen = nn.functional.scaled_dot_product_attention("
# What the copied scripts call after each backward
CHECK = '''
def check(images, scores, model, **others):
    gpu = int(os.environ.get("LOCAL_RANK", 0))
    assert images.device.index == torch.cuda.current_device() == gpu
    assert (scores.dtype == torch.bfloat16) == ("--amp" in sys.argv)
    kinds = {type(module).__name__ for module in model.modules()}
    assert ("SyncBatchNorm" in kinds) == ("--sync-bn" in sys.argv)
    assert ("OptimizedModule" in kinds) == ("--compile" in sys.argv)
    assert torch.cuda.device_count() == 1 or "Parallel" in str(kinds) or "05_" in sys.argv[0]
    if "DistributedDataParallel" in kinds and not kinds & {"SyncBatchNorm", "OptimizedModule"}:
        torch.cuda.set_sync_debug_mode("error")  # until the end of the epoch no line may wait


def parse_args():'''
CHECKS = [
    ("\ndef parse_args():", CHECK),
    ("criterion(model(images)", "criterion((scores := model(images))"),
    ("total[0] += loss", "check(**locals()); total[0] += loss"),
    ("loss = (total", "torch.cuda.set_sync_debug_mode(0); loss = (total"),
]


with pytest.MonkeyPatch.context() as patch:  # conftest.py hides the GPUs from all other tests
    patch.delenv("CUDA_VISIBLE_DEVICES")
    if VISIBLE_GPUS is not None:
        patch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)
    count = torch.cuda.device_count()
GPUS = (VISIBLE_GPUS or ",".join(map(str, range(count)))).split(",")[:count]
if not GPUS:
    pytest.skip("needs a GPU", allow_module_level=True)
TWO = len(GPUS[:2])  # or one
two_gpus = pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
four_gpus = pytest.mark.skipif(len(GPUS) < 4, reason="needs four GPUs")
COMPILES = {"COMPILE_BACKEND", "CC"} & os.environ.keys() or shutil.which("gcc")
compiler = pytest.mark.skipif(not COMPILES, reason="--compile needs a C compiler, for Triton")


@pytest.fixture(autouse=True)
def two_visible_gpus(monkeypatch, tmp_path):
    """Or one. Simulated ones have no nvidia-smi."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS[:2]))
    monkeypatch.setenv("PATH", fake_tools(tmp_path / "tools", **{"nvidia-smi": ":"}))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """This repository with few digits, and with scripts that check what they are asked for."""
    copy = copy_repository(tmp_path_factory.mktemp("repository") / "a copy")
    scripts = [f"{folder}/train.py" for folder in FOLDERS if not folder.startswith("05")]
    for script in [*scripts, "05_model_parallel/fsdp.py", "05_model_parallel/tensor_parallel.py"]:
        edit(copy, script, *CHECKS)
    without_fused_kernels(copy / "05_model_parallel")
    return copy


def without_fused_kernels(project):
    if os.environ.get("SDPA") == "math":
        math = "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):"
        edit(project, "fsdp.py", (ATTENTION, f"{math}\n            {ATTENTION}"),
             ("import torch\n", "import torch\nimport torch.nn.attention\n"))


def launch(repository, folder, *options, cwd, gpus=GPUS[:2]):
    """Run a folder's run.sh on these GPUs, and check the accuracy of the saved weights."""
    settings = {"MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ",".join(gpus), **WITNESS}
    result = run(["bash", repository / folder / "run.sh", *options], cwd, **settings)
    assert result.code == 0 and "on the CPU" not in result.output, result
    check_warnings(result, repository)
    return float(result.epochs()[-1]["accuracy"])


@pytest.mark.parametrize(("folder", "gpus", "options"), [
    ("01_dataparallel", 1, ["--amp"]),
    pytest.param("01_dataparallel", 2, [], marks=two_gpus),
    ("02_ddp_spawn", 2, []),
    ("03_ddp_multinode_spawn", 2, ["--amp"]),
    ("04_ddp_torchrun", 2, ["--amp", "--sync-bn"]),
    pytest.param("04_ddp_torchrun", 2, ["--amp", "--compile"], marks=compiler),
    ("06_checkpointing", 2, ["--amp", "--accumulate", 2]),
    pytest.param("05_model_parallel", 4, [], marks=four_gpus),
])
def test_trains_evaluates_and_saves(folder, gpus, options, copy, tmp_path):
    """DDP also with one GPU, if there is one; 05 takes two for each process."""
    options = ["--data-dir", copy / "common", "--epochs", 3, *options]
    accuracy = launch(copy, folder, *options, cwd=tmp_path, gpus=GPUS[:gpus])
    # The CPU may classify an image differently that the GPU finds equally near to two digits
    assert accuracy >= 0.6 and abs(accuracy - bare_accuracy(tmp_path / "mnist.pt")) <= 2 / 359


def test_selftest(tmp_path):
    result = run_ranks(ROOT / "04_ddp_torchrun/selftest.py", TWO, cwd=tmp_path)
    assert f"OK: all checks passed on {TWO} ranks on " in result.output, result
    speeds = re.findall(r"^all_reduce .*GB/s", result.output, re.M)
    assert len(speeds) == 3 and "cuda:nccl" in result.output, result


@pytest.mark.parametrize(("script", "more"), [
    ("06_checkpointing/train.py", []),
    ("05_model_parallel/fsdp.py", ["--recompute", "--width", 16]),
])
def test_stops_on_gpus_and_resumes_there_and_then_without_them(script, more, tmp_path):
    """With the weights of an undisturbed run on the CPU."""
    project = copy_project(tmp_path / "project", ROOT / script)
    without_batch_norm(project)
    if script.endswith("fsdp.py"):
        without_fused_kernels(project)
        edit(project, "fsdp.py", ("model(images).float()", "model(images)"))
    options = ["--data-dir", "common", "--epochs", 1, "--batch-size", 64 // TWO, *more]
    options += ["--accumulate", 2]

    def train(*more, stop=0, **settings):
        result = run_ranks(script.split("/")[1], TWO, *options, *more, cwd=project,
                           stop=(0, signal.SIGTERM, stop), **settings)
        check_warnings(result, project)
        return re.findall(r"(stopped|resuming).* at .*'images': (\d+)", result.output)

    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert train(stop=7) == [("stopped", "512")]
    assert train(stop=5) == [("resuming", "512"), ("stopped", "896")]
    assert train(**hidden) == [("resuming", "896")]
    assert train("--checkpoint", "whole-run", "--output", "whole.pt", **hidden) == []
    assert distance(project / "mnist.pt", project / "whole.pt") < 1e-9


@pytest.mark.parametrize(("script", "nproc", "options"), [
    ("train.py", 1, ["--devices", "cuda:0,cuda:0"]),
    ("tensor_parallel.py", 1, []),
    ("fsdp.py", TWO, ["--batch-size", 16, "--amp", "--recompute", "--accumulate", 2]),
    pytest.param("fsdp.py", 2, ["--batch-size", 16, "--shards", 1], id="hsdp", marks=two_gpus),
    pytest.param("train.py", 1, ["--devices", "cuda:0,cuda:1"], marks=two_gpus),
    pytest.param("train.py", 2, ["--devices", "cuda:0,cuda:0,cuda:1,cuda:1"], marks=two_gpus),
    pytest.param("tensor_parallel.py", 2, [], marks=two_gpus),
    pytest.param("pipeline.py", 2, [], marks=two_gpus),
    pytest.param("pipeline.py", 2, ["--schedule", "1f1b"], marks=two_gpus),
])
def test_05_in_each_way(script, nproc, options, copy, tmp_path):
    options = ["--data-dir", copy / "common", "--epochs", 3, *options]
    result = run_ranks(copy / "05_model_parallel" / script, nproc, *options, cwd=tmp_path)
    check_warnings(result, copy)
    first, *_, last = [float(line["loss"]) for line in result.epochs()]
    assert first > last + 0.1, result


@two_gpus
def test_two_gpus_take_the_steps_of_one_with_the_whole_batch(tmp_path):
    """With rank 0 on the second GPU: the local rank picks it, not the rank."""
    project = splittable(tmp_path / "project")
    swap = 'os.environ["LOCAL_RANK"] = str(1 - int(os.environ["RANK"]))'
    edit(project, "train.py", *CHECKS, ("\ndef train(", f"\n{swap}\n\n\ndef train("))
    one, two = [trained(project, nproc, "--batch-size", 192 // nproc) for nproc in (1, 2)]
    assert distance(one, two) < 1e-9  # atomic additions vary


@pytest.mark.skipif(MNIST is None, reason="MNIST_DIR is not set")
def test_accuracy_on_mnist(tmp_path):
    assert launch(ROOT, "04_ddp_torchrun", "--data-dir", MNIST, cwd=tmp_path) >= 0.99
