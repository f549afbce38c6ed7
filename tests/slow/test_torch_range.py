"""02 to 06 on the oldest and on the newest torch, by tests of the quick suite.

01 and 04 are 06 without some of its steps, 07 has two more, and 08 is 06. TORCH_OLDEST_PYTHON and
TORCH_NEWEST_PYTHON name the Python of a virtual environment with torch 2.8.0 and the newest
release, and with the other packages of requirements.txt.
"""

import os
import re
from pathlib import Path

import pytest
from helpers.commands import run
from helpers.paths import ROOT

TESTS = (
    "test_02_ddp_spawn.py::test_both_ranks_train_evaluate_and_save",
    "test_03_ddp_multinode_spawn.py::test_two_nodes_train_evaluate_and_save",
    "test_04_ddp_torchrun.py::test_selftest_passes",
    "test_05_model_parallel.py::test_takes_the_steps_of_one_device",
    "test_05_model_parallel.py::test_shards_take_the_steps_of_one_device",
    "test_05_model_parallel.py::test_split_linear_layers_take_the_steps_of_whole_ones",
    "test_06_checkpointing.py::test_two_ranks_train_and_a_rerun_has_nothing_to_do",
)


@pytest.mark.parametrize(("name", "version"), [
    ("TORCH_OLDEST_PYTHON", r"2\.8\.0"), ("TORCH_NEWEST_PYTHON", r"2\.(?!8\.)\d+\.\d+")
])
def test_scripts_and_launch_files(name, version, tmp_path):
    python = os.environ.get(name)
    if not python:
        pytest.skip(f"{name} is not set")
    show = "from importlib.metadata import version; print(version('torch'))"
    assert re.match(version, run([python, "-c", show], tmp_path).output)
    settings = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    command = [python, "-m", "pytest", "-rA", f"--basetemp={tmp_path}/tests"]
    command += [f"{ROOT}/tests/{test}" for test in TESTS]
    result = run(command, tmp_path, limit=900, **settings)
    assert result.code == 0, result  # pytest also ends with an error if one of them does not exist
    assert "SKIPPED" not in result.output, result
