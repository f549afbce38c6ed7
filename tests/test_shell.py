"""The launch files: their form, and what they do before they start anything."""

import os
import re
import shutil
import subprocess

import pytest
from helpers import ROOT, label, run

LAUNCHERS = sorted(ROOT.glob("0*/run.sh"))


@pytest.mark.parametrize("path", LAUNCHERS, ids=label)
def test_form(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    commands = [line for line in lines[1:] if line.startswith("#   ")]
    assert commands and all(f"bash {path.parent.name}/run.sh" in line for line in commands)
    assert lines.index("set -euo pipefail") == next(number for number, line in enumerate(lines) if line[:1] != "#")
    assert lines[-1].startswith("exec ") and lines[-1].endswith('"$@"')


@pytest.mark.parametrize("path", [*LAUNCHERS, ROOT / ".ci/run"], ids=label)
def test_bash_and_shellcheck_find_nothing(path):
    subprocess.run(["bash", "-n", path], check=True, timeout=30)
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    check = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, check.stdout


@pytest.mark.parametrize("path", LAUNCHERS, ids=label)
def test_without_torch_it_says_what_to_run(path, tmp_path):
    # a PATH with the shell's tools and a python that has no packages at all
    bare = tmp_path / "bare"
    bare.mkdir()
    for tool in ("bash", "dirname"):
        (bare / tool).symlink_to(shutil.which(tool))
    (bare / "python").write_text('#!/bin/sh\nexec "$REAL_PYTHON" -I -S "$@"\n')
    (bare / "python").chmod(0o755)
    python = os.path.realpath(shutil.which("python"))
    result = run([shutil.which("bash"), path], tmp_path, PATH=str(bare), REAL_PYTHON=python)
    assert result.code == 1, result
    command = f"python3 -m venv .venv && . .venv/bin/activate && pip install -r '{ROOT / 'requirements.txt'}'"
    assert result.errors == f"run.sh: no torch for python; run: {command}\n"


def test_more_nodes_need_an_address_and_a_rank(tmp_path):
    script = ROOT / "04_ddp_torchrun/run.sh"
    for given, missing in (({}, "MASTER_ADDR"), ({"MASTER_ADDR": "127.0.0.1"}, "NODE_RANK")):
        result = run(["bash", script], tmp_path, NNODES="2", **given)
        assert result.code != 0, result
        assert len(result.errors.splitlines()) == 1 and missing in result.errors, result


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5", "08"])
def test_a_number_of_processes_that_is_none(number, tmp_path):
    result = run(["bash", ROOT / "04_ddp_torchrun/run.sh"], tmp_path, NPROC=number)
    assert result.code == 2, result
    assert result.errors == f"run.sh: NPROC must be a number above 0, not '{number}'\n"


def test_threads_are_the_cores_divided_by_the_processes(tmp_path):
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "torchrun").write_text('#!/bin/sh\necho "$OMP_NUM_THREADS" "$@"\n')
    (fake / "nproc").write_text("#!/bin/sh\necho 12\n")
    for tool in fake.iterdir():
        tool.chmod(0o755)
    script = ROOT / "04_ddp_torchrun/run.sh"
    path = f"{fake}:{os.environ['PATH']}"
    for settings, threads in (({}, 6), ({"OMP_NUM_THREADS": "3"}, 3)):
        result = run(["bash", script], tmp_path, PATH=path, **settings)
        assert result.output == f"{threads} --standalone --nproc-per-node=2 {script.parent / 'train.py'}\n", result
    result = run(["bash", script, "--lr", "0.1"], tmp_path, PATH=path, NPROC="30")
    assert re.match(r"1 --standalone --nproc-per-node=30 .*/train\.py --lr 0\.1\n", result.output), result
