"""Read the READMEs: sections, code blocks, commands, tables; and write what is generated."""

import os
import re
import subprocess

from helpers.paths import FOLDERS, ROOT

MAIN = ROOT / "README.md"
READMES = [MAIN, *(ROOT / folder / "README.md" for folder in FOLDERS), ROOT / "tests/README.md"]
CHANGES = "What changes, step by step"
OPTION = re.compile("--[a-z-]+")


def sections(path):
    """The text of each section of a README by its heading."""
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text, language):
    """The code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def commands(path):
    """The commands of a README in order, each in one line, without comments."""
    text = "".join(blocks(path.read_text(), "bash")).replace("\\\n", "")
    return [re.sub(" +", " ", line) for line in text.splitlines() if line[:1] not in ("", "#")]


def rows(text):
    """The rows of all tables, as dictionaries from the head of a column to the cell."""
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        head, _, *body = [re.split(r" *\| *", line[1:-1].strip()) for line in table.splitlines()]
        yield from (dict(zip(head, line, strict=True)) for line in body)


def hold(path, shown, generated):
    """Compare what a README shows with what was generated; with REWRITE_DOCS, write it there."""
    text = path.read_text()
    assert text.count(shown) == 1, shown
    if "REWRITE_DOCS" in os.environ:
        path.write_text(text.replace(shown, generated))
    else:
        assert shown == generated, "REWRITE_DOCS=1 python -m pytest tests/test_docs_generated.py"


def git_diff(*arguments):
    command = ["git", "diff", "--no-index", "-w", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
