"""The scripts on GPUs, with NCCL; MNIST_DIR names a folder with MNIST, for the accuracy on it.

    MNIST_DIR=data python -m pytest tests/test_cuda.py
"""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from helpers import (
    DIGITS,
    ROOT,
    VISIBLE_GPUS,
    WITNESS,
    bare_accuracy,
    check_warnings,
    distance,
    free_port,
    run,
    splittable,
    torchrun,
    trained,
)

DATA = ["--data-dir", DIGITS]
CUDA = ["--device", "cuda"]
MNIST = Path(os.environ["MNIST_DIR"]).resolve() if "MNIST_DIR" in os.environ else None


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
two_gpus = pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
ONE_OR_TWO = [1, pytest.param(2, marks=two_gpus)]


def first(gpus):
    """The environment in which the first GPUs are visible."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(GPUS[:gpus])}


@pytest.fixture(autouse=True)
def show_gpus(monkeypatch):
    monkeypatch.setenv(*first(2).popitem())


def launch(folder, *options, gpus, cwd, **settings):
    """Run a folder's run.sh on the first GPUs."""
    command = ["bash", ROOT / folder / "run.sh", *options]
    result = run(command, cwd, MASTER_PORT=str(free_port()), **first(gpus), **settings)
    assert result.code == 0, result
    check_warnings(result)
    return result


def check_accuracy(result, weights, at_least=0.9):
    """The CPU may classify an image differently that the GPU finds equally near to two digits."""
    accuracy = float(result.epochs()[-1]["accuracy"])
    assert accuracy >= at_least, result
    assert abs(accuracy - bare_accuracy(weights)) <= 2 / 359, result


@pytest.mark.parametrize("gpus", ONE_OR_TWO)
@pytest.mark.parametrize(("folder", "options"), [
    ("01_dataparallel", []),
    ("01_dataparallel", ["--compile"]),
    ("02_ddp_spawn", []),
    ("03_ddp_multinode_spawn", []),
    ("04_ddp_torchrun", []),
    ("04_ddp_torchrun", ["--amp", "--compile"]),
    ("06_checkpointing", ["--amp", "--accumulate", 2, "--sync-bn"]),
])
def test_trains_evaluates_and_saves(folder, options, gpus, tmp_path):
    result = launch(folder, *DATA, *CUDA, *options, gpus=gpus, cwd=tmp_path)
    check_accuracy(result, tmp_path / "mnist.pt")


def test_01_with_amp_on_one_gpu(tmp_path):
    result = launch("01_dataparallel", *DATA, *CUDA, "--amp", gpus=1, cwd=tmp_path)
    check_accuracy(result, tmp_path / "mnist.pt")


@pytest.mark.parametrize("gpus", ONE_OR_TWO)
def test_selftest(gpus, tmp_path):
    result = torchrun(ROOT / "04_ddp_torchrun/selftest.py", gpus, cwd=tmp_path, **first(gpus))
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


@pytest.mark.parametrize(("script", "gpus", "options"), [
    ("train.py", 1, ["--devices", "cuda:0,cuda:0"]),
    ("fsdp.py", 1, CUDA),
    ("tensor_parallel.py", 1, CUDA),
    pytest.param("train.py", 2, ["--devices", "cuda:0,cuda:1"], marks=two_gpus),
    pytest.param("fsdp.py", 2, CUDA, marks=two_gpus),
    pytest.param("tensor_parallel.py", 2, CUDA, marks=two_gpus),
    pytest.param("pipeline.py", 2, CUDA, marks=two_gpus),
    pytest.param("pipeline.py", 2, [*CUDA, "--schedule", "1f1b"], marks=two_gpus),
])
def test_05_in_each_way(script, gpus, options, tmp_path):
    nproc = str(1 if script == "train.py" else gpus)  # train.py has two devices per process
    settings = {"SCRIPT": script, "NPROC": nproc}
    result = launch("05_model_parallel", *DATA, *options, gpus=gpus, cwd=tmp_path, **settings)
    assert float(result.epochs()[-1]["accuracy"]) >= 0.8, result


@two_gpus
def test_two_gpus_take_the_steps_of_one_with_the_whole_batch(tmp_path):
    project = splittable(tmp_path / "project")
    one, two = [trained(project, nproc, *CUDA, "--batch-size", 192 // nproc) for nproc in (1, 2)]
    assert distance(one, two) < 1e-9  # atomic additions vary


@pytest.mark.skipif(MNIST is None, reason="MNIST_DIR is not set")
def test_accuracy_on_mnist(tmp_path):
    data = ["--data-dir", MNIST]
    result = launch("04_ddp_torchrun", *data, gpus=2, cwd=tmp_path)
    assert float(result.epochs()[-1]["accuracy"]) >= 0.99, result
