"""The scripts on GPUs, with NCCL and few digits. Ranks may share one GPU.

SDPA=math computes attention without fused kernels, as simulated GPUs need it, and
COMPILE=eager compiles without Triton.
"""

import os
import re
import shutil

import pytest
import torch
from helpers import (
    FOLDERS,
    ROOT,
    VISIBLE_GPUS,
    Running,
    copy_project,
    copy_repository,
    distance,
    free_port,
    load,
    run,
    run_ranks,
    tools,
    without_batch_norm,
)
from test_smoke import accuracy_of

# conftest.py hides the GPUs from all other tests
with pytest.MonkeyPatch.context() as patch:
    patch.delenv("CUDA_VISIBLE_DEVICES")
    if VISIBLE_GPUS != "all":
        patch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)
    count = torch.cuda.device_count()
GPUS = [str(number) for number in range(count)]
if VISIBLE_GPUS != "all":
    GPUS = VISIBLE_GPUS.split(",")[:count]
if not GPUS:
    pytest.skip("needs a GPU", allow_module_level=True)
two_gpus = pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
four_gpus = pytest.mark.skipif(len(GPUS) < 4, reason="needs four GPUs")
COMPILES = {"COMPILE", "CC"} & os.environ.keys() or shutil.which("gcc")
compiler = pytest.mark.skipif(
    not COMPILES, reason="--compile needs a C compiler, for Triton"
)
# Warnings that torch prints to every user, and why
KNOWN = {
    "distributed/run.py": "torchrun's banner: on GPUs one thread per process is enough",
    "Cuda time stats are not": "DDP of a model on two GPUs: it measures nothing there",
    "nccl-lazy": "a pipeline on torch 2.15: a backend that older releases do not have",
}


@pytest.fixture(autouse=True)
def two_visible_gpus(monkeypatch, tmp_path):
    """Or one, which all forked ranks share. Simulated ones have no nvidia-smi."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS[:2]))
    if len(GPUS) == 1:
        monkeypatch.setenv("SHARED_GPU", "1")
    monkeypatch.setenv("PATH", tools(tmp_path / "tools", **{"nvidia-smi": ":"}))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """This repository with few digits."""
    return copy_repository(tmp_path_factory.mktemp("repository") / "a copy")


def warnings_of(result):
    """The lines in which Python or torch warns, but not those that everybody gets."""
    lines = re.findall(
        r"^.*(?:\w+Warning: |\bW\d{4} ).*$", result.output + result.errors, re.M
    )
    return [line for line in lines if not any(text in line for text in KNOWN)]


@pytest.mark.parametrize(
    ("folder", "gpus", "options"),
    [
        # the root's two lines, with which two ranks share one GPU
        ("", 1, ["--sync-bn"]),
        ("01_dataparallel", 1, ["--amp"]),
        pytest.param("01_dataparallel", 2, [], marks=two_gpus),
        ("02_ddp_spawn", 2, []),
        ("03_ddp_multinode_spawn", 2, ["--amp"]),
        ("04_ddp_torchrun", 2, ["--amp", "--sync-bn"]),
        ("06_checkpointing", 2, ["--amp", "--accumulate", 2]),
        pytest.param("05_model_parallel", 4, [], marks=four_gpus),
    ],
)
def test_trains_evaluates_and_saves(folder, gpus, options, copy, tmp_path):
    """By run.sh, without a warning; 02 to 06 with one process if there is one GPU."""
    visible = ",".join(GPUS[:gpus])
    settings = {"MASTER_PORT": free_port(), "CUDA_VISIBLE_DEVICES": visible}
    command = ["bash", copy / folder / "run.sh"]
    if not folder:
        page = (ROOT / "README.md").read_text()
        lines = re.search(r"^NCCL_SOCKET_IFNAME=lo torch.*(?=')", page, re.M)
        command = ["bash", "-c", f"""{lines[0]} "$@"' - "$@" """, "-"]
    command += ["--output", tmp_path / "mnist.pt", *options]
    result = run(command, copy, **settings)
    assert result.code == 0 and "on the CPU" not in result.output, result
    assert not warnings_of(result), result
    accuracy = float(result.epochs()[-1]["accuracy"])
    assert accuracy >= 0.2
    # The CPU may see another digit where the GPU finds an image equally near to two
    on_the_cpu = accuracy_of(load(tmp_path / "mnist.pt"))
    assert abs(accuracy - on_the_cpu) <= 2 / 359


