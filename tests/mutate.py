"""Which statements of a script could be deleted, and no quick test would notice?

    python tests/mutate.py 04_ddp_torchrun/train.py [HOW MANY]

One fault at a time, in a copy: a statement is deleted, or a condition is made true or false. Then
the tests must fail whose names have the script's number, or for those of 05 its name (Deng, Offutt,
Li: statement deletion, ICST 2013). The exit code is 1 if a fault survives that is not in ACCEPTED.
"""

import ast
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

from helpers import ROOT, run

TESTS = [f"tests/test_{name}.py" for name in ("launch", "resume", "exact", "smoke")]
IGNORED = shutil.ignore_patterns(".*", "*cache*", "data", "slow", "*.pt")
SKIPPED = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
ACCEPTED = [  # what may survive; all others are to be looked at
    r'set_device|max_memory|reset_peak|DataParallel|# DP-1|one GPU|"cuda"|sync_b',  # test_cuda.py
    # What ends processes: slow/test_exits.py, slow/test_interruptions.py
    r"destroy_p|sleep|SIG_|STOP_|getppid|was killed|sys\.exit|\.kill|_child|finally|barrier",
    r"fsync|flush|reshard|del ",  # a power cut, memory
    r"  return stopped\(\)",  # a second save: the evaluation, which comes next, stops as well
]


def faults(source):
    """Yield the line of a fault, what is deleted or changed there, and the script with it."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)

    def replace(node, text):
        first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        start, end = first[: node.col_offset].decode(), last[node.end_col_offset :].decode()
        parts = [*lines[: node.lineno - 1], start, text, end, *lines[node.end_lineno :]]
        return node.lineno, f"{ast.unparse(node)[:60]!r} -> {text}", "".join(parts)

    for node in ast.walk(tree):
        for part in ("body", "orelse", "finalbody"):
            children = getattr(node, part, None)
            if isinstance(children, list) and not isinstance(node, ast.Module | ast.ClassDef):
                yield from (replace(child, "pass") for child in children
                            if not isinstance(child, SKIPPED) and not re.match(
                                "['\"]", ast.unparse(child)))  # a docstring
        if isinstance(node, ast.If | ast.IfExp):
            yield replace(node.test, "True")
            yield replace(node.test, "False")


def is_noticed(script, text):
    """Whether the tests fail with this text in place of the script, or do not end."""
    word = script.stem if script.parent.name.startswith("05") else script.parent.name[:2]
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder, "copy"), ignore=IGNORED)
        (copy / script).write_text(text)
        try:
            result = run([sys.executable, "-m", "pytest", "-qx", "-k", word, *TESTS], copy, 400)
        except AssertionError:  # no end, or it has left a process
            return True
    if result.code > 1:
        raise SystemExit(f"are there tests with {word} in their name? {result}")
    return result.code == 1


def main():
    script, code = Path(sys.argv[1]), 0
    source = (ROOT / script).read_text()
    found = [*faults(source)]
    if len(sys.argv) > 2:
        found = random.Random(0).sample(found, int(sys.argv[2]))
    for number, what, text in found:
        if not is_noticed(script, text):
            line = source.splitlines()[number - 1]
            accepted = any(re.search(pattern, line) for pattern in ACCEPTED)
            print(f"{script}:{number} survives: {what}{', accepted' * accepted}", flush=True)
            code |= not accepted
    print(f"{len(found)} faults tried")
    sys.exit(code)


if __name__ == "__main__":
    main()
