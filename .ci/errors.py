"""Look up the texts of the tables of errors in the torch and NCCL that this Python has.

    python .ci/errors.py

They are tests/errors.md, and on the pages the tables with a column "symptom" (07's and
08's are of Slurm and Docker). A text is in the Python files or libraries, and not in
releases that the table excludes. With a CPU build, NCCL's and the pages are left out.
Exit code 1: a message was renamed.
"""

import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("0[1-6]*/README.md")]
# by whom, a text, releases without it
QUOTED = r"(?:(\S+): )?`([^`]+)`(?: \(not in (.*?)\))?"
OPTION_OR_FILE = re.compile(r"^--|\.(py|sh)$")
# programs without torch
OTHERS = re.compile(r"^(?!$|NCCL|Gloo|c10d|fsdp|pipeline|self-test)")
# what is between the pieces of a text
VARIES = r"\.{3}|…|NCCL WARN|['\"\d:]+|\b(?:FOLDER|HOST|PATH)\b"


def sections():
    """Each section of tests/errors.md, and each table of the pages."""
    found = (ROOT / "tests/errors.md").read_text("utf-8")
    found = re.split("^## ", found, flags=re.M)[1:]
    if torch.version.cuda:
        pages = "".join(page.read_text("utf-8") for page in PAGES)
        found += re.findall(r"^\| symptom.*\n(?:\|.*\n)+", pages, re.M)
    return found


def quoted_texts():
    """The texts of torch and NCCL, each with the releases that lack it."""
    found = {}
    for section in sections():
        area = section.splitlines()[0]
        symptoms = "\n".join(re.findall(r"^\| (.*?) \| ", section, re.M))
        for program, text, absent in re.findall(QUOTED, symptoms):
            if len(text) < 8 or OPTION_OR_FILE.search(text) or OTHERS.search(program):
                continue
            if torch.version.cuda or "NCCL" not in area + program:
                found[text] = absent.split(", ")
    return found


def where_they_are(pieces):
    """The pieces that the libraries have, and all Python files."""
    folder = Path(torch.__file__).parent
    libraries = [*folder.glob("lib/*.so")]
    libraries += folder.parent.glob("nvidia/nccl/lib/libnccl.so.2")
    grep = ["grep", "-aohF", *[f"-e{piece}" for piece in pieces], *libraries]
    run = subprocess.run(grep, env={"LC_ALL": "C"}, stdout=subprocess.PIPE)
    python = ""
    for path in [*folder.rglob("*.py"), *ROOT.glob("[0c]*/*.py")]:
        python += path.read_text("utf-8")
    # "one text" "in two lines"
    python = re.sub(r"""["']\s*\n\s*[rf]*["']""", "", python)
    return run.stdout.decode() + python


def main():
    release = torch.__version__.rpartition(".")[0]
    absent = quoted_texts()
    pieces = {}
    for text in absent:
        parts = [part.strip() for part in re.split(VARIES, text)]
        pieces[text] = [part for part in parts if part]
    there = where_they_are([part for parts in pieces.values() for part in parts])
    wrong = []
    for text, parts in pieces.items():
        is_there = all(part in there for part in parts)
        if is_there == (release in absent[text]):
            wrong.append(text)
    right = len(pieces) - len(wrong)
    print(f"torch {release}: {right} of {len(pieces)} texts are as expected")
    if wrong:
        sys.exit("\n".join(wrong))
    if len(pieces) < 100:
        sys.exit("fewer texts than the tables should have")


if __name__ == "__main__":
    main()
