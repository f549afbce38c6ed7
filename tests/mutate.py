"""Which statements of a script could be deleted, and no quick test would notice?

    python tests/mutate.py 04_ddp_torchrun/train.py
    python tests/mutate.py --count 20 04_ddp_torchrun/train.py 06_checkpointing/train.py

One fault at a time, in a copy: a statement or a decorator is deleted, a condition is made true or
false, a number or a text of section 4 is changed. Then the tests must fail whose names have the
script's number, or for those of 05 its name. (Statement deletion: Deng, Offutt, Li, ICST 2013.)
The exit code is 1 if a fault survives that ACCEPTED does not have.
"""

import argparse
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
ON_GPUS = "only a GPU executes it: test_cuda.py"  # does not count
ACCEPTED = {  # what may survive, and why; all others are to be looked at
    r'set_device|max_memory|reset_peak|DataParallel|# DP-1|one GPU|"cuda"': ON_GPUS,
    r"destroy_p|sleep|SIG_|STOP_|parent_process|sys\.exit|\.kill|_child|finally":
        "what ends processes: slow/test_exits.py, slow/test_interruptions.py",
    r"fsync|flush": "a power cut",
    r"bar\.close|reshard|del ": "a terminal, memory",
    r"  return stopped\(\)": "a second save: the evaluation, which comes next, stops as well",
}


def faults(source):
    """Yield the line of a fault, what is deleted or changed there, and the script with it."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    section = [number for number, line in enumerate(lines, 1) if re.match("    # [45]\\. ", line)]

    def replace(node, text):
        first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        start, end = first[: node.col_offset].decode(), last[node.end_col_offset :].decode()
        parts = [*lines[: node.lineno - 1], start, text, end, *lines[node.end_lineno :]]
        return node.lineno, f"{ast.unparse(node)[:60]!r} -> {text}", "".join(parts)

    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", []):
            first, last = decorator.lineno, decorator.end_lineno
            yield first, "no decorator", "".join([*lines[: first - 1], *lines[last:]])
        for part in ("body", "orelse", "finalbody"):
            children = getattr(node, part, None)
            if isinstance(children, list) and not isinstance(node, ast.Module | ast.ClassDef):
                yield from (replace(child, "pass") for child in children
                            if not isinstance(child, SKIPPED) and not re.match(
                                "['\"]", ast.unparse(child)))  # a docstring
        if isinstance(node, ast.If | ast.IfExp):
            yield replace(node.test, "True")
            yield replace(node.test, "False")
        if isinstance(node, ast.Constant) and section[0] < node.lineno < section[1]:
            if isinstance(node.value, float | int) and not isinstance(node.value, bool):
                yield replace(node, repr(2 * node.value + 1))
            elif isinstance(node.value, str) and lines[node.lineno - 1][node.col_offset] == '"':
                yield replace(node, repr(f"{node.value}x"))


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scripts", nargs="+", type=Path)
    parser.add_argument("--count", type=int, help="take so many faults at random")
    parser.add_argument("--seed", type=int, default=0, help="random seed of this choice")
    args = parser.parse_args()
    found = [(script, *fault) for script in args.scripts
             for fault in faults((ROOT / script).read_text())]
    if args.count:
        found = random.Random(args.seed).sample(found, args.count)
    counts, code = {}, 0
    for script, number, what, text in found:
        reason = next((why for pattern, why in ACCEPTED.items() if re.search(
            pattern, (ROOT / script).read_text().splitlines()[number - 1])), "NOT ACCEPTED")
        noticed = is_noticed(script, text)
        if noticed or reason != ON_GPUS:
            counts.setdefault(script, []).append(noticed)
        if not noticed:
            print(f"{script}:{number} survives: {what} ({reason})", flush=True)
            code |= reason == "NOT ACCEPTED"
    for script, each in counts.items():
        print(f"{script}: {sum(each)} of {len(each)} noticed, {sum(each) / len(each):.1%}")
    sys.exit(code)


if __name__ == "__main__":
    main()
