"""The diff is the documentation: every change against a script's base has its step mark.

There are no exceptions. A script is one file, with a tiny common/ next to it.
"""

import ast
import difflib
import re

import pytest
from helpers.paths import ROOT, label

BASES = {  # each script and the script that it builds on
    "02_ddp_spawn": "01_dataparallel",
    "03_ddp_multinode_spawn": "01_dataparallel",
    "04_ddp_torchrun": "01_dataparallel",
    "06_checkpointing": "04_ddp_torchrun",
    "07_slurm": "06_checkpointing",
}
SHOWN = {**BASES, "03_ddp_multinode_spawn": "02_ddp_spawn"}  # what its README compares it with
# The steps that each folder marks; 08 has none
FAMILIES = {"01": r"DP-\d+", "02": r"DDP-\d+", "03": r"DDP-\d+", "04": r"DDP-\d+"}
FAMILIES |= {"05": r"MP-\d+", "06": r"CKPT-\d+|DDP-7", "07": r"SLURM-\d+"}
SCRIPTS = sorted(ROOT.glob("0*/*.py"))
LAUNCHERS = sorted(ROOT.glob("0*/run.sh"))


def marks(line, folder):
    """The step marks of this folder's family in the comment of a line."""
    family = FAMILIES.get(folder[:2])
    return re.findall(rf"\b(?:{family})\b", line.partition("#")[2]) if family else []


def code(folder):
    """The lines of a script without its docstring, imports and indentation."""
    return [line.strip() for line in below_the_docstring(folder).splitlines()]


def below_the_docstring(folder):
    """A script without its docstring and imports, which have no marks."""
    text = (ROOT / folder / "train.py").read_text().split('"""', 2)[2]
    return re.sub(r"^(import|from) .*\n", "", text, flags=re.M)


def test_fsdp_is_stopped_and_resumed_by_the_definitions_of_06():
    of_06, of_fsdp = [
        {part.name: ast.unparse(part) for part in ast.parse((ROOT / script).read_text()).body
         if isinstance(part, ast.FunctionDef | ast.ClassDef)}
        for script in ("06_checkpointing/train.py", "05_model_parallel/fsdp.py")
    ]
    own = {"parse_args", "train", "evaluate"}  # of each script
    for name in of_06.keys() & of_fsdp.keys() - own:
        assert of_06[name] == of_fsdp[name], name
    assert {"rest_of_epoch", "ByProgress", "in_steps", "stop_asked"} <= of_fsdp.keys()


@pytest.mark.parametrize("folder", BASES)
def test_every_change_is_marked(folder):
    """And nothing else is."""
    base, script = code(BASES[folder]), code(folder)
    matcher = difflib.SequenceMatcher(None, base, script, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        added = [line for line in script[c:d] if line]
        removed = [line for line in base[a:b] if line]
        if kind == "equal":
            assert not any(marks(line, folder) for line in added), f"a mark in {added}"
        elif added:
            assert marks(added[0], folder), f"no mark on the first of {added}"
        else:
            assert all(marks(line, folder) for line in removed), f"no mark on {removed}"


@pytest.mark.parametrize("folder", ["02_ddp_spawn", "03_ddp_multinode_spawn"])
def test_02_and_03_shard_log_and_gather_as_04(folder):
    """So that what the tests of 04 show of these lines holds for them as well."""
    lines = [line for line in code("04_ddp_torchrun") if re.search("DDP-[345]", line)]
    missing = [line for line in lines if line not in code(folder)]
    assert len(missing) == 1 and missing[0].startswith('saves = os.environ["RANK"]')


def test_04_adds_few_lines_to_01():
    """Below the imports: what a reader of the diff has to understand."""
    base, script = (code(folder)[code(folder).index("def parse_args():") :]
                    for folder in ("01_dataparallel", "04_ddp_torchrun"))
    added = [line for line in difflib.ndiff(base, script) if line.startswith("+ ")]
    assert 0 < len(added) <= 35


def test_08_trains_with_the_script_of_06():
    scripts = [ROOT / folder / "train.py" for folder in ("06_checkpointing", "08_docker")]
    assert scripts[0].read_bytes() == scripts[1].read_bytes()


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_a_script_imports_only_packages_and_common(path):
    imported = re.findall(r"^\s*(?:import|from) +([\w.]+)", path.read_text(), re.M)
    neighbours = {other.stem for other in SCRIPTS}
    assert imported and not {"", *neighbours} & {name.split(".")[0] for name in imported}


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_sigusr1_shows_where_a_script_is(path):
    assert "\nfaulthandler.register(signal.SIGUSR1)" in path.read_text()


@pytest.mark.parametrize("path", [*SCRIPTS, *LAUNCHERS], ids=label)
def test_nothing_private_is_used(path):
    """No name of torch that begins with an underscore, but the import that the exit needs."""
    names = re.findall(r"\._[a-z]\w*", path.read_text())
    assert set(names) <= {"._exit", "._dynamo"}


def test_common_stays_tiny():
    assert sum(len(path.read_text().splitlines()) for path in ROOT.glob("common/*.py")) < 180
