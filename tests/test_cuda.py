"""The scripts on GPUs, with NCCL and few digits. Ranks may share one GPU.

Simulated GPUs need the settings SDPA and COMPILE of small/simulated.py.
"""

import os
import re
import shutil

import pytest
import torch
from helpers import (
    ROOT,
    TORCHRUN,
    VISIBLE_GPUS,
    Running,
    copy_project,
    copy_repository,
    each_row,
    edit,
    equal,
    free_port,
    run,
)
from test_smoke import accuracy_of

from common.model import ConvNet

# conftest.py hides the GPUs from all other tests
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)
    GPUS = VISIBLE_GPUS.split(",")[: torch.cuda.device_count()]
if not GPUS:
    pytest.skip("needs a GPU", allow_module_level=True)
COMPILES = {"COMPILE", "CC"} & os.environ.keys() or shutil.which("gcc")
# Warnings that torch prints to every user: torchrun's of one thread per process, DDP's
# of a model on two GPUs, and that of a pipeline on torch 2.15
KNOWN = "distributed/run.py|Cuda time stats are not|nccl-lazy"


def see(gpus, patch):
    """Let what is started see this many GPUs; skip the test if there are fewer."""
    if len(GPUS) < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS[:gpus]))


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """Or one, which all ranks share."""
    see(min(2, len(GPUS)), monkeypatch)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """This repository with few digits."""
    copy = copy_repository(tmp_path_factory.mktemp("repository") / "a copy")
    shutil.copy(ROOT / "tests/small/simulated.py", copy / "common/__init__.py")
    if "SDPA" in os.environ:  # simulated ones take a minute for the largest tensor
        edit(copy / "04_ddp_torchrun/selftest.py", ", 512)", ")")
    return copy


def check(result, code=0):
    """It must have this exit code, and only the warnings that everybody gets."""
    found = re.findall(r"^.*(?:\w+Warning: |\bW\d{4} ).*$", result.errors, re.M)
    found = [line for line in found if not re.search(KNOWN, line)]
    assert result.code == code and (code or not found), result
    return result


def start(script, ranks, *options, cwd, **environment):
    """Start a script with torchrun. If ranks share a GPU, each gets its own host id."""
    command = [*TORCHRUN, f"--nproc-per-node={ranks}"]
    if len(GPUS) == 1:
        environment["NCCL_SOCKET_IFNAME"] = "lo"
        line = 'NCCL_HOSTID=$RANK LOCAL_RANK=0 exec python "$@"'
        command += ["--no-python", "bash", "-c", line, "-"]
    return run([*command, script, *options], cwd, OMP_NUM_THREADS=1, **environment)


# folder | GPUs, if not two or one | options
LAUNCHES = """
01_dataparallel | 2 |
02_ddp_spawn | |
04_ddp_torchrun | | --amp --sync-bn
05_model_parallel | 4 |
"""


@each_row(LAUNCHES)
def test_run_sh_trains_evaluates_and_saves(row, copy, tmp_path, monkeypatch):
    """Without a warning."""
    folder, gpus, options = row
    if gpus:
        see(int(gpus), monkeypatch)
    command = ["bash", copy / folder / "run.sh", "--output", tmp_path / "mnist.pt"]
    command += ["--data-dir", copy / "common", *options.split()]
    result = check(run(command, tmp_path, MASTER_PORT=free_port()))
    accuracy = float(result.epochs()[-1]["accuracy"])
    assert accuracy >= 0.2
    # The CPU may choose another digit if an image is equally near to two of them
    assert abs(accuracy - accuracy_of(ConvNet(), tmp_path / "mnist.pt")) <= 2 / 359


def test_01_rejects_amp_on_two_gpus(copy, tmp_path, monkeypatch):
    see(2, monkeypatch)
    result = run(["python", copy / "01_dataparallel/train.py", "--amp"], tmp_path)
    assert "ValueError: --amp needs one GPU" in result.errors, result


# script | options | dtype | how often a line of the script waits for the GPU
EPOCHS = """
04_ddp_torchrun/train.py | | float32 | 0
06_checkpointing/train.py | --amp | bfloat16 | 1
04_ddp_torchrun/train.py | --amp --compile | bfloat16 | any
"""


