"""Scripts differ only where a step mark says so, so that the diff is the documentation.

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


def marks(line, folder):
    """The step marks of this folder's family in the comment of a line."""
    family = FAMILIES.get(folder[:2])
    return re.findall(rf"\b(?:{family})\b", line.partition("#")[2]) if family else []


def below_the_imports(folder):
    """A script without its docstring and imports, which have no marks."""
    text = (ROOT / folder / "train.py").read_text().split('"""', 2)[2]
    return re.sub(r"^(import|from) .*\n", "", text, flags=re.M)


def code(folder):
    return [line.strip() for line in below_the_imports(folder).splitlines()]


@pytest.mark.parametrize("folder", BASES)
def test_every_change_is_marked(folder):
    base, script = code(BASES[folder]), code(folder)
    matcher = difflib.SequenceMatcher(None, base, script, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        added = [line for line in script[c:d] if line]
        removed = [line for line in base[a:b] if line]
        if kind != "equal" and added:
            assert marks(added[0], folder), f"no mark on the first of {added}"
        elif kind != "equal":
            assert all(marks(line, folder) for line in removed), f"no mark on {removed}"


def test_shared_lines_are_the_same():
    """So that what the tests of one script show holds for the others as well."""
    of_06, of_08 = [ROOT / name / "train.py" for name in ("06_checkpointing", "08_docker")]
    assert of_06.read_text() == of_08.read_text()
    for folder in ("02_ddp_spawn", "03_ddp_multinode_spawn"):
        lines = [line for line in code("04_ddp_torchrun") if re.search("DDP-[345]", line)]
        (missing,) = [line for line in lines if line not in code(folder)]
        assert missing.startswith('saves = os.environ["RANK"]')
    of_06, of_fsdp = [
        {part.name: ast.unparse(part) for part in ast.parse((ROOT / script).read_text()).body
         if isinstance(part, ast.FunctionDef | ast.ClassDef)}
        for script in ("06_checkpointing/train.py", "05_model_parallel/fsdp.py")
    ]
    for name in of_06.keys() & of_fsdp.keys() - {"parse_args", "train", "evaluate"}:
        assert of_06[name] == of_fsdp[name], name
    assert {"rest_of_epoch", "ByProgress", "in_steps", "stop_asked"} <= of_fsdp.keys()


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_each_script_is_one_file_without_private_names(path):
    """No name of torch that begins with an underscore, but the import that the exit needs."""
    text = path.read_text()
    imported = re.findall(r"^\s*(?:import|from) +(\w*)", text, re.M)
    assert imported and not {"", *(other.stem for other in SCRIPTS)} & set(imported)
    assert set(re.findall(r"\._[a-z]\w*", text)) <= {"._exit", "._dynamo"}
    assert "\nfaulthandler.register(signal.SIGUSR1)" in text


def test_common_stays_tiny():
    assert sum(len(path.read_text().splitlines()) for path in ROOT.glob("common/*.py")) < 180
