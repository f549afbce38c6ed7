"""Diffs, patches, tables and line counts in the READMEs are what the code is.

After a change, write them into the READMEs with

    REWRITE_DOCS=1 python -m pytest tests/test_docs_generated.py
"""

import itertools
import re
import textwrap
from collections import Counter

import network
import pytest
from helpers.paths import FOLDERS, ROOT, label
from helpers.projects import COPIES
from helpers.readmes import CHANGES, MAIN, READMES, blocks, git_diff, hold, rows, sections
from test_markers import SHOWN, below_the_docstring, code, marks

HUNK = re.compile(r"^@@ \S+ \+(\d+),?(\d*) @@.*\n((?:[-+].*\n)*)", re.M)


def diff_of(folder, tmp_path):
    """git's hunks below the imports of a script and the one that its README compares it with."""
    for name in (SHOWN[folder], folder):
        (tmp_path / name).write_text(below_the_docstring(name))
    text = git_diff("--unified=0", tmp_path / SHOWN[folder], tmp_path / folder)
    return text[text.index("@@ ") :]


def hunks(folder, tmp_path):
    """The same as pairs of a mark and a text: a hunk of several marks is divided.

    A line without a mark has the one of the nearest line above it. If the last line opens a block,
    the line below it is shown as well, as -w hides that it is indented.
    """
    diff = diff_of(folder, tmp_path)
    script = (tmp_path / folder).read_text().splitlines()
    mark, place, of_line = None, "", []
    for line in script:
        mark = (marks(line, folder) or [mark])[0]
        if line.startswith(("def ", "class ")):
            place = f" {line.split('  #')[0]}"
        of_line.append((mark, place if line.startswith(" ") else ""))
    for first, length, body in HUNK.findall(diff):
        removed = [line for line in body.splitlines() if line.startswith("-")]
        first = int(first) - 1
        added = range(first, first + int(length or 1))
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


def changes(lines):
    """How often each line that is not empty is added or removed."""
    return Counter(line for line in lines if line[0] in "+-" and line[1:].strip())


@pytest.mark.parametrize("folder", SHOWN)
def test_each_mark_shows_its_own_hunks(folder, tmp_path):
    """A heading names one mark or several, as "DDP-1: join" or "DDP-2 to DDP-5: as in 04"."""
    readme = ROOT / folder / "README.md"
    text = sections(readme)[CHANGES]
    generated = list(hunks(folder, tmp_path))
    named = []
    for heading, part in re.findall(r"^### (.*?): .*\n((?:(?!### ).*\n)*)", text, re.M):
        family, numbers = heading.split("-")[0], list(map(int, re.findall(r"-(\d)", heading)))
        numbers = range(numbers[0], numbers[-1] + 1) if " to " in heading else numbers
        of_heading = [f"{family}-{number}" for number in numbers]
        named += of_heading
        (shown,) = blocks(part, "diff")
        hold(readme, shown, "".join(hunk for mark, hunk in generated if mark in of_heading))
        prose = re.sub(r"(?s)<details>.*?</details>|```diff.*?```", "", part)
        assert prose.strip(), f"no sentence about {heading}"
    assert sorted(set(named)) == sorted({mark for mark, _ in generated})
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("folder", SHOWN)
def test_the_hunks_together_are_the_whole_diff(folder, tmp_path):
    """No page drops a line: counted in what git prints, without the code above."""
    shown = "".join(blocks(sections(ROOT / folder / "README.md")[CHANGES], "diff"))
    assert changes(shown.splitlines()) == changes(diff_of(folder, tmp_path).splitlines())


@pytest.mark.parametrize("patch", sorted(COPIES.glob("*.patch")), ids=label)
def test_a_patch_is_shown_in_a_readme(patch):
    """As test_copies.py, test_additions.py or test_own_script.py applies it and runs the result."""
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


def test_the_steps_of_05():
    """Which has no base, so its table names the lines."""
    folder = "05_model_parallel"
    script = (ROOT / folder / "train.py").read_text()
    listed = [(row["mark"], row["line"].strip("`"))
              for row in rows(sections(ROOT / folder / "README.md")["Steps"])]
    assert {mark for mark, _ in listed} == {mark for line in code(folder)
                                            for mark in marks(line, folder)}
    for _, line in listed:
        assert line in script, line


def test_the_batch_script():
    readme = ROOT / "07_slurm/README.md"
    hold(readme, blocks(sections(readme)["Run"], "sh")[0], (ROOT / "07_slurm/run.sh").read_text())


def test_the_lines_of_dataparallel():
    (shown,) = blocks(sections(ROOT / "01_dataparallel/README.md")[CHANGES], "python")
    assert textwrap.indent(shown, "    ") in (ROOT / "01_dataparallel/train.py").read_text()


def test_the_predicted_seconds_per_all_reduce():
    readme = ROOT / "04_ddp_torchrun/README.md"
    (function,) = blocks(sections(readme)["Communication cost"], "python")
    exec(function, namespace := {})
    seconds = namespace["all_reduce_seconds"]
    assert seconds(9, 7, 5, 3, 2) == network.all_reduce_seconds(9, 7, 5, 3, 2)
    models = {"25.6 M in float32 (ResNet-50)": (25.6e6, 4), "7 B in bfloat16": (7e9, 2)}
    table = ""
    for name, (gradients, size) in models.items():
        for ranks in (8, 64, 1024):
            times = [seconds(gradients, ranks, rate, 20e-6, size) for rate in (25, 100, 400)]
            cells = [f"{time:.3g}" for time in times]
            table += f"| {name} | {ranks:,} | {' | '.join(cells)} |\n"
    (shown,) = re.findall(r"(?:^\| (?:25\.6 M|7 B) in .*\n)+", readme.read_text(), re.M)
    hold(readme, shown, table)