@each_row(EPOCHS)
def test_each_rank_computes_on_its_gpu(row, tmp_path):
    """No step waits for it: only copies at the end of an epoch, and 06's log."""
    script, options, dtype, waits = row
    if "compile" in options and not COMPILES:
        pytest.skip("Triton needs a C compiler")
    project = copy_project(tmp_path / "project", script, small=("data", "model"))
    shutil.copy(ROOT / "tests/small/simulated.py", project / "common/__init__.py")
    options = ["--batch-size", 16, *options.split()]
    given = {"FLOAT32": 1, "WAITS": 1, "PYTHONWARNINGS": "always"}
    result = start("train.py", 2, *options, cwd=project, **given)
    line = r"^(\w+) on (\S+) in torch\.(\w+), .* (\w+)$"
    assert {*re.findall(line, result.output, re.M)} == {
        (what, f"cuda:{rank % len(GPUS)}", *how)
        for rank in range(2)
        for what, *how in (
            ("training", dtype, f"{'--compile' in options}"),
            ("evaluation", "float32", "False"),
        )
    }, result
    line = r"(train|checks|_tensor)\.py:\d+: \w+: called a sync"
    assert waits in ("any", f"{len(re.findall(line, result.errors))}"), result


def test_selftest(copy, tmp_path):
    script = copy / "04_ddp_torchrun/selftest.py"
    result = check(start(script, 2, "--timeout=300", cwd=tmp_path))
    assert "\nOK: all checks passed on 2 ranks on " in result.output, result


def test_selftest_prints_nccls_reason(copy, tmp_path):
    """For two ranks that use one GPU."""
    command = [*TORCHRUN, "--nproc-per-node=2", "--no-python", "env", "LOCAL_RANK=0"]
    result = run([*command, "python", copy / "04_ddp_torchrun/selftest.py"], tmp_path)
    assert result.output.count("FAILED: join") == 2, result
    assert re.search("(Duplicate|same) GPU", result.output + result.errors), result


# script | how the first start ends: the rank, its image, the signal
INTERRUPTIONS = """
07_slurm/train.py | 0 50 15
07_slurm/fsdp.py | 1 40 9
"""


@each_row(INTERRUPTIONS)
def test_interrupted_and_resumed_bit_for_bit(row, tmp_path):
    path, event = row
    project = copy_project(tmp_path / "project", path, small=("data", "model"))

    def begin(*more, code=0, **given):
        options = ["--batch-size=16", "--epochs=2", "--save-every=2", *more]
        script = path.split("/")[1]
        return check(start(script, 2, *options, cwd=project, **given), code)

    begin("--checkpoint=whole", "--output=whole.pt")
    result = begin(READ=event, code=1)
    assert ("\nstopped: " in result.output) == event.endswith("15"), result
    last = begin()
    assert "'done': 0}" not in last.output, last
    assert equal(project / "mnist.pt", project / "whole.pt")


def test_sync_bn_computes_what_one_rank_does(tmp_path):
    project = copy_project(
        tmp_path / "project", "04_ddp_torchrun/train.py", small="data"
    )
    options = ["--epochs=2", "--sync-bn", "--batch-size"]
    given = {"cwd": project, "TRAIN_IMAGES": 96}
    one, two = [start("train.py", n, *options, 24 // n, **given) for n in (1, 2)]
    assert check(one).epochs() == check(two).epochs() != []


# script | ranks | GPUs that it needs | options
WAYS = """
05_model_parallel/train.py | 2 | 2 | --devices cuda:0,cuda:0,cuda:1,cuda:1
05_model_parallel/pipeline.py | 2 | | --schedule 1f1b
05_model_parallel/tensor_parallel.py | 2 | |
07_slurm/fsdp.py | 2 | | --shards 1 --amp --recompute
"""


@each_row(WAYS)
def test_a_divided_model_learns(row, copy, tmp_path, monkeypatch):
    script, ranks, gpus, options = row
    if gpus:
        see(int(gpus), monkeypatch)
    options = ["--data-dir", copy / "common", "--epochs", 2, *options.split()]
    result = check(start(copy / script, ranks, *options, cwd=tmp_path))
    first, last = re.findall(r"  loss (\d\.\d{4})", result.output)
    assert float(first) > float(last) + 0.05, result


def test_a_process_of_the_second_node_of_03_takes_its_own_gpu(
    copy, tmp_path, monkeypatch
):
    see(3, monkeypatch)
    command = ["python", copy / "03_ddp_multinode_spawn/train.py", "-n2", "-g1,2"]
    command += ["--data-dir", copy / "common", "--master-port", free_port(), "-i"]
    nodes = [
        Running([*command, node], tmp_path, CUDA_VISIBLE_DEVICES=gpus, FAKE_HOST=node)
        for node, gpus in enumerate((GPUS[0], ",".join(GPUS[1:3])))
    ]
    for node in nodes:
        check(node.finish())
