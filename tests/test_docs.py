"""Scripts differ only where a step mark says so, and READMEs show what the code does.

After a change of a script or a patch, write it into the READMEs with

    REWRITE_DOCS=1 python -m pytest tests/test_docs.py
"""

import ast
import difflib
import itertools
import os
import re
import subprocess
import textwrap
from collections import Counter

import network
import pytest
from helpers.commands import EPOCH
from helpers.paths import FOLDERS, ROOT, label
from helpers.projects import COPIES
from helpers.readmes import MAIN, READMES, blocks, commands, rows, sections
from helpers.scripts import parse
from torch.distributed.run import get_args_parser

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
CHANGES = "What changes, step by step"
LAUNCHERS = ("python ", "torchrun ", "export TORCH_", "sbatch ", "salloc ", "docker ")
HUNK = re.compile(r"^@@ \S+ \+(\d+),?(\d*) @@.*\n((?:[-+].*\n)*)", re.M)
OPTION = re.compile("--[a-z-]+")


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
    """There are no exceptions."""
    base, script = code(BASES[folder]), code(folder)
    matcher = difflib.SequenceMatcher(None, base, script, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        added, removed = filter(None, script[c:d]), filter(None, base[a:b])
        if kind != "equal" and (first := next(added, None)):
            assert marks(first, folder), f"no mark on the first of {script[c:d]}"
        elif kind != "equal":
            assert all(marks(line, folder) for line in removed), f"no mark on {base[a:b]}"


def definitions(script):
    """The functions and classes of a script, without comments."""
    parts = ast.parse((ROOT / script).read_text()).body
    kinds = ast.FunctionDef | ast.ClassDef
    return {part.name: ast.unparse(part) for part in parts if isinstance(part, kinds)}


def test_shared_lines_are_the_same():
    """So that what the tests of one script show holds for the others as well."""
    of_06, of_08 = [ROOT / name / "train.py" for name in ("06_checkpointing", "08_docker")]
    assert of_06.read_text() == of_08.read_text()
    for folder in ("02_ddp_spawn", "03_ddp_multinode_spawn"):
        lines = [line for line in code("04_ddp_torchrun") if re.search("DDP-[345]", line)]
        (missing,) = [line for line in lines if line not in code(folder)]
        assert missing.startswith('saves = os.environ["RANK"]')
    of_06, of_fsdp = definitions("06_checkpointing/train.py"), definitions(f"{FOLDERS[4]}/fsdp.py")
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
    assert sum(len(file.read_text().splitlines()) for file in ROOT.glob("common/*.py")) < 180


def git_diff(*arguments):
    command = ["git", "diff", "--no-index", "-w", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def hold(path, shown, generated):
    """Compare what a README shows with what was generated; with REWRITE_DOCS, write it there."""
    text = path.read_text()
    assert text.count(shown) == 1, shown
    if "REWRITE_DOCS" in os.environ:
        path.write_text(text.replace(shown, generated))
    else:
        assert shown == generated, "REWRITE_DOCS=1 python -m pytest tests/test_docs.py"


def hunks(folder, diff, script):
    """git's hunks as pairs of a mark and a text: a hunk of several marks is divided.

    A line without a mark has the one of the nearest line above it. If the last line opens a block,
    the line below it is shown as well, as -w hides that it is indented.
    """
    mark, place, of_line = None, "", []
    for line in script:
        mark = (marks(line, folder) or [mark])[0]
        if line.startswith(("def ", "class ")):
            place = f" {line.split('  #')[0]}"
        of_line.append((mark, place if line.startswith(" ") else ""))
    for first, length, body in HUNK.findall(diff):
        removed = [line for line in body.splitlines() if line.startswith("-")]
        added = range(int(first) - 1, int(first) - 1 + int(length or 1))
        assert added, f"only removed: {removed}"
        for mark, numbers in itertools.groupby(added, lambda number: of_line[number][0]):
            numbers = list(numbers)
            lines = [f"@@{of_line[numbers[0]][1]}", *removed]
            lines += [f"+{script[number]}" for number in numbers]
            removed = []
            below = script[numbers[-1] + 1]
            opens = lines[-1].split("  #")[0].endswith(":") and numbers[-1] == added[-1]
            if opens and not below.lstrip().startswith("#"):
                lines.append(f" {below}")
            yield mark, re.sub(r"(\n\+)+\n$", "\n", "\n".join([*lines, ""]))


@pytest.mark.parametrize("folder", SHOWN)
def test_the_hunks_together_are_the_whole_diff(folder, tmp_path):
    """A heading names one mark or several, as "DDP-1: join" or "DDP-2 to DDP-5: as in 04"."""
    for name in (SHOWN[folder], folder):
        (tmp_path / name).write_text(below_the_imports(name))
    diff = git_diff("--unified=0", tmp_path / SHOWN[folder], tmp_path / folder)
    generated = list(hunks(folder, diff, below_the_imports(folder).splitlines()))
    readme = ROOT / folder / "README.md"
    named = []
    for heading, part in re.findall(
            r"^### (.*?): .*\n((?:(?!### ).*\n)*)", sections(readme)[CHANGES], re.M):
        family, numbers = heading.split("-")[0], list(map(int, re.findall(r"-(\d)", heading)))
        numbers = range(numbers[0], numbers[-1] + 1) if " to " in heading else numbers
        of_heading = [f"{family}-{number}" for number in numbers]
        named += of_heading
        (shown,) = blocks(part, "diff")
        hold(readme, shown, "".join(hunk for mark, hunk in generated if mark in of_heading))
        prose = re.sub(r"(?s)<details>.*?</details>|```diff.*?```", "", part)
        assert prose.strip(), f"no sentence about {heading}"
    assert sorted(named) == sorted({mark for mark, _ in generated})
    # No page drops a line: counted in what git prints, without the code above
    shown = "".join(blocks(sections(readme)[CHANGES], "diff"))
    in_page, in_diff = [Counter(re.findall(r"^[-+].*\S.*", text, re.M))
                        for text in (shown, diff[diff.index("@@ ") :])]
    assert in_page == in_diff


@pytest.mark.parametrize("patch", sorted(COPIES.glob("*.patch")), ids=label)
def test_a_patch_is_shown_in_a_readme(patch):
    """As test_copies.py, test_llama.py or test_additions.py applies it and runs the result."""
    comment = f"<!-- {label(patch)} -->\n\n"
    (readme,) = [path for path in READMES if comment in path.read_text()]
    shown = readme.read_text().split(comment)[1].split("\n```\n")[0]
    text = patch.read_text()
    hold(readme, comment + shown, f"{comment}```diff\n{text[text.index('@@ ') :].rstrip(chr(10))}")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_number_of_added_lines(folder):
    added = git_diff("--numstat", f"{FOLDERS[0]}/train.py", f"{folder}/train.py").split("\t")[0]
    (row,) = re.findall(rf"^\| \[{folder}\].*", MAIN.read_text(), re.M)
    hold(MAIN, row, re.sub(r"\d+ \|$", f"{added or 0} |", row))


def test_what_else_the_pages_show_of_the_code():
    """The batch script, the lines of DataParallel, and the steps of 05, which has no base."""
    readme = ROOT / "07_slurm/README.md"
    hold(readme, blocks(sections(readme)["Run"], "sh")[0], (ROOT / "07_slurm/run.sh").read_text())
    (shown,) = blocks(sections(ROOT / "01_dataparallel/README.md")[CHANGES], "python")
    assert textwrap.indent(shown, "    ") in (ROOT / "01_dataparallel/train.py").read_text()
    folder = "05_model_parallel"
    steps = list(rows(sections(ROOT / folder / "README.md")["Steps"]))
    assert {row["mark"] for row in steps} == {
        mark for line in code(folder) for mark in marks(line, folder)}
    for row in steps:
        assert row["line"].strip("`") in (ROOT / folder / "train.py").read_text(), row


def test_every_mark_is_in_the_index():
    text = sections(MAIN)["Read two scripts side by side"]
    scripts = "".join(path.read_text() for path in SCRIPTS + [*ROOT.glob("common/*.py")])
    listed = re.findall(r"(?:^-|·)\s+([A-Z]+-\d)\s", text, re.M)
    assert sorted(listed) == sorted(set(re.findall(r"\b[A-Z]+-\d\b", scripts)))


def test_the_predicted_seconds_per_all_reduce():
    text = sections(ROOT / "tests/README.md")["Benchmark"]
    exec(blocks(text, "python")[0], namespace := {})
    seconds = namespace["all_reduce_seconds"]
    assert seconds(1e9, 2, 8, 1) == pytest.approx(6)  # twice half of 4 GB, and two messages
    assert seconds(9, 7, 5, 3, 2) == network.all_reduce_seconds(9, 7, 5, 3, 2)
    for row in [row for row in rows(text) if "gradients" in row]:
        given = (25.6e6, 4) if "float32" in row["gradients"] else (7e9, 2)
        for rate in (25, 100, 400):
            time = seconds(given[0], int(row["GPUs"].replace(",", "")), rate, 20e-6, given[1])
            assert row[f"{rate} Gbit/s"] == f"{time:.3g}", row


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_sections_the_plain_command_the_expected_output_and_what_is_copied(folder):
    path = ROOT / folder / "README.md"
    expected = ["Run", "Expected output", CHANGES, "Pitfalls", "Copy it"]
    script = "train.py"
    if folder.startswith("05"):
        expected.remove(CHANGES)
        script = "fsdp.py"
    assert {*expected} <= sections(path).keys()
    assert commands(path)[0].startswith(LAUNCHERS)
    shown = blocks(sections(path)["Expected output"], "text")[0]
    (line,) = [line for line in shown.splitlines() if not line.startswith("job ")]
    epoch = EPOCH.fullmatch(line).groupdict()
    assert epoch["epoch"] == "1" and float(epoch["accuracy"]) >= 0.99
    # The speed is that of MNIST's 60,000 images, within the rounded seconds
    seconds, speed = float(epoch["seconds"]), float(epoch["speed"])
    assert abs(seconds * speed - 60_000) <= 0.05 * speed + seconds
    (copied,) = [command.split()[2:-1] for command in commands(path) if command.startswith("cp -r")]
    own = {folder} if folder.startswith("08") else {f"{folder}/run.sh", f"{folder}/{script}"}
    assert {*own, "common", "requirements.txt"} <= set(copied)


@pytest.mark.parametrize("path", READMES, ids=label)
def test_links_files_and_releases_exist(path):
    text = path.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if target.startswith("https://"):
            continue
        target = (path.parent / target) if target else path
        assert target.exists(), target
        if anchor:
            readme = target / "README.md" if target.is_dir() else target
            headings = re.findall(r"^#+ (.*)", readme.read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings]
            assert anchor in anchors, anchor
    for name in re.findall(r"\b(?:0\d_\w+|common|tests)/[\w/]+\.\w+", text):
        assert (ROOT / name).exists(), name
    required = (ROOT / "requirements.txt").read_text().split()
    assert set(re.findall(r"torch\w*==[\d.]+", text)) <= set(required)


def test_each_promise_names_a_test():
    for row in rows(sections(ROOT / "tests/README.md")["Promises"]):
        names = re.findall(r"`([\w/]+\.py)::(\w+)`", row["test"])
        assert names, row
        for file, name in names:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_help_and_the_readmes_name_the_same_options(folder, monkeypatch, capsys):
    """And the same defaults, on a machine with two GPUs."""
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit, match="^0$"):
        parse(monkeypatch, ROOT / folder / "train.py", "--help", gpus=2, RANK=0, LOCAL_RANK=0)
    lines = re.split(r"\n *(?=-)", capsys.readouterr().out.split("options:")[1])[2:]
    defaults = {OPTION.search(line)[0]: re.search(r"\(default: (.*)\)", line)[1] for line in lines}
    readme, listed, absent = ROOT / folder / "README.md", {}, set()
    common = sections(ROOT / FOLDERS[0] / "README.md")["Options"]
    for row in rows(common + sections(readme)["Run"]):
        if "option" in row and "default" in row:
            names = OPTION.findall(row["option"])
            values = row["default"].replace("`", "").split(";")[0].replace("off", "False")
            where = row.get("in", "all")  # or "02 to 04, 06", "not in 05"
            spans = re.findall(r"(\d\d)(?: to (\d\d))?", where)
            found = any(first <= folder[:2] <= (last or first) for first, last in spans)
            if where == "all" or found != where.startswith("not "):
                listed |= zip(names, values.split(", "), strict=True)
            else:
                absent.update(names)
    if folder.startswith("05"):
        del listed["--device"]  # its README names --devices
    assert len(listed) >= 6 and listed.items() <= defaults.items()
    assert not absent & defaults.keys()
    assert defaults.keys() - listed.keys() <= set(OPTION.findall(readme.read_text()))


def test_the_defaults_of_torchrun():
    parser = get_args_parser()
    for row in rows(sections(ROOT / "04_ddp_torchrun/README.md")["torchrun's options"]):
        values = row["default"].replace("`", "").split(", ")
        for name, value in zip(OPTION.findall(row["option"]), values, strict=True):
            (action,) = [each for each in parser._actions if name in each.option_strings]
            assert action.default in (None, "", False) or str(action.default) == value, name
