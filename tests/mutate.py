"""Which statements of a script could be deleted, and no quick test would notice?

    python tests/mutate.py 04_ddp_torchrun/train.py [HOW MANY]

One fault at a time, in a copy: a statement is deleted, or a condition is made true or
false. Then the tests must fail whose names have the script's number, or for those of 05
its name, and for common/stops.py those of 07 and fsdp.py (Deng, Offutt, Li: statement
deletion, ICST 2013). The exit code is 1 if a fault survives that is not in ACCEPTED.
"""

import ast
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

from helpers import ROOT, run

TESTED = ("launch", "resume", "exact", "stops", "smoke")
TESTS = [f"tests/test_{name}.py" for name in TESTED]
IGNORED = shutil.ignore_patterns(".*", "*cache*", "data", "slow", "*.pt")
SKIPPED = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
# What may survive; all others are to be looked at. Each is searched in the lines of a
# statement, and of a block only in those before its first statement
ACCEPTED = [
    # test_cuda.py
    r'set_device|cuda\.(max_memory|is_init)|"cuda"|SyncBatchNorm|if args\.sync_bn:',
    r"nn\.DataParallel|args\.amp or args\.compile|one GPU",
    # What ends processes: slow/test_exits.py, slow/test_interruptions.py
    r"destroy_p|time\.sleep|getppid|torchrun was killed|sys\.exit|barrier",
    r"SIG_|SIGNALS|\.kill|_child|self\.(_block|_unblock|blocked|workers)",
    # A power cut, and memory
    r"os\.fsync|file\.flush|\bdel ",
    # The next step, or the evaluation, stops as well, after a second save
    r"return stops\.end",
    # On a terminal only
    r"no_bar = ",
]


def faults(source):
    """Yield of each fault the line's number, its lines, what it is, and the script."""
    lines = source.splitlines(keepends=True)

    def replace(node, text):
        # columns are counted in bytes
        first = lines[node.lineno - 1].encode()
        last = lines[node.end_lineno - 1].encode()
        before = [*lines[: node.lineno - 1], first[: node.col_offset].decode()]
        after = [last[node.end_col_offset :].decode(), *lines[node.end_lineno :]]
        end = node.end_lineno
        if isinstance(node, ast.stmt) and getattr(node, "body", None):
            end = max(node.lineno, node.body[0].lineno - 1)
        own_lines = "".join(lines[node.lineno - 1 : end])
        what = f"{ast.unparse(node)[:60]!r} -> {text}"
        return node.lineno, own_lines, what, "".join([*before, text, *after])

    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef):
            for child in statements_in(node):
                yield replace(child, "pass")
        if isinstance(node, ast.If | ast.IfExp):
            yield replace(node.test, "True")
            yield replace(node.test, "False")


def statements_in(node):
    """Those of a block that can be deleted."""
    for part in ("body", "orelse", "finalbody"):
        children = getattr(node, part, None)
        for child in children if isinstance(children, list) else ():
            docstring = ast.unparse(child).startswith(("'", '"'))
            if not isinstance(child, SKIPPED) and not docstring:
                yield child


def is_noticed(script, text):
    """Whether the tests fail with this text in place of the script, or do not end."""
    word = script.parent.name[:2]
    if word == "05":
        word = script.stem
    elif word == "co":
        word = "07 or fsdp"
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder, "copy"), ignore=IGNORED)
        (copy / script).write_text(text)
        command = [sys.executable, "-m", "pytest", "-qx", "-k", word, *TESTS]
        try:
            result = run(command, copy, limit=400)
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
    for number, lines, what, text in found:
        if is_noticed(script, text):
            continue
        if any(re.search(pattern, lines) for pattern in ACCEPTED):
            what += ", accepted"
        else:
            code = 1
        print(f"{script}:{number} survives: {what}", flush=True)
    print(f"{len(found)} faults tried")
    sys.exit(code)


if __name__ == "__main__":
    main()
