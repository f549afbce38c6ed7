"""Plant faults in copies of this repository, one at a time: a test must notice each.

    python tests/faults.py             # all; prints survivors, and ends with 1 if there are any
    python tests/faults.py 06 --jobs 1 # those with 06 in their description, file or tests

The files in faults/ list them. Three lines are a fault: a description, the change, and the tests,
one of which must fail:

    # accumulation is not weighted
    06_checkpointing/train.py: (loss * (len(labels) / images_in_step)).backward() -> loss.backward()
    test_copies.py::test_two_ranks_and_micro_batches_take_the_steps_of_a_whole_batch

"each mark" in place of a change stands for one fault per line with a step mark: without the line,
or with `if True:` for an `if`. A fault may end with a fourth line, `survives: REASON`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.paths import ROOT
from helpers.projects import IGNORED

MARK = re.compile(r"# .*\b(?:DP|DDP|MP|CKPT|SLURM)-\d")
DEFINES = re.compile(r'\s*(#|"""|(def|class|import|from|LAUNCHER)\b)')
LIMIT = 300  # seconds for the tests of one fault; a fault that makes them hang is noticed, too


def read(path):
    """The faults of a file: (description, script, old, new, tests, reason to survive or None)."""
    for block in path.read_text().strip().split("\n\n"):
        assert len(block.splitlines()) in (3, 4), f"{path}: {block}"
        description, change, tests, *rest = block.splitlines()
        description = description.removeprefix("# ")
        reason = rest[0].removeprefix("survives: ") if rest else None
        script, change = change.split(": ", 1)
        if change == "each mark":
            yield from marks(description, script, tests, reason)
        else:
            old, new = (part.replace(r"\n", "\n") for part in change.split(" -> ", 1))
            yield f"{script[:2]}: {description}", script, old, new, tests.split(), reason


def marks(description, script, tests, reason):
    """A fault for each marked line that is no import, and opens no definition."""
    lines = (ROOT / script).read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not MARK.search(line) or DEFINES.match(line):
            continue
        before, after = "".join(lines[:number]), "".join(lines[number + 1 :])
        if line.split("  #")[0].rstrip().endswith(":"):
            new = re.sub(r"(el)?if .*", r"\1if True:", line)
            if new == line:
                continue  # for and with: without the line it is no Python
        else:
            new = ""
        name = f"{description} {number + 1}: {line.strip()}"
        yield name, script, before + line + after, before + new + after, tests.split(), reason


def plant(fault):
    """Run the tests with the fault; returns what is not as listed, or nothing."""
    description, script, old, new, tests, reason = fault
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=IGNORED)
        text = (copy / script).read_text()
        if text.count(old) != 1:
            return f"{script} has {text.count(old)} times {old!r}: {description}"
        (copy / script).write_text(text.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider",
                   "-m", "slow or not slow", *(f"tests/{test}" for test in tests)]
        try:
            done = subprocess.run(command, cwd=copy, timeout=LIMIT, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired:
            return None  # tests that hang have noticed it
    if done.returncode not in (0, 1):  # 1: a test has failed
        return f"its tests do not run: {description}\n{done.stdout[-2000:]}"
    if done.returncode == 1:
        return reason and f"is noticed now: {description}"
    return None if reason else f"SURVIVES: {description}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    faults = [fault for path in sorted(ROOT.glob("tests/faults/*.txt")) for fault in read(path)
              if all(word in " ".join([*fault[:2], *fault[4]]) for word in args.words)]
    start, bad = time.monotonic(), 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for problem in filter(None, pool.map(plant, faults)):
            bad += 1
            print(problem, flush=True)
    reasons = [fault for fault in faults if fault[5]]
    for description, *_, reason in reasons:
        print(f"survives, as {reason}: {description}")
    print(f"{len(faults)} faults, {bad} of them not as listed, {time.monotonic() - start:.0f} s")
    sys.exit(1 if bad or not faults else 0)


if __name__ == "__main__":
    main()
