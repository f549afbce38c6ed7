"""The scripts on GPUs, with NCCL; MNIST_DIR names a folder with MNIST, for the accuracy on it.

    MNIST_DIR=data python -m pytest tests/test_cuda.py
"""

import os
import re
import signal

import pytest
import torch
from helpers import (
    DIGITS,
    ROOT,
    WITNESS,
    bare_accuracy,
    check_warnings,
    distance,
    run,
    splittable,
    torchrun,
    trained,
)

GPUS = torch.cuda.device_count()
if GPUS == 0:
    pytest.skip("needs a GPU", allow_module_level=True)
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
DATA = ["--data-dir", DIGITS]
CUDA = ["--device", "cuda"]


def launch(folder, *options, gpus, cwd, **settings):
    """Run a folder's run.sh on the first GPUs."""
    visible = ",".join(map(str, range(gpus)))
    command = ["bash", ROOT / folder / "run.sh", *options]
    result = run(command, cwd, CUDA_VISIBLE_DEVICES=visible, **settings)
    assert result.code == 0, result
    return result


def check_accuracy(result, weights, at_least=0.9):
    """The CPU may classify an image differently that the GPU finds equally near to two digits."""
    accuracy = float(result.epochs()[-1]["accuracy"])
    assert accuracy >= at_least, result
    assert abs(accuracy - bare_accuracy(weights)) <= 2 / 359, result


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        ("01_dataparallel", []),
        ("01_dataparallel", ["--amp"]),
        ("01_dataparallel", ["--compile"]),
        ("02_ddp_spawn", []),
        ("04_ddp_torchrun", []),
        ("04_ddp_torchrun", ["--amp", "--accumulate", 2, "--sync-bn"]),
        ("06_checkpointing", []),
    ],
)
@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=two_gpus)])
def test_trains_evaluates_and_saves(folder, options, gpus, tmp_path):
    if folder == "01_dataparallel" and gpus == 2 and options:
        pytest.skip("DataParallel has neither --amp nor --compile")
    result = launch(folder, *DATA, *CUDA, *options, gpus=gpus, cwd=tmp_path)
    assert result.errors == "", result
    check_accuracy(result, tmp_path / "mnist.pt")


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=two_gpus)])
def test_03_as_one_node(gpus, tmp_path):
    """Its run.sh without NODE_RANK shows two nodes on the CPU."""
    script = ROOT / "03_ddp_multinode_spawn/train.py"
    result = run(["python", script, "-n", 1, "-g", gpus, *DATA, *CUDA], tmp_path)
    assert result.code == 0 and result.errors == "", result
    check_accuracy(result, tmp_path / "mnist.pt")


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=two_gpus)])
def test_selftest(gpus, tmp_path):
    result = launch("04_ddp_torchrun", "selftest.py", gpus=gpus, cwd=tmp_path)
    assert f"OK: all checks passed on {gpus} ranks on " in result.output, result
    speeds = re.findall(r"^all_reduce .*GB/s", result.output, re.M)
    assert len(speeds) == 3 and "cuda:nccl" in result.output, result


def test_06_stops_on_a_gpu_and_resumes_there_and_on_the_cpu(tmp_path):
    script = ROOT / "06_checkpointing/train.py"
    stop = {"SIGNAL_AT_BATCH": f"0 {signal.SIGTERM:d} 30", **WITNESS}
    stopped = torchrun(script, 1, *DATA, *CUDA, cwd=tmp_path, **stop)
    assert "stopped after 0 of 1 epochs" in stopped.output, stopped
    checkpoint = (tmp_path / "checkpoint.pt").read_bytes()
    for device in ("cuda", "cpu"):
        (tmp_path / "checkpoint.pt").write_bytes(checkpoint)
        result = torchrun(script, 1, *DATA, "--device", device, cwd=tmp_path)
        assert result.output.startswith("resuming from checkpoint.pt, after 0 of 1"), result
        check_accuracy(result, tmp_path / "mnist.pt")


@pytest.mark.parametrize(
    ("script", "gpus", "options"),
    [
        ("train.py", 1, ["--devices", "cuda:0,cuda:0"]),
        ("fsdp.py", 1, CUDA),
        ("tensor_parallel.py", 1, CUDA),
        pytest.param("train.py", 2, ["--devices", "cuda:0,cuda:1"], marks=two_gpus),
        pytest.param("fsdp.py", 2, CUDA, marks=two_gpus),
        pytest.param("tensor_parallel.py", 2, CUDA, marks=two_gpus),
        pytest.param("pipeline.py", 2, CUDA, marks=two_gpus),
        pytest.param("pipeline.py", 2, [*CUDA, "--schedule", "1f1b"], marks=two_gpus),
    ],
)
def test_05_in_each_way(script, gpus, options, tmp_path):
    result = launch("05_model_parallel", script, *DATA, *options, gpus=gpus, cwd=tmp_path)
    check_warnings(result)
    assert float(result.epochs()[-1]["accuracy"]) >= 0.8, result


@two_gpus
def test_two_gpus_take_the_steps_of_one_with_the_whole_batch(tmp_path):
    project = splittable(tmp_path / "project")
    one, two = [trained(project, nproc, *CUDA, "--batch-size", 192 // nproc) for nproc in (1, 2)]
    assert distance(one, two) < 1e-9  # atomic additions vary


@pytest.mark.skipif("MNIST_DIR" not in os.environ, reason="MNIST_DIR is not set")
def test_accuracy_on_mnist(tmp_path):
    data = ["--data-dir", os.environ["MNIST_DIR"]]
    result = launch("04_ddp_torchrun", *data, gpus=min(GPUS, 2), cwd=tmp_path)
    assert float(result.epochs()[-1]["accuracy"]) >= 0.99, result
