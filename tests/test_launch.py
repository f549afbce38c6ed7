"""Launch files start what they show, options take effect, and bad input is an error."""

import os
import re
import sys

from helpers import (
    ROOT,
    TORCHRUN,
    copy_repository,
    each_row,
    lines,
    load,
    run,
    train,
)

ALONE = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node"
# folder | settings, with the number of GPUs | threads | what run.sh starts
LAUNCHES = """
01_dataparallel | | | python HERE/train.py
02_ddp_spawn | | | python HERE/train.py
03_ddp_multinode_spawn | | | python HERE/train.py --nodes 1 --node-rank 0 \
--master-addr 127.0.0.1 --master-port 29500
03_ddp_multinode_spawn | NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 | | \
python HERE/train.py --nodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500
04_ddp_torchrun | | 6 | ALONE=2 HERE/train.py
04_ddp_torchrun | GPUS=3 | 4 | ALONE=3 HERE/train.py
04_ddp_torchrun | GPUS=1 NPROC=5 | 3 | ALONE=5 HERE/train.py
04_ddp_torchrun | NPROC=0 | 6 | ALONE=2 HERE/train.py
04_ddp_torchrun | NPROC=auto | | ALONE=auto HERE/train.py
04_ddp_torchrun | NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 OMP_NUM_THREADS=7 | 7 | \
torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=10.0.0.1 \
--master-port=29500 HERE/train.py
05_model_parallel | | 6 | ALONE=2 HERE/train.py
05_model_parallel | GPUS=4 | 6 | ALONE=2 HERE/train.py
05_model_parallel | GPUS=3 | 12 | ALONE=1 HERE/train.py
05_model_parallel | GPUS=4 SCRIPT=my.py | 3 | ALONE=4 my.py
06_checkpointing | GPUS=2 | 6 | ALONE=2 --max-restarts=3 HERE/train.py
06_checkpointing | SCRIPT=my.py | 6 | ALONE=2 --max-restarts=3 my.py
06_checkpointing | RDZV_ENDPOINT=h:29400 RDZV_ID='a run' | 6 | torchrun --nnodes=1:2 \
--nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=a run \
--rdzv-endpoint=h:29400 HERE/train.py
"""
# in place of torch, for run.sh
TORCH = """
import os, types
cuda = types.SimpleNamespace(device_count=lambda: int(os.environ.get("GPUS", 0)))
"""


def tools(folder, **scripts):
    """A PATH on which these shell scripts come before the real tools."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@each_row(LAUNCHES)
def test_run_sh_starts(row, tmp_path):
    """With 12 cores, in another folder; threads per process are rounded up."""
    folder, settings, threads, launch = row
    echo = 'echo "%s $OMP_NUM_THREADS" "$@"'
    fake = {name: echo % name for name in ("python", "torchrun")}
    fake |= {"python3": f'exec "{sys.executable}" "$@"', "nproc": "echo 12"}
    path = tools(tmp_path / "fake", **fake)
    (tmp_path / "torch.py").write_text(TORCH)
    line = f'{settings} bash "{ROOT}/{folder}/run.sh" --lr "a b"'
    result = run(["bash", "-c", line], tmp_path, PATH=path, PYTHONPATH=tmp_path)
    launch = launch.replace("ALONE", ALONE).replace("HERE", f"{ROOT}/{folder}")
    launcher, arguments = launch.split(" ", 1)
    assert result.output == f"{launcher} {threads} {arguments} --lr a b\n", result


def test_07_run_sh_names_the_files(tmp_path):
    """It first prints run and script: a site may not pass RUN and SCRIPT on."""
    fake = tools(tmp_path / "fake", srun='echo "$@"', scontrol="echo node")
    settings = {"RUN": "a run", "SCRIPT": "my.py", "PATH": fake}
    for name in ("JOB_ID", "JOB_NODELIST", "JOB_NUM_NODES", "CPUS_PER_TASK"):
        settings[f"SLURM_{name}"] = 1
    command = ["bash", ROOT / "07_slurm/run.sh"]
    result = run([*command, "--check-val-every=5"], tmp_path, **settings)
    files = "--checkpoint a run.ckpt --output a run.pt --check-val-every=5\n"
    assert result.output.startswith("run a run: my.py --check-val-every=5\n"), result
    assert result.output.endswith(f"my.py {files}"), result
    result = run([*command, "--checkpoint=x"], tmp_path, **settings)
    assert "set RUN=name instead of --checkpoint" in result.output, result


# command | error
WRONG = r"""
python 03_ddp_multinode_spawn/train.py -n 2 -g 1,1,1 | --nprocs must fit --nodes
python 04_ddp_torchrun/train.py | KeyError: '(LOCAL_)?RANK'
ALONE=1 06_checkpointing/train.py --output a --checkpoint a | must be different files
"""
MORE = r"""
python 01_dataparallel/train.py --output /sys/new/a.pt | Error: .*'/sys/new'
ALONE=1 04_ddp_torchrun/train.py --sync-bn | SyncBatchNorm layers only work with GPU
ALONE=1 06_checkpointing/train.py --checkpoint /sys/new/a.pt | Error: .*'/sys/new'
ALONE=1 06_checkpointing/train.py --save-every 0 | ZeroDivisionError
ALONE=1 07_slurm/fsdp.py --output a --checkpoint a | must be different files
ALONE=1 07_slurm/fsdp.py --shards 2 | --shards 2 does not divide 1 ranks
"""


@each_row(WRONG, slow=MORE)
def test_bad_input_is_an_error_that_names_it(row, tmp_path):
    """Before anything is written."""
    command, error = row
    copy = copy_repository(tmp_path / "a copy")
    command = command.replace("ALONE", ALONE).split()
    before = {*copy.iterdir()}
    result = run([*command, "--data-dir=common"], copy)
    assert result.code and re.search(error, result.errors), result
    assert "epoch 1" not in result.output and before == {*copy.iterdir()}


def test_a_failed_run_has_saved_its_last_epoch_and_ends_with_the_first_error(tmp_path):
    """Rank 1's, although rank 0 then fails because rank 1 has gone."""
    project = copy_repository(tmp_path / "a project", small=True)
    settings = {"READ": "1 150 0", "code": 1, "cwd": project}
    result = train("04_ddp_torchrun/train.py", 2, "--epochs=3", **settings)
    assert "OSError: this image cannot be read" in result.errors[-200:], result
    assert len(lines(result)) == 1 and load(project / "mnist.pt"), result


def test_options_that_differ_between_the_ranks_are_an_error(tmp_path):
    """As on two machines, with two commands."""
    line = f'python "{ROOT}/04_ddp_torchrun/train.py" --lr=$RANK'
    command = [*TORCHRUN, "--nproc-per-node=2", "--no-python", "bash", "-c", line]
    result = run(command, tmp_path)
    error = "ValueError: lr differs between the ranks: ['0.0', '1.0']"
    assert result.code and error in result.errors, result
