"""The launch files of 02 to 06 on the oldest and on the newest torch: the tests that start them.

01 is 04 without its steps, 07 is 06 with two steps more, and 08 is 06.

TORCH_OLDEST_PYTHON and TORCH_NEWEST_PYTHON name the Python of a virtual environment with torch
2.6.0 and the newest release, and with the other packages of requirements.txt.
"""

import os
import re
from pathlib import Path

import pytest
from helpers import ROOT, run


@pytest.mark.parametrize(
    ("name", "version"),
    [("TORCH_OLDEST_PYTHON", r"2\.6\.0"), ("TORCH_NEWEST_PYTHON", r"2\.(?!6\.)\d+\.\d+")],
)
def test_every_launch_file(name, version, tmp_path):
    python = os.environ.get(name)
    if not python:
        pytest.skip(f"{name} is not set")
    show = "from importlib.metadata import version; print(version('torch'))"
    assert re.match(version, run([python, "-c", show], tmp_path).output)
    settings = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    tests = [path for path in (ROOT / "tests").glob("test_0?_*.py") if path.name[6] in "23456"]
    command = [python, "-m", "pytest", "-m", "launch", "-rA", *tests]
    result = run([*command, f"--basetemp={tmp_path}/tests"], tmp_path, limit=900, **settings)
    assert result.code == 0, result
    assert re.search(r"^=+ (9 passed|8 passed, .*1 xfailed)", result.output, re.M), result
