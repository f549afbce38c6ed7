"""The launch files: their form, and what they do before they start anything."""

import os
import re
import shutil
import subprocess

import pytest
from helpers import FOLDERS, ROOT, Running, bare_tools, fake_tools, label, run

LAUNCHERS = sorted(ROOT.glob("0*/run.sh"))
PYTHON = FOLDERS[:7]  # 08 needs Docker only
IN_A_JOB = {"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "1"}  # or 07 submits one, others ignore it


@pytest.mark.parametrize("path", [*LAUNCHERS, ROOT / ".ci/run"], ids=label)
def test_form(path):
    text = path.read_text()
    assert re.sub("^#.*\n", "", text, flags=re.M).startswith("set -euo pipefail\n")
    if path.parent.name in PYTHON:  # faster training: all set the same memory thresholds
        assert "export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 #" in text
    if shutil.which("shellcheck"):
        check = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=60)
        assert check.returncode == 0, check.stdout


@pytest.mark.parametrize("folder", PYTHON)
def test_without_torch_one_line_says_how_to_install_it(folder, tmp_path):
    python = os.path.realpath(shutil.which("python"))
    path = bare_tools(tmp_path / "bare", python=f'exec "{python}" -I -S "$@"')  # no packages
    result = run(["bash", ROOT / folder / "run.sh"], tmp_path, PATH=path, **IN_A_JOB)
    assert result.code == 1, result
    how = "PyTorch is not installed for this Python: pip install -r requirements.txt"
    assert result.errors == f"run.sh: {how}\n"


@pytest.mark.parametrize("path", LAUNCHERS, ids=label)
def test_help_is_printed_once_and_starts_nothing(path, tmp_path):
    tool = 'case "$*" in *train.py*--help) echo help ;; *device_count*) echo 0 ;; esac'
    launchers = {"torchrun": "echo started", "sbatch": "echo started"}
    tools = fake_tools(tmp_path / "tools", python=tool, docker=tool, **launchers)
    result = run(["bash", path, "--epochs", "1", "--help"], tmp_path, PATH=tools)
    assert (result.code, result.output) == (0, "help\n"), result


def test_a_wrong_option_is_reported_once(tmp_path):
    """All folders at once, to keep two cores busy; with a number of processes that does not fit."""
    wrong = "train.py: error: argument --epochs: must be above 0, not 0"
    given = {folder: ("--epochs 0", {}, wrong) for folder in PYTHON}
    wrong = "pipeline.py: error: the network has 2 stages: start 2 processes, not 3"
    given["05_model_parallel"] = ("pipeline.py", {"NPROC": "3"}, wrong)
    jobs = []
    for folder, (options, settings, error) in given.items():
        command = ["bash", ROOT / folder / "run.sh", *options.split()]
        jobs.append((Running(command, tmp_path, **IN_A_JOB, **settings), error))
    for job, error in jobs:
        result = job.finish()
        usage = f"usage: {error.split(':')[0]} [options]"
        assert (result.code, result.output) == (2, ""), result
        assert result.errors.splitlines() == [usage, error], result
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("folder", "settings", "code", "line"), [
    ("03_ddp_multinode_spawn", "NODE_RANK=0", 1, "MASTER_ADDR: set it to an address of node 0"),
    ("04_ddp_torchrun", "NNODES=2", 1, "MASTER_ADDR: set it to an address of node 0"),
    ("04_ddp_torchrun", "NNODES=2 MASTER_ADDR=h", 1, "NODE_RANK: set it to 0, 1, ..."),
    ("04_ddp_torchrun", "NODE_RANK=1", 1, "NNODES: set it to the number of nodes"),
    ("04_ddp_torchrun", "NNODES=2 MASTER_ADDR=h MAX_RESTARTS=1", 2, "needs RDZV_ENDPOINT"),
])
def test_several_nodes_need_their_settings(folder, settings, code, line, tmp_path):
    python = 'case "$*" in -c*) echo 0 ;; *--check*) ;; *) echo started ;; esac'
    path = fake_tools(tmp_path / "fake", python=python, torchrun="echo started")
    settings = dict(setting.split("=") for setting in settings.split())
    result = run(["bash", ROOT / folder / "run.sh"], tmp_path, PATH=path, **settings)
    assert result.code == code, result
    assert result.errors.splitlines()[-1].endswith(line), result
    assert "started" not in result.output, result


def test_threads_are_the_cores_divided_by_the_processes(tmp_path):
    torchrun = 'echo "$OMP_NUM_THREADS" "$@"'
    python = 'case "$*" in *--check*) echo 0 ;; esac'  # no GPU
    path = fake_tools(tmp_path / "fake", python=python, torchrun=torchrun, nproc="echo 12")
    script = ROOT / "04_ddp_torchrun/run.sh"
    launch = f"--standalone --nproc-per-node={{}} {script.parent / 'train.py'} --lr 1\n"
    for settings, threads, nproc in (({}, 6, 2), ({"NPROC": "30"}, 1, 30)):
        result = run(["bash", script, "--lr", "1"], tmp_path, PATH=path, **settings)
        assert result.output == f"{threads} {launch.format(nproc)}", result
