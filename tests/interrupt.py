"""Interrupt a training of 06 again and again, and compare its end with that of one that nothing has disturbed.

    python tests/interrupt.py kill 100
    python tests/interrupt.py stop 3 --amp --accumulate 2

kill: two ranks get SIGKILL while rank 0 saves, so often. stop: of so many ranks, one gets a signal in every step, so
that each start takes one step. Prints what happened; exits with 1 if a start has found a damaged checkpoint, or if the
weights, or the lines of the epochs, are not those of the other training, bit by bit.

The ranks are forked from one process that has imported everything, which takes seconds off each start.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
import torch._dynamo  # DDP imports it  # noqa: F401
from helpers import ROOT, copy_project, equal, fewer_digits, free_port, load_script, with_dropout
from torch.utils.data.dataloader import _BaseDataLoaderIter

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
STOPPED = os.EX_TEMPFAIL


def prepare():
    """A copy of the project with few digits and a dropout, so that random numbers count; returns the script."""
    copy_project(Path("project"), ROOT / "06_checkpointing/train.py", "checkpoint.py")
    os.chdir("project")
    fewer_digits(Path())
    with_dropout(Path())
    sys.path.insert(0, os.getcwd())
    return load_script(Path("train.py"))


def signal_at_first_batch(number):
    """Let this process send itself a signal just before it reads its first batch."""
    real = _BaseDataLoaderIter.__next__

    def signal_and_read(self):
        _BaseDataLoaderIter.__next__ = real
        os.kill(os.getpid(), number)
        return real(self)

    _BaseDataLoaderIter.__next__ = signal_and_read


def start(script, nproc, options, log="log", signalled=None, number=0):
    """Fork the ranks; one of them may send itself a signal before its first batch. Returns their process ids."""
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
            except SystemExit as end:
                code = end.code or 0
            finally:
                sys.stdout.flush()
                os._exit(code)
    return children


def finish(children, codes, limit=300):
    """Wait for their end, which must come in time and be the same for all, with one of these codes; returns it."""
    end, left, ended = time.monotonic() + limit, set(children), set()
    while left:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            left.remove(child)
            ended.add(os.waitstatus_to_exitcode(status))
        if not ended <= set(codes) or len(ended) > 1 or time.monotonic() > end:
            for child in left:
                os.kill(child, signal.SIGKILL)
            raise SystemExit(f"the ranks have ended with {ended}, or not within {limit} s:\n{Path('log').read_text()}")
        time.sleep(0.002)
    return ended.pop()


def kill_while_saving(children, new, limit=30):
    """Let them train for a moment, then end all just after a save has begun. Returns whether it was unfinished."""
    time.sleep(random.uniform(0, 0.3))
    end = time.monotonic() + limit
    while not new.exists():
        if time.monotonic() > end or os.waitpid(-1, os.WNOHANG)[0]:
            raise SystemExit(f"a rank has ended, or does not save:\n{Path('log').read_text()}")
    time.sleep(random.choice((0, random.uniform(0, 0.004))))  # at once: where cores are taken, it is soon over
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    return new.exists()


def main():
    way, number, *options = sys.argv[1:]
    kills, nproc = (int(number), 2) if way == "kill" else (0, int(number))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        script = prepare()
        if way == "kill":  # an epoch has 10 steps, and 6 of them, more or less, are taken before each kill
            options += ["--epochs", str(2 + kills // 2), "--save-every", "1"]
        else:
            options += ["--epochs", "2", "--save-every", "1000"]
        undisturbed = [*options, "--checkpoint", "undisturbed-run.pt", "--output", "undisturbed.pt"]
        finish(start(script, nproc, undisturbed, "undisturbed"), [0])
        unfinished, new = 0, Path("checkpoint.pt.new")
        for _ in range(kills):
            new.unlink(missing_ok=True)
            unfinished += kill_while_saving(start(script, nproc, options), new)
        for stops in count():
            signalled = stops % nproc if way == "stop" else None
            if finish(start(script, nproc, options, "log", signalled, SIGNALS[stops % 4]), [0, STOPPED]) == 0:
                break
        log, other_log = Path("log").read_text(), Path("undisturbed").read_text()
        starts, damaged = log.count("going on from "), log.count("cannot be read")
        stops = len(set(re.findall("^stopped in .*", log, re.M)))
        epochs, other_epochs = (set(re.findall("^epoch .*accuracy [0-9.]+", text, re.M)) for text in (log, other_log))
        same = epochs == other_epochs and equal("mnist.pt", "undisturbed.pt")
    print(f"{kills} kills, {unfinished} of them in a save" if kills else f"{stops} stops, at different steps", end="; ")
    print(f"{starts} starts went on, {damaged} of them past a damaged file; {'equal' if same else 'DIFFERENT'}")
    sys.exit(not same or damaged > 0)


if __name__ == "__main__":
    main()