@pytest.mark.parametrize(
    ("folder", "options", "dtype"),
    [
        (FOLDERS[3], [], "float32"),
        (FOLDERS[5], ["--amp", "--accumulate", 2], "bfloat16"),
        pytest.param(FOLDERS[3], ["--amp", "--compile"], "bfloat16", marks=compiler),
    ],
)
def test_each_rank_computes_on_its_gpu_and_waits_for_it_once_per_epoch(
    folder, options, dtype, tmp_path
):
    """In the dtype of the options. 06 waits in four lines of its save."""
    script, project = f"{folder}/train.py", tmp_path / "project"
    copy_project(project, script, small=("data", "model"))
    result = run_ranks(
        "train.py",
        2,
        "--batch-size",
        16,
        *options,
        cwd=project,
        FLOAT32=1,
        CHANGES="plain_gpu",
        WAITS=1,
    )
    lines = re.findall(
        r"^(\w+) on (\S+) in torch\.(\w+), .* compiled (\w+)$", result.output, re.M
    )
    compiled = str("--compile" in options)
    assert sorted(lines) == sorted(
        (what, f"cuda:{rank % len(GPUS)}", *how)
        for rank in range(2)
        for what, *how in (
            ("training", dtype, compiled),
            ("evaluation", "float32", "False"),
        )
    )
    waits = re.findall(
        r"^(\S+train\.py:\d+): UserWarning: called a sync", result.errors, re.M
    )
    assert len({*waits}) == (4 if "06" in folder else 1) or compiled == "True", result


def test_selftest(tmp_path):
    """It measures less than usual, as a simulated GPU writes each part to a file."""
    script = ROOT / "04_ddp_torchrun/selftest.py"
    result = run_ranks(script, 2, cwd=tmp_path, CHANGES="short_selftest")
    assert "OK: all checks passed on 2 ranks on " in result.output, result
    assert result.output.count(" GB/s\n") == 2 and "cuda:nccl" in result.output, result
    alone = run_ranks(script, 1, cwd=tmp_path, CHANGES="short_selftest")
    assert " 1 ranks on " in alone.output and "GB/s" not in alone.output, alone


def test_selftest_prints_nccls_reason(tmp_path):
    """Of two ranks that take one GPU, and in the words of this NCCL."""
    script = ROOT / "04_ddp_torchrun/selftest.py"
    change = "os.environ['LOCAL_RANK'] = '0'\nos.environ.pop('NCCL_HOSTID', 0)"
    result = run_ranks(script, 2, cwd=tmp_path, CHANGE=change, code=1)
    assert result.output.count("FAILED: join") == 2, result
    second_lines = re.findall(r"\n.*Last [Ee]rror:", result.output)
    assert len(second_lines) == 2, result
    assert re.search("(Duplicate|same) GPU", result.output + result.errors), result


@pytest.mark.parametrize(
    ("script", "more", "number"),
    [
        ("06_checkpointing/train.py", [], 9),
        ("07_slurm/train.py", [], 15),
        ("05_model_parallel/fsdp.py", ["--recompute", "--width", 16], 9),
        ("05_model_parallel/fsdp.py", ["--recompute", "--width", 16], 15),
    ],
)
def test_ends_on_gpus_and_resumes_there_and_then_without_them(
    script, more, number, tmp_path
):
    """Killed or stopped, also on another number, with the weights of a whole run."""
    project = copy_project(tmp_path / "project", script, small="data")
    without_batch_norm(project)
    options = ["--accumulate", 2, "--epochs", 1, "--save-every", 1, *more]

    def train(ranks, *more, read=0, **settings):
        code = 0
        if read:
            code = 9 if number == 9 else 1
        result = run_ranks(
            script.split("/")[1],
            ranks,
            "--batch-size",
            18 // ranks,
            *options,
            *more,
            code=code,
            cwd=project,
            CHANGES="plain_gpu",
            READ=f"0 {read} {number}",
            TRAIN_IMAGES=180,
            **settings,
        )
        assert code == 9 or not warnings_of(result), result
        return re.findall(r"^(stopped at|resuming)", result.output, re.M)

    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    stopped = ["stopped at"] if number == 15 else []
    assert train(2, read=30) == stopped
    assert train(1, read=60) == ["resuming", *stopped]
    assert train(2, **hidden) == ["resuming"]
    assert train(2, "--checkpoint", "whole-run", "--output", "whole.pt", **hidden) == []
    # fsdp's loss is float32
    assert distance(project / "mnist.pt", project / "whole.pt") < 1e-5


