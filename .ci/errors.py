"""Look the texts of the tables of errors up in the torch and the NCCL that this Python has.

    python .ci/errors.py

They are tests/errors.md, and on the pages the tables with a column "symptom" (07's and 08's are of
Slurm and Docker). A text is in the Python files or libraries, and not in releases that the table
excludes. With a CPU build, NCCL's and the pages are left out. Exit code 1: a message was renamed.
"""

import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("0[1-6]*/README.md")]
QUOTED = r"(?:(\S+): )?`([^`]+)`(?: \(not in (.*?)\))?"  # by whom, a text, releases without
VARIES = r"\.{3}|…|NCCL WARN|['\"\d:]+|\b(?:FOLDER|HOST|PATH)\b"  # between pieces of a text
OTHERS = re.compile(r"^(?!$|NCCL|Gloo|c10d|fsdp|pipeline|self-test)")  # programs without torch


def main():
    release, folder = torch.__version__.rpartition(".")[0], Path(torch.__file__).parent
    pieces, expected = {}, {}
    text = (ROOT / "tests/errors.md").read_text("utf-8")
    pages = "".join(page.read_text("utf-8") for page in PAGES)
    tables = re.findall(r"^\| symptom.*\n(?:\|.*\n)+", pages if torch.version.cuda else "", re.M)
    for section in re.split("^## ", text, flags=re.M)[1:] + tables:
        area = section.splitlines()[0]
        symptoms = "\n".join(re.findall(r"^\| (.*?) \| ", section, re.M))
        for program, text, absent in re.findall(QUOTED, symptoms):
            if len(text) < 8 or re.search(r"^--|\.(py|sh)$", text) or OTHERS.search(program):
                continue  # an option, a file, or not torch's
            if torch.version.cuda or "NCCL" not in area + program:
                pieces[text] = [each.strip() for each in re.split(VARIES, text)]
                expected[text] = release not in absent.split(", ")
    libraries = [*folder.glob("lib/*.so"), *folder.parent.glob("nvidia/nccl/lib/libnccl.so.2")]
    wanted = [f"-e{each}" for some in pieces.values() for each in some if each]
    grep = ["grep", "-aohF", *wanted, *libraries]
    found = subprocess.run(grep, env={"LC_ALL": "C"}, stdout=subprocess.PIPE).stdout.decode()
    sources = [*folder.rglob("*.py"), *ROOT.glob("[0c]*/*.py")]
    python = "".join(path.read_text("utf-8") for path in sources)
    found += re.sub(r"""["']\s*\n\s*[rf]*["']""", "", python)  # "one text" "in two lines"
    wrong = [text for text, parts in pieces.items()
             if expected[text] != all(part in found for part in parts)]
    print(f"torch {release}: {len(pieces) - len(wrong)} of {len(pieces)} texts are as expected")
    sys.exit("\n".join(wrong) or len(pieces) < 100)


if __name__ == "__main__":
    main()
