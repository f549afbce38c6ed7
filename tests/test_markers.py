"""The diff is the documentation: every change against a script's base has its step mark.

There are no exceptions. The form of the folders and the length of the files are held here as well.
"""

import difflib
import re

import pytest
from helpers import FOLDERS, ROOT, label

BASES = {  # each script and the script that it builds on
    "02_ddp_spawn": "01_dataparallel",
    "03_ddp_multinode_spawn": "01_dataparallel",
    "04_ddp_torchrun": "01_dataparallel",
    "06_checkpointing": "04_ddp_torchrun",
    "07_slurm": "06_checkpointing",
}
SHOWN = {**BASES, "03_ddp_multinode_spawn": "02_ddp_spawn"}  # what its README compares it with
# The steps that each folder marks; 08 has none
FAMILIES = {"01": "DP", "02": "DDP", "03": "DDP", "04": "DDP"}
FAMILIES |= {"05": "MP", "06": "CKPT", "07": "SLURM"}
FILES = {  # of each folder
    "01_dataparallel": {"train.py"},
    "02_ddp_spawn": {"train.py"},
    "03_ddp_multinode_spawn": {"train.py"},
    "04_ddp_torchrun": {"train.py", "selftest.py"},
    "05_model_parallel": {"train.py", "pipeline.py", "tensor_parallel.py", "fsdp.py"},
    "06_checkpointing": {"train.py"},
    "07_slurm": {"train.py"},
    "08_docker": {"train.py", "Dockerfile", "compose.yaml"},
}
SCRIPTS = sorted(ROOT.glob("0*/*.py"))


def marks(line, folder):
    """The step marks of this folder's family in the comment of a line."""
    family = FAMILIES.get(folder[:2])
    return re.findall(rf"\b{family}-\d+\b", line.partition("#")[2]) if family else []


def code(folder):
    """The lines of a script after its docstring, without indentation, as `git diff -w` does."""
    text = (ROOT / folder / "train.py").read_text()
    return [line.strip() for line in text.split('"""', 2)[2].splitlines()]


def blocks(folder):
    """The blocks of a script and of its base: (are they equal, the base's lines, the script's)."""
    base, script = code(BASES[folder]), code(folder)
    matcher = difflib.SequenceMatcher(None, base, script, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        yield kind == "equal", base[a:b], script[c:d]


@pytest.mark.parametrize("folder", BASES)
def test_every_change_is_marked(folder):
    for equal, base, script in blocks(folder):
        added = [line for line in script if line]
        removed = [line for line in base if line]
        if not equal and added:
            assert marks(added[0], folder), f"no mark on the first of {added}"
        elif not equal:
            assert all(marks(line, folder) for line in removed), f"no mark on {removed}"


@pytest.mark.parametrize("folder", BASES)
def test_nothing_else_is_marked(folder):
    for equal, _, script in blocks(folder):
        assert not (equal and any(marks(line, folder) for line in script)), script


MEANINGS = {  # words that only code of a step has
    "DDP-1": ("init_process_group", "destroy_process_group", "timedelta"),
    "DDP-2": ("DDP(", "DistributedDataParallel", "convert_sync_batchnorm"),
    "DDP-3": ("DistributedSampler(", "set_epoch", "total_size"),
    "DDP-4": ("disable=disable",),
    "DDP-5": ("gather_in_order", "dist.broadcast(", "dist.all_reduce(total_loss)"),
    "DDP-7": ("no_sync()", "args.accumulate", "images_in_step"),
    "CKPT-1": ("save(epoch", "args.save_every"),
    "CKPT-2": ("os.replace(",),
    "CKPT-3": ("load_checkpoint(", "describe_run(args, images)", "torch.load("),
    "CKPT-4": ("RestOfEpoch(", "manual_seed(", "images_done ="),
    "CKPT-5": ("ignore_stop_signals", "catch_stop_signals", "stop_known"),
    "SLURM-1": ("SLURM_PROCID",),
    "SLURM-2": ("requeue", "SLURM_RESTART_COUNT"),
}


def test_the_numbers_mean_the_same_everywhere():
    for folder in BASES:
        for equal, _, script in blocks(folder):
            carried = {mark for line in script for mark in marks(line, folder)}
            for mark, words in MEANINGS.items():
                named = [word for word in words for line in script if word in line]
                if not equal and mark.startswith(FAMILIES[folder[:2]]) and named:
                    assert mark in carried, f"{folder}: {named} without {mark} in {script}"
    assert "DDP-6" in (ROOT / "common/gather.py").read_text()


def test_the_diff_of_04_against_01_stays_small():
    """Characters, so that a long line that is split counts as before; without the imports."""
    changed = [
        line
        for equal, base, script in blocks("04_ddp_torchrun")
        for line in base + script
        if not equal and not re.match(r"(import|from) ", line)
    ]
    assert sum(map(len, changed)) <= 3350


def test_each_folder_has_a_base_and_its_files():
    assert set(FOLDERS) == {*BASES, "01_dataparallel", "05_model_parallel", "08_docker"}
    for folder in FOLDERS:
        files = [path for path in (ROOT / folder).iterdir() if path.is_file()]
        names = {path.name for path in files if path.suffix != ".pt"}  # what a run writes
        assert names == {"README.md", "run.sh", *FILES[folder]}


def test_08_trains_with_the_script_of_06():
    scripts = [ROOT / folder / "train.py" for folder in ("06_checkpointing", "08_docker")]
    assert scripts[0].read_bytes() == scripts[1].read_bytes()


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_a_script_imports_only_packages_and_common(path):
    neighbours = {other.stem for other in SCRIPTS}
    imported = re.findall(r"^\s*(?:import|from) +([\w.]+)", path.read_text(), re.M)
    assert imported and not neighbours & {name.split(".")[0] for name in imported}
    assert not re.search(r"^\s*from +\.", path.read_text(), re.M)


def test_lines_are_short():
    for pattern in ("0*/*.py", "common/*.py", "tests/**/*.py"):
        for path in ROOT.glob(pattern):
            longest = max(map(len, path.read_text().splitlines()), default=0)
            assert longest <= 100, f"{path} has a line of {longest} columns"


def test_common_stays_tiny():
    assert sum(len(path.read_text().splitlines()) for path in ROOT.glob("common/*.py")) < 180
