"""Read the READMEs: sections, code blocks, commands, tables."""

import re

from helpers.paths import FOLDERS, ROOT

MAIN = ROOT / "README.md"
READMES = [MAIN, *(ROOT / folder / "README.md" for folder in FOLDERS)]
READMES += [ROOT / "tests/README.md", COPIED := ROOT / "tests/copies/README.md"]


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
