"""Copies of this repository with few digits; no test sees a GPU but those of test_cuda.py."""

import os

import pytest
import torch
from helpers.checks import VERY_FEW
from helpers.paths import FOLDERS
from helpers.projects import CLOCK, FEW, copy_repository, edit, fewer_digits

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks torch; all commands inherit it
torch.set_num_threads(1)  # two threads wait for each other where other processes use the cores


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """A copy of this repository with few digits, in a path with a space."""
    return copy_repository(tmp_path_factory.mktemp("repository") / "a copy")


@pytest.fixture(scope="session")
def exact(tmp_path_factory):
    """Another with fewer digits, in float64, and epochs of 7 s: no mistake looks like rounding."""
    folder = copy_repository(tmp_path_factory.mktemp("exact") / "a copy")
    float64 = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
    edit(folder, "common/data.py", ("import torch\n", float64))
    fewer_digits(folder, now=FEW // 9, digits=VERY_FEW)
    for script in FOLDERS[:4]:
        edit(folder, f"{script}/train.py", *CLOCK)
    return folder
