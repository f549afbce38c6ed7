"""The READMEs say what is so: commands, diffs, steps and links. `python tests/test_docs.py` writes the diffs anew."""

import re
import subprocess

import pytest
from helpers import EPOCH, FOLDERS, ROOT, label
from test_markers import BASES, SHOWN, code, marks

READMES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in FOLDERS)]
SETUP = "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"
DIFF = re.compile(r"(?<=^```diff\n).+?(?=^```$)", re.M | re.S)


def sections(text):
    """The text of each section by its heading."""
    parts = re.split(r"^## (.*)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def diff(folder):
    """What `git diff -w` shows between a script and the one that its README names, without docstrings and context."""
    command = ["git", "diff", "--no-index", "-w", "--unified=0", f"{SHOWN[folder]}/train.py", f"{folder}/train.py"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
    hunks = re.split(r"(?m)^@@ .*? @@ ?(.*)\n", text)[1:]
    pairs = list(zip(hunks[::2], hunks[1::2], strict=True))
    while not re.match(r"[+-](import|from) ", pairs[0][1]):  # the docstring comes first
        del pairs[0]
    return "".join(f"@@ {place}".rstrip() + f"\n{lines}" for place, lines in pairs)


def test_the_first_two_commands_do_it_all():
    commands = "".join(blocks(READMES[0].read_text(), "bash")).splitlines()
    assert commands[:2] == [f"{SETUP} && bash 04_ddp_torchrun/run.sh", f"{SETUP} && python -m pytest"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_sections(folder):
    text = (ROOT / folder / "README.md").read_text()
    assert text.startswith(f"# {folder}\n")
    assert list(sections(text))[-6:] == ["Run", "Expected output", "What changed", "Steps", "Pitfalls", "Copy it"]


@pytest.mark.parametrize("folder", BASES)
def test_the_diff_is_the_diff(folder):
    shown = DIFF.findall(sections((ROOT / folder / "README.md").read_text())["What changed"])
    assert shown == [diff(folder)], "write it anew with: python tests/test_docs.py"


@pytest.mark.parametrize("folder", FOLDERS)
def test_steps_are_those_of_the_script(folder):
    steps = sections((ROOT / folder / "README.md").read_text())["Steps"]
    rows = re.findall(r"^\| ([A-Z]+-\d+) \| `(.*?)` \|", steps, re.M)
    assert {mark for mark, _ in rows} == {mark for line in code(folder) for mark in marks(line, folder)}
    for _, line in rows:
        assert line in (ROOT / folder / "train.py").read_text(), line


@pytest.mark.parametrize("folder", FOLDERS)
def test_expected_output_has_the_form_of_the_output(folder):
    shown = blocks(sections((ROOT / folder / "README.md").read_text())["Expected output"], "text")[0]
    lines = [EPOCH.fullmatch(line) for line in shown.splitlines() if not re.match(r"node \d of \d: |job \d+, ", line)]
    assert all(lines) and [line["epoch"] for line in lines] == ["1", "2", "3"]
    assert float(lines[-1]["accuracy"]) >= 0.985
    for line in lines:  # the printed seconds are rounded, so the images are those of MNIST within that
        seconds, speed = float(line["seconds"]), float(line["speed"])
        assert abs(seconds * speed - 60_000) <= 0.05 * speed + seconds


@pytest.mark.parametrize("path", READMES, ids=label)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", READMES, ids=label)
def test_commands_name_what_exists(path):
    for line in "".join(blocks(path.read_text(), "bash")).splitlines():
        for script in re.findall(r"0\d_\w+/[\w.]+", line):
            assert (ROOT / script).exists(), line
        script = re.search(r"(0\d_\w+)/(?:train\.py|run\.sh)(?! \w+\.py)(.*)", line)
        if script:
            for option in re.findall(r"--[a-z-]+", script[2]):
                assert f'"{option}"' in (ROOT / script[1] / "train.py").read_text(), line


def test_every_folder_is_in_the_table():
    text = READMES[0].read_text()
    assert all(f"]({folder}/)" in text for folder in FOLDERS)


if __name__ == "__main__":
    for folder in BASES:
        readme = ROOT / folder / "README.md"
        readme.write_text(DIFF.sub(lambda _, folder=folder: diff(folder), readme.read_text()))
