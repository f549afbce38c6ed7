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
    load,
    order_of,
    run,
    tools,
    torchrun,
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
06_checkpointing | RDZV_ENDPOINT=h:29400 'RDZV_ID=a run' | 6 | torchrun --nnodes=1:2 \
--nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=a run \
--rdzv-endpoint=h:29400 HERE/train.py
"""
# in place of torch, for run.sh
TORCH = """
import os, types
cuda = types.SimpleNamespace(device_count=lambda: int(os.environ.get("GPUS", 0)))
"""


@each_row(LAUNCHES)
def test_run_sh_starts(row, tmp_path):
    """With 12 cores, in another folder; threads per process are rounded up."""
    folder, settings, threads, launch = row
    settings = dict(each.split("=") for each in shlex.split(settings))
    echo = 'echo "%s $OMP_NUM_THREADS" "$@"'
    fake = {name: echo % name for name in ("python", "torchrun")}
    fake |= {"python3": f'exec "{sys.executable}" "$@"', "nproc": "echo 12"}
    settings |= {"PATH": tools(tmp_path / "fake", bare=True, **fake)}
    settings["PYTHONPATH"] = tmp_path
    (tmp_path / "torch.py").write_text(TORCH)
    script = ROOT / folder / "run.sh"
    result = run(["bash", script, "--lr", "a b"], tmp_path, **settings)
    launch = launch.replace("ALONE", ALONE).replace("HERE", str(script.parent))
    launcher, arguments = launch.split(" ", 1)
    assert result.output == f"{launcher} {threads} {arguments} --lr a b\n", result


def test_07_run_sh_prints_its_run_and_rejects_another_checkpoint(tmp_path):
    """But not options that begin like it. A site may not pass RUN and SCRIPT on."""
    settings = {
        "PATH": tools(tmp_path / "fake", srun='echo srun "$@"', scontrol="echo node"),
        "SLURM_JOB_ID": 7,
        "SLURM_JOB_NODELIST": "node",
        "SLURM_JOB_NUM_NODES": 1,
        "SLURM_CPUS_PER_TASK": 2,
    }
    command = ["bash", ROOT / "07_slurm/run.sh"]
    own = {"RUN": "a run", "SCRIPT": "my.py"}
    result = run([*command, "--check-val-every", 5], tmp_path, **settings, **own)
    start, launch = result.output.splitlines()
    assert result.code == 0 and start == "run a run: my.py --check-val-every 5", result
    files = "--checkpoint a run.ckpt --output a run.pt"
    assert launch.endswith(f"my.py {files} --check-val-every 5"), result
    for wrong in (["--checkpoint", "x"], ["--lr=1", "--checkpoint=x"]):
        result = run([*command, *wrong], tmp_path, **settings)
        assert result.output.startswith("run mnist-7: 07_slurm/train.py --"), result
        assert result.code == 2 and "set RUN=name instead of" in result.output, result


# script | processes that torchrun starts, or 0 for python | options | error
WRONG = r"""
01_dataparallel/train.py | 0 | --output /sys/new/a.pt | Error: .*'/sys/new'
03_ddp_multinode_spawn/train.py | 0 | -n 2 -g 1,1,1 | --nprocs must fit --nodes
04_ddp_torchrun/train.py | 0 | | KeyError: '(LOCAL_)?RANK'
04_ddp_torchrun/train.py | 1 | --sync-bn | SyncBatchNorm layers only work with GPU
06_checkpointing/train.py | 1 | --checkpoint /sys/new/a.pt | Error: .*'/sys/new'
06_checkpointing/train.py | 1 | --output a --checkpoint a | must be different files
06_checkpointing/train.py | 1 | --save-every 0 | ZeroDivisionError
07_slurm/fsdp.py | 1 | --output a --checkpoint a | must be different files
07_slurm/fsdp.py | 1 | --shards 2 | --shards 2 does not divide 1 ranks
"""


@each_row(WRONG)
def test_bad_input_is_an_error_that_names_it(row, tmp_path):
    """Before anything is written."""
    script, ranks, options, error = row
    options = ["--data-dir", ROOT / "common", *options.split()]
    command = ["python", ROOT / script, *options]
    if ranks > "0":
        command = torchrun(ROOT / script, ranks, *options)
    result = run(command, tmp_path / "run")
    assert result.code and re.search(error, result.errors), result
    assert "epoch 1" not in result.output and not [*(tmp_path / "run").iterdir()]


def test_05_does_not_train_on_the_cpu_of_a_machine_with_too_few_gpus(tmp_path):
    script = ROOT / "05_model_parallel/train.py"
    result = train(script, 2, cwd=tmp_path, fault="gpus:3", code=1)
    assert "4 GPUs are needed, 3 found: change --devices" in result.errors, result


def test_01_and_04_save_after_each_epoch(tmp_path):
    """They are killed after the first save of two."""
    fault = "signal_after:torch.save:1:9:0"
    alone = [sys.executable, ROOT / "tests/faults.py", fault, "train.py"]
    commands = {
        "01_dataparallel": [*alone, "--epochs=2"],
        "04_ddp_torchrun": torchrun("train.py", 2, "--epochs=2", fault=fault),
    }
    for folder, command in commands.items():
        project = copy_project(tmp_path / folder, f"{folder}/train.py", small="data")
        result = run(command, project, RANK=0, OMP_NUM_THREADS=1)
        assert result.code and len(result.epochs()) == 1, result
        assert load(project / "mnist.pt")


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
