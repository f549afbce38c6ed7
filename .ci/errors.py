"""Look the texts of tests/errors.md up in the torch and the NCCL that this Python has.

    python .ci/errors.py

A text is in their Python files or libraries, and not in releases that the table excludes. With a
CPU build, NCCL's are left out. The exit code is 1 if a message was renamed.
"""

import re
import subprocess
import sys
from pathlib import Path

import torch

TABLE = Path(__file__).resolve().parent.parent / "tests/errors.md"
QUOTED = r"(?:(\S+): )?`([^`]+)`(?: \(not in (.*?)\))?"  # by whom, a text, releases without
VARIES = r"\.{3}|…|NCCL WARN|['\"\d:]+"  # between the pieces of a text that a program prints


def main():
    release, folder = torch.__version__.rpartition(".")[0], Path(torch.__file__).parent
    pieces, expected = {}, {}
    for section in re.split("^## ", TABLE.read_text("utf-8"), flags=re.M)[1:]:
        area = section.splitlines()[0]
        symptoms = "\n".join(re.findall(r"^\| (.*?) \| ", section, re.M))
        for program, text, absent in re.findall(QUOTED, symptoms):
            if program in ("", "NCCL") and (torch.version.cuda or "NCCL" not in area + program):
                pieces[text] = [each.strip() for each in re.split(VARIES, text)]
                expected[text] = release not in absent.split(", ")
    libraries = [*folder.glob("lib/*.so"), *folder.parent.glob("nvidia/nccl/lib/libnccl.so.2")]
    wanted = [f"-e{each}" for some in pieces.values() for each in some if each]
    grep = ["grep", "-aohF", *wanted, *libraries]
    found = subprocess.run(grep, env={"LC_ALL": "C"}, stdout=subprocess.PIPE).stdout.decode()
    python = "".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
    found += re.sub(r"""["']\s*\n\s*[rf]*["']""", "", python)  # "one text" "in two lines"
    wrong = [text for text, parts in pieces.items()
             if expected[text] != all(part in found for part in parts)]
    print(f"torch {release}: {len(pieces) - len(wrong)} of {len(pieces)} texts are as expected")
    sys.exit("\n".join(wrong) or len(pieces) < 100)


if __name__ == "__main__":
    main()