@pytest.mark.parametrize(
    ("script", "nproc", "options"),
    [
        ("train.py", 1, ["--devices", "cuda:0,cuda:0"]),
        ("tensor_parallel.py", 1, []),
        ("fsdp.py", 2, ["--batch-size", 16, "--amp", "--recompute", "--accumulate", 2]),
        pytest.param("fsdp.py", 2, ["--batch-size", 16, "--shards", 1], id="hsdp"),
        pytest.param("train.py", 1, ["--devices", "cuda:0,cuda:1"], marks=two_gpus),
        pytest.param(
            "train.py", 2, ["--devices", "cuda:0,cuda:0,cuda:1,cuda:1"], marks=two_gpus
        ),
        ("tensor_parallel.py", 2, []),
        ("pipeline.py", 2, []),
        ("pipeline.py", 2, ["--schedule", "1f1b"]),
    ],
)
def test_05_in_each_way(script, nproc, options, copy, tmp_path):
    """fsdp.py also prints its peak memory."""
    options = ["--data-dir", copy / "common", "--epochs", 2, *options]
    script = copy / "05_model_parallel" / script
    result = run_ranks(script, nproc, *options, cwd=tmp_path, CHANGES="plain_gpu")
    first, *_, last = result.epochs()
    assert float(first["loss"]) > float(last["loss"]) + 0.05, result
    assert bool(last["memory"]) == (script.name == "fsdp.py")
    assert not warnings_of(result), result


@pytest.mark.parametrize(
    ("more", "rounding"),
    [([], 1e-9), (["--sync-bn"], 1e-6)],
    ids=["without BatchNorm", "with one over both"],
)
def test_two_ranks_take_the_steps_of_one_with_the_whole_batch(more, rounding, tmp_path):
    """With rank 0 on the second GPU, if there are two: the local rank picks it."""
    script, project = "04_ddp_torchrun/train.py", tmp_path / "project"
    copy_project(project, script, small="data")
    if not more:
        without_batch_norm(project)
    settings = {"cwd": project, "TRAIN_IMAGES": 180}
    one = ["--lr", 0.3, *more, "--batch-size", 24, "--output", "one.pt"]
    two = ["--lr", 0.3, *more, "--batch-size", 12, "--output", "two.pt"]
    change = f"os.environ['LOCAL_RANK'] = str((1 - rank) % {len(GPUS)})"
    run_ranks("train.py", 1, *one, **settings)
    run_ranks("train.py", 2, *two, CHANGE=change, **settings)
    # Atomic additions vary, and SyncBatchNorm's statistics round
    assert distance(project / "one.pt", project / "two.pt") < rounding


@four_gpus
def test_a_process_of_the_second_node_of_03_takes_its_own_gpu(copy, tmp_path):
    """Nobody sets LOCAL_RANK: torch 2.15 needs the device_id, or NCCL takes another."""
    command = ["python", copy / "03_ddp_multinode_spawn/train.py", "-n", 2, "-g", "1,2"]
    command += ["--data-dir", copy / "common", "--master-port", free_port(), "-i"]
    nodes = [
        Running([*command, node], tmp_path, CUDA_VISIBLE_DEVICES=gpus, FAKE_HOST=node)
        for node, gpus in enumerate((GPUS[0], ",".join(GPUS[1:3])))
    ]
    assert [node.finish().code for node in nodes] == [0, 0]
