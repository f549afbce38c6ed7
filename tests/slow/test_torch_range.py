"""Every script runs on the oldest and on the newest torch: one epoch, two processes, the CPU.

TORCH_OLDEST_PYTHON and TORCH_NEWEST_PYTHON name the Python of a virtual environment with torch
2.6.0 and the newest release, torchvision and tqdm.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, copy_project, fewer_digits, run

VERSIONS = {"TORCH_OLDEST_PYTHON": r"2\.6\.0", "TORCH_NEWEST_PYTHON": r"2\.(?!6\.)\d+\.\d+"}
SCRIPTS = [path for path in sorted(ROOT.glob("0*/*.py")) if path.name != "selftest.py"]


@pytest.fixture(scope="module", params=VERSIONS)
def environment(request):
    """The settings with which `python` and torchrun are those of one version, and the version."""
    python = os.environ.get(request.param)
    if not python:
        pytest.skip(f"{request.param} is not set")
    show = [python, "-c", "from importlib.metadata import version; print(version('torch'))"]
    version = subprocess.run(show, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.match(VERSIONS[request.param], version)
    path = f"{Path(python).parent}:{os.environ['PATH']}"
    warnings = "default::FutureWarning,default::DeprecationWarning"
    return {"PATH": path, "PYTHONWARNINGS": warnings, "OMP_NUM_THREADS": "1"}, version.strip()


def run_script(script, environment, tmp_path, *options):
    """Run a copy of a script with its run.sh, or with torchrun what needs a cluster or an engine.

    None of its own lines, nor those of common/, may use what that torch deprecates.
    """
    project = tmp_path / "project"
    copy = copy_project(project, script, "run.sh")
    fewer_digits(project)
    launch = ["bash", copy.with_name("run.sh"), *([] if script.name == "train.py" else [copy.name])]
    if script.parent.name in ("07_slurm", "08_docker"):
        launch = ["torchrun", "--standalone", "--nproc-per-node=2", copy]
    processes = {} if script.parent.name.startswith("03") else {"NPROC": "2"}  # two nodes of one
    result = run([*launch, *options], tmp_path, limit=300, **environment, **processes)
    own = [line for line in result.errors.splitlines() if line.startswith(str(project))]
    assert not re.search("(Future|Deprecation)Warning", "\n".join(own)), result
    return result


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_epoch(script, environment, tmp_path):
    settings, version = environment
    options = ["--epochs", 1, "--data-dir", tmp_path / "project/common"]
    result = run_script(script, settings, tmp_path, *options)
    if script.name == "fsdp.py" and version.startswith("2.6."):  # a defect of 2.6 on the CPU
        assert result.code == 1, result
        error = "AttributeError: 'Stream' object has no attribute 'record_event'"
        assert error in result.errors, result
        return
    assert result.code == 0, result
    assert [line["epoch"] for line in result.epochs()] == ["1"], result
    assert (tmp_path / "mnist.pt").is_file()


def test_selftest(environment, tmp_path):
    settings, _ = environment
    result = run_script(ROOT / "04_ddp_torchrun/selftest.py", settings, tmp_path)
    assert result.code == 0, result
    assert "OK: all checks passed on 2 ranks" in result.output, result
