"""The launch files: their form, and what they do before they start anything."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, label, run

LAUNCHERS = sorted(ROOT.glob("0*/run.sh"))
OTHERS = [ROOT / "08_docker/entrypoint.sh", ROOT / ".ci/run"]


@pytest.mark.parametrize("path", LAUNCHERS, ids=label)
def test_form(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    commands = [line for line in lines[1:] if line.startswith("#   ")]
    assert commands and all(re.search(rf"\bs?ba(sh|tch) {path.parent.name}/run.sh", line) for line in commands)
    assert lines.index("set -euo pipefail") == next(number for number, line in enumerate(lines) if line[:1] != "#")
    assert lines[-1].startswith("exec ") and lines[-1].endswith('"$@"')


def test_all_keep_the_memory_of_a_step_in_the_same_way():
    paths = [*LAUNCHERS[:-1], OTHERS[0]]  # 08's is the one in the container
    lines = {re.search(r"export MALLOC_MMAP_THRESHOLD_=\d+ MALLOC_TRIM_.*", path.read_text())[0] for path in paths}
    assert len(lines) == 1, lines


@pytest.mark.parametrize("path", [*LAUNCHERS, *OTHERS], ids=label)
def test_bash_and_shellcheck_find_nothing(path):
    subprocess.run(["bash", "-n", path], check=True, timeout=30)
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    check = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, check.stdout


@pytest.mark.parametrize("path", LAUNCHERS[:-1], ids=label)  # 08 needs no torch on the machine
def test_without_torch_it_says_what_to_run(path, tmp_path):
    python = os.path.realpath(shutil.which("python"))
    bare = bare_tools(tmp_path / "bare", python=[f'exec "{python}" -I -S "$@"'])  # which has no packages at all
    result = run(["bash", path], tmp_path, PATH=bare)
    assert result.code == 1, result
    command = f"python3 -m venv .venv && . .venv/bin/activate && pip install -r '{ROOT / 'requirements.txt'}'"
    assert result.errors == f"run.sh: no torch for python; run: {command}\n"


OR = "; or RDZV_ENDPOINT to an address of any of them"
RANKS = "NODE_RANK must be a number below NNODES, not '{}' of '{}'; RDZV_ENDPOINT needs none"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("NNODES=2", f"several nodes: set MASTER_ADDR to the address of node 0{OR}"),
        ("NNODES=2 MASTER_ADDR=h", f"several nodes: set NODE_RANK to 0, 1, ... on the nodes{OR}"),
        ("NNODES=2 MASTER_ADDR=h NODE_RANK=2", RANKS.format(2, 2)),
        ("NNODES=1:2 MASTER_ADDR=h NODE_RANK=0", RANKS.format(0, "1:2")),
        ("NNODES=two", "NNODES must be a number of nodes, or the fewest and the most as in 1:2, not 'two'"),
        ("NNODES=2 START_TIMEOUT=0", "START_TIMEOUT must be a number of seconds above 0, not '0'"),
        (
            "NNODES=2 MASTER_ADDR=h NODE_RANK=0 MAX_RESTARTS=1",
            "MAX_RESTARTS needs RDZV_ENDPOINT: at MASTER_ADDR, processes that start again cannot meet",
        ),
    ],
)
def test_wrong_settings_of_several_nodes(settings, line, tmp_path):
    settings = dict(setting.split("=") for setting in settings.split())
    result = run(["bash", ROOT / "04_ddp_torchrun/run.sh"], tmp_path, **settings)
    assert result.code == 1, result
    assert result.errors == f"error: {line}\n"


def test_03_needs_a_node_rank_beside_an_address(tmp_path):
    result = run(["bash", ROOT / "03_ddp_multinode_spawn/run.sh"], tmp_path, MASTER_ADDR="10.0.0.1")
    assert result.code == 2, result
    assert result.errors == "run.sh: set NODE_RANK to 0, 1, ... on the nodes\n"


def fake_tools(folder, **scripts):
    """A PATH on which these shell scripts come before the real tools of their names."""
    folder.mkdir()
    for name, lines in scripts.items():
        (folder / name).write_text("\n".join(["#!/bin/sh", *lines, ""]))
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def bare_tools(folder, **scripts):
    """A PATH on which there are bash, dirname and these shell scripts, and nothing else."""
    fake_tools(folder, **scripts)
    for tool in ("bash", "dirname"):
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["0 2 0,1", "1 2 2,3"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7", "NPROC": "1"}, ["0 1 4,5", "1 1 6,7"]),
        ({"NODE_RANK": "1", "NPROC": "8,2", "CUDA_VISIBLE_DEVICES": "3,5"}, ["1 8,2 3,5"]),
    ],
)
def test_two_nodes_here_share_the_gpus(settings, expected, tmp_path):
    python = [
        'case "$*" in',
        "  *device_count*) echo 4 ;;",
        "  *parse_args*) exit 100 ;;",
        f'  -c*) exec "{sys.executable}" "$@" ;;',
        '  *) echo "$NODE_RANK $NPROC $CUDA_VISIBLE_DEVICES" ;;',
        "esac",
    ]
    path = fake_tools(tmp_path / "fake", python=python, **{"nvidia-smi": []})
    result = run(["bash", ROOT / "03_ddp_multinode_spawn/run.sh"], tmp_path, PATH=path, **settings)
    assert result.code == 0, result
    assert sorted(result.output.splitlines()) == expected


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5", "08"])
def test_a_number_of_processes_that_is_none(number, tmp_path):
    result = run(["bash", ROOT / "04_ddp_torchrun/run.sh"], tmp_path, NPROC=number)
    assert result.code == 2, result
    assert result.errors == f"run.sh: NPROC must be a number above 0, not '{number}'\n"


def test_threads_are_the_cores_divided_by_the_processes(tmp_path):
    path = fake_tools(tmp_path / "fake", torchrun=['echo "$OMP_NUM_THREADS" "$@"'], nproc=["echo 12"])
    script = ROOT / "04_ddp_torchrun/run.sh"
    for settings, threads in (({}, 6), ({"OMP_NUM_THREADS": "3"}, 3)):
        result = run(["bash", script], tmp_path, PATH=path, **settings)
        assert result.output == f"{threads} --standalone --nproc-per-node=2 {script.parent / 'train.py'}\n", result
    result = run(["bash", script, "--lr", "0.1"], tmp_path, PATH=path, NPROC="30")
    assert re.match(r"1 --standalone --nproc-per-node=30 .*/train\.py --lr 0\.1\n", result.output), result
