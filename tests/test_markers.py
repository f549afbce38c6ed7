"""The step marks match the diffs: each change has its mark, and nothing else has one. There are no exceptions."""

import difflib
import re
import subprocess

import pytest
from helpers import FOLDERS, ROOT, label

BASES = {  # a script: what it builds on
    "02_ddp_spawn": "01_dataparallel",
    "03_ddp_multinode_spawn": "01_dataparallel",
    "04_ddp_torchrun": "01_dataparallel",
    "06_checkpointing": "04_ddp_torchrun",
    "07_slurm": "06_checkpointing",
}
SHOWN = {**BASES, "03_ddp_multinode_spawn": "02_ddp_spawn"}  # what its README compares it with: the nearest
# The family of a section's own steps; 08 has none
FAMILIES = {"01": "DP", "02": "DDP", "03": "DDP", "04": "DDP", "05": "MP", "06": "CKPT", "07": "SLURM"}


def marks(line, folder):
    """The step marks in the comment of a line that are of this folder's own steps."""
    family = FAMILIES.get(folder[:2])
    return re.findall(rf"\b{family}-\d+\b", line.partition("#")[2]) if family else []


def code(folder):
    """The lines of a script after its docstring, without indentation, as `git diff -w` sees them."""
    text = (ROOT / folder / "train.py").read_text()
    return [line.strip() for line in text.split('"""', 2)[2].splitlines()]


def blocks(folder):
    """The parts in which a script differs from its base or not: (is equal, lines of the base, lines of the script)."""
    base, script = code(BASES[folder]), code(folder)
    for kind, a, b, c, d in difflib.SequenceMatcher(None, base, script, autojunk=False).get_opcodes():
        yield kind == "equal", base[a:b], script[c:d]


def test_each_script_has_a_base():
    assert set(FOLDERS) == {*BASES, "01_dataparallel", "05_model_parallel", "08_docker"}  # 05 is another idea, 08 is 06


@pytest.mark.parametrize("folder", BASES)
def test_every_change_is_marked(folder):
    for equal, base, script in blocks(folder):
        if not equal and any(script):
            first = next(line for line in script if line)
            assert marks(first, folder), f"{folder}: no mark on the first line of\n" + "\n".join(script)
        if not equal and not any(script):
            assert not any(base) or all(marks(line, folder) for line in base if line), f"{folder} lacks {base}"


@pytest.mark.parametrize("folder", BASES)
def test_nothing_else_is_marked(folder):
    for equal, _, script in blocks(folder):
        if equal:
            assert not [line for line in script if marks(line, folder)]


COPIES = [  # so that each folder stands alone
    ("06_checkpointing/join.py", "04_ddp_torchrun/join.py"),
    ("07_slurm/checkpoint.py", "06_checkpointing/checkpoint.py"),
    *((f"08_docker/{name}", f"06_checkpointing/{name}") for name in ("train.py", "checkpoint.py", "join.py")),
]
MEANINGS = {  # of each step, words that stand only in code of that step
    "DDP-1": ("init_process_group", "destroy_process_group", "timedelta"),
    "DDP-2": ("DDP(", "DistributedDataParallel", "convert_sync_batchnorm"),
    "DDP-3": ("DistributedSampler(", "set_epoch", "total_size"),
    "DDP-5": ("gather_in_order", "dist.broadcast(", "dist.all_reduce("),
    "DDP-7": ("no_sync()", "args.accumulate", "window"),
    "CKPT-1": ("state_dict()", "args.save_every"),
    "CKPT-3": ("checkpoint.read(", "checkpoint.share("),
    "CKPT-4": ("RestOfEpoch(", "Generator()", 'place["seconds"]'),
    "CKPT-5": ("ignore_signals", "catch_signals", "agreed"),
    "SLURM-1": ("slurm",),
    "SLURM-2": ("stopped", "bool(stop)"),
}


def test_the_numbers_mean_the_same_everywhere():
    for folder in BASES:
        for equal, _, script in blocks(folder):
            carried = {mark for line in script for mark in marks(line, folder)}
            for mark, words in MEANINGS.items():
                for word in words:
                    if not equal and mark.startswith(FAMILIES[folder[:2]]) and any(word in line for line in script):
                        assert mark in carried, f"{folder}: {word} without {mark} in\n" + "\n".join(script)
    assert "DDP-6" in (ROOT / "common/gather.py").read_text()


def test_01_has_one_marked_line():
    assert len([line for line in code("01_dataparallel") if marks(line, "01_dataparallel")]) == 1


def test_04_is_01_and_at_most_45_lines():
    paths = [f"{folder}/train.py" for folder in ("01_dataparallel", "04_ddp_torchrun")]
    command = ["git", "diff", "--no-index", "-w", "--unified=0", *paths]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
    changes = re.split(r"^@@.*@@.*\n", diff, flags=re.M)[1:]
    docstrings = [line for path in paths for line in (ROOT / path).read_text().split("import ", 1)[0].splitlines()]
    lines = [line for change in changes for line in change.splitlines()]
    counted = [line for line in lines if not aside(line[1:], docstrings)]
    assert 20 < len(counted) <= 45


def aside(line, docstrings):
    """Whether a line is an import or of a docstring: these are not counted."""
    return re.match(r"(import|from) ", line) or (line.strip() and line in docstrings)


@pytest.mark.parametrize("path", sorted(ROOT.glob("0*/*.py")), ids=label)
def test_scripts_stay_short(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= (150 if path.parent.name < "06" else 200)
    assert max(map(len, lines)) <= 120


def test_common_stays_tiny():
    assert sum(len(path.read_text().splitlines()) for path in ROOT.glob("common/*.py")) < 150


@pytest.mark.parametrize(("copy", "original"), COPIES)
def test_what_folders_copy_is_the_same(copy, original):
    assert (ROOT / copy).read_bytes() == (ROOT / original).read_bytes()
