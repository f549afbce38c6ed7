"""Launch files start what they show, options take effect, and bad input is an error."""

import re
import shlex
import sys

from helpers import (
    FOLDERS,
    ROOT,
    Running,
    copy_project,
    each_row,
    free_port,
    order_of,
    run,
    tools,
    torchrun,
    train,
)

ALONE = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node"
# folder | settings, with GPUS if nvidia-smi is installed | threads | what run.sh starts
LAUNCHES = """
01_dataparallel | | | python HERE/train.py
02_ddp_spawn | | | python HERE/train.py
03_ddp_multinode_spawn | | | python HERE/train.py --nodes 1 --node-rank 0 \
--master-addr 127.0.0.1 --master-port 29500
03_ddp_multinode_spawn | NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 | | \
python HERE/train.py --nodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500
04_ddp_torchrun | | 6 | ALONE=2 HERE/train.py
04_ddp_torchrun | GPUS=1 | | ALONE=gpu HERE/train.py
04_ddp_torchrun | GPUS=1 NPROC=5 | 3 | ALONE=5 HERE/train.py
04_ddp_torchrun | NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 OMP_NUM_THREADS=7 | 7 | \
torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=10.0.0.1 \
--master-port=29500 HERE/train.py
05_model_parallel | SCRIPT=fsdp.py | 6 | ALONE=2 HERE/fsdp.py
05_model_parallel | GPUS=1 SCRIPT=fsdp.py | | ALONE=gpu HERE/fsdp.py
05_model_parallel | GPUS=1 | 6 | ALONE=2 HERE/train.py
05_model_parallel | GPUS=1 SCRIPT=pipeline.py | 6 | ALONE=2 HERE/pipeline.py
06_checkpointing | GPUS=1 | | ALONE=gpu --max-restarts=3 HERE/train.py
06_checkpointing | SCRIPT=my.py | 6 | ALONE=2 --max-restarts=3 my.py
06_checkpointing | RDZV_ENDPOINT=h:29400 'RDZV_ID=a run' | 6 | torchrun --nnodes=1:2 \
--nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=a run \
--rdzv-endpoint=h:29400 HERE/train.py
"""


@each_row(LAUNCHES)
def test_run_sh_starts(row, tmp_path):
    """With 12 cores, in another folder; threads per process are rounded up."""
    folder, settings, threads, launch = row
    settings = dict(each.split("=") for each in shlex.split(settings))
    echo = 'echo "%s $OMP_NUM_THREADS" "$@"'
    fake = {name: echo % name for name in ("python", "torchrun")}
    if "GPUS" in settings:
        fake["nvidia-smi"] = "exit 1"
    script = ROOT / folder / "run.sh"
    path = tools(tmp_path / "fake", bare=True, nproc="echo 12", **fake)
    result = run(["bash", script, "--lr", "a b"], tmp_path, PATH=path, **settings)
    launch = launch.replace("ALONE", ALONE).replace("HERE", str(script.parent))
    launcher, arguments = launch.split(" ", 1)
    assert result.output == f"{launcher} {threads} {arguments} --lr a b\n", result


# script | processes that torchrun starts, or 0 for python | options | error
WRONG = r"""
01_dataparallel/train.py | 0 | --output /sys/new/a.pt | Error: .*'/sys/new'
03_ddp_multinode_spawn/train.py | 0 | -n 2 -g 1,1,1 | --nprocs must fit --nodes
04_ddp_torchrun/train.py | 0 | | KeyError: '(LOCAL_)?RANK'
04_ddp_torchrun/train.py | 1 | --sync-bn | SyncBatchNorm layers only work with GPU
06_checkpointing/train.py | 1 | --checkpoint /sys/new/a.pt | Error: .*'/sys/new'
07_slurm/fsdp.py | 1 | --shards 2 | --shards 2 does not divide 1 ranks
"""


@each_row(WRONG)
def test_bad_input_is_an_error_that_names_it(row, tmp_path):
    """Before anything is trained or written."""
    script, ranks, options, error = row
    options = ["--data-dir", ROOT / "common", *options.split()]
    command = ["python", ROOT / script, *options]
    if ranks > "0":
        command = torchrun(ROOT / script, ranks, *options)
    result = run(command, tmp_path / "run")
    assert result.code and re.search(error, result.errors), result
    assert "epoch" not in result.output and not [*(tmp_path / "run").iterdir()]


def test_the_last_lines_show_the_first_error(tmp_path):
    """Rank 1's, although rank 0 then fails because rank 1 has gone."""
    project = copy_project(tmp_path, "04_ddp_torchrun/train.py", small="data")
    image = order_of(1, 181, 2, seed=0)[101]
    result = train("train.py", 2, cwd=project, IMAGE=f"{image} 0", code=1)
    assert "OSError: this image cannot be read" in result.errors[-200:], result


def test_options_that_differ_between_machines_are_an_error(tmp_path):
    command = [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
    ]
    command.append(f"--master-port={free_port()}")
    script = ROOT / "04_ddp_torchrun/train.py"
    nodes = [
        Running([*command, f"--node-rank={n}", script, "--lr", n + 1], tmp_path)
        for n in range(2)
    ]
    error = "ValueError: lr differs between the ranks: ['1.0', '2.0']"
    for result in [node.finish() for node in nodes]:
        assert result.code and error in result.errors, result


def test_options_take_effect_and_each_rank_draws_other_numbers(tmp_path):
    """But all start with the weights of rank 0."""
    project = copy_project(
        tmp_path, "04_ddp_torchrun/train.py", small=("data", "model")
    )
    options = ["--seed", 7, "--amp", "--compile", "--batch-size", 16]
    output = train("train.py", 2, *options, cwd=project, FLOAT32=1).output
    found = re.findall("^.* on cpu in .*$", output, re.M)
    assert sorted(found) == [
        f"{what} on cpu in torch.{how}, seed {seed}, compiled {what == 'training'}"
        for what, how in (
            ("evaluation", "float32, gradients False"),
            ("training", "bfloat16, gradients True"),
        )
        for seed in (7, 8)
    ]


def test_a_file_above_a_project_is_not_imported_in_place_of_pythons(tmp_path):
    """profile.py, which torch needs."""
    copy_project(tmp_path / "copy", f"{FOLDERS[0]}/train.py")
    (tmp_path / "profile.py").write_text("raise SystemExit('imported')")
    result = run([sys.executable, "copy/train.py", "--help"], tmp_path)
    assert result.code == 0 and "--batch-size" in result.output, result
