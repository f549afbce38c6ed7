"""Interrupt a training of 06 again and again, and compare its result with an undisturbed training.

    python tests/slow/interrupt.py kill 100
    python tests/slow/interrupt.py stop 2 --amp --accumulate 2

kill N: two ranks are killed N times while rank 0 saves a checkpoint.
stop N: one of N ranks receives a signal in the first step of every start, so each start does one
step.

Prints what happened. Exits with 1 if a start fails, or if the weights or the epoch lines differ
from those of the undisturbed training; the weights are compared bit by bit.

The ranks are forked from one process that has imported everything, which saves seconds per start.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch._dynamo  # noqa: E402, F401  # DDP imports it
from helpers import (  # noqa: E402
    ROOT,
    copy_project,
    equal,
    fewer_digits,
    free_port,
    load_script,
    with_dropout,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: E402

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def prepare():
    """Copy the project, with few digits and with dropout, so that random numbers matter."""
    script = copy_project(Path("project"), ROOT / "06_checkpointing/train.py").resolve()
    os.chdir("project")
    fewer_digits(Path())
    with_dropout(Path())
    sys.path.insert(0, os.getcwd())
    return load_script(script)


def signal_at_first_batch(number):
    """Let this process send itself a signal just before it reads its first batch."""
    real = _BaseDataLoaderIter.__next__

    def signal_and_read(self):
        _BaseDataLoaderIter.__next__ = real
        os.kill(os.getpid(), number)
        return real(self)

    _BaseDataLoaderIter.__next__ = signal_and_read


def start(script, nproc, options, log, signalled=None, number=0):
    """Fork the ranks, one of which may send itself a signal; returns their process ids."""
    port, children = free_port(), []
    for rank in range(nproc):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with open(log, "a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if rank == signalled:
                signal_at_first_batch(number)
            sys.argv = ["train.py", "--data-dir", "common", *options]
            code = 1
            try:
                script.main()
                code = 0
            finally:
                sys.stdout.flush()
                if code:
                    traceback.print_exc()
                os._exit(code)
    return children


def fail(children, reason, log):
    """End these ranks and this program."""
    for child in children:
        os.kill(child, signal.SIGKILL)
    raise SystemExit(f"{reason}; the log:\n{log.read_text()}")


def finish(children, log, limit=300):
    """Wait until all ranks have exited with 0."""
    end, left = time.monotonic() + limit, set(children)
    while left:
        child, status = os.waitpid(-1, os.WNOHANG)
        left.discard(child)
        if child and status:
            fail(left, f"a rank exited with {os.waitstatus_to_exitcode(status)}", log)
        if time.monotonic() > end:
            fail(left, f"a rank did not exit within {limit} s", log)
        time.sleep(0.002)


def wait_until(condition, children, log, limit=60):
    """Wait without a pause, as a save takes only a millisecond."""
    end = time.monotonic() + limit
    while not condition():
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            others = set(children) - {child}
            fail(others, f"a rank exited with {os.waitstatus_to_exitcode(status)}", log)
        if time.monotonic() > end:
            fail(children, f"no save within {limit} s", log)


def kill_while_saving(children, checkpoint, log):
    """Kill all ranks after some saves and just after the next has begun.

    Returns whether that save was incomplete.
    """

    def version():
        return checkpoint.exists() and checkpoint.stat().st_ino

    for _ in range(random.randrange(8)):
        before = version()
        wait_until(lambda before=before: version() != before, children, log)
    temporary = checkpoint.with_name(f"{checkpoint.name}.tmp")
    wait_until(temporary.exists, children, log)
    time.sleep(random.choice((0, random.uniform(0, 0.004))))
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    incomplete = temporary.exists()
    temporary.unlink(missing_ok=True)
    return incomplete


def epoch_lines(log):
    """The epoch lines of a log without their times."""
    return re.findall("^epoch .* accuracy [0-9.]+", log, re.M)


def main():
    way, number, *options = sys.argv[1:]
    kills, nproc = (int(number), 2) if way == "kill" else (0, int(number))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        script = prepare()
        log, undisturbed = Path("log"), Path("undisturbed")
        if way == "kill":  # an epoch has 10 steps, and at most 8 are done before each kill
            options += ["--epochs", str(2 + kills), "--save-every", "1"]
        else:
            options += ["--epochs", "2", "--save-every", "1000"]
        other_files = ["--checkpoint", "undisturbed-run.pt", "--output", "undisturbed.pt"]
        finish(start(script, nproc, [*options, *other_files], undisturbed), undisturbed)
        incomplete = 0
        for _ in range(kills):
            children = start(script, nproc, options, log)
            incomplete += kill_while_saving(children, Path("checkpoint.pt"), log)
        stops = 0
        while not Path("mnist.pt").exists():
            signalled = stops % nproc if way == "stop" else None
            finish(start(script, nproc, options, log, signalled, SIGNALS[stops // nproc % 2]), log)
            stops = log.read_text().count("stopped after ")
        resumed = log.read_text().count("resuming from ")
        lines, expected = (epoch_lines(file.read_text()) for file in (log, undisturbed))
        if kills:  # an epoch line can be printed again if its checkpoint was not complete
            lines = list(dict.fromkeys(lines))
        same = lines == expected and equal("mnist.pt", "undisturbed.pt")
    what = f"{kills} kills, {incomplete} of them during a save" if kills else f"{stops} stops"
    print(f"{what}; {resumed} starts resumed; {'equal' if same else 'DIFFERENT'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
