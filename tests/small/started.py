"""Runs SCRIPT; CLIP takes the place of its MAX_GRAD_NORM, for gradients below and above it.

02 and 03 fork, as an import takes seconds; main() has TEST_THREADS threads. 03 is node RANK.
"""

import functools
import importlib
import multiprocessing
import os
import signal
import sys

import torch


def call(function, *given):
    """Call main() or a spawned run(); check the workers, group and signals that it leaves."""
    if given:  # as a spawned process does when it imports torch
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    function(*given)
    workers = multiprocessing.active_children()
    assert all(worker.join(10) or worker.exitcode == -9 for worker in workers), "left to the exit"
    assert not torch.distributed.is_initialized(), "the process group is left to the exit"
    stops = [signal.SIGINT] if given else getattr(script, "STOP_SIGNALS", ())
    assert given or not stops or torch.initial_seed() > 99, "steps without seeds of their own"
    assert {*map(signal.getsignal, stops)} <= {signal.SIG_DFL if given else signal.SIG_IGN}


mp = torch.multiprocessing
mp.spawn = functools.partial(mp.start_processes, start_method="fork")
if "-n" in sys.argv:
    sys.argv += ["-i", os.environ["RANK"], "--master-port", os.environ["MASTER_PORT"]]
script = importlib.import_module(os.environ["SCRIPT"])
script.MAX_GRAD_NORM = float(os.environ.get("CLIP", script.MAX_GRAD_NORM))
if hasattr(script, "run"):
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", 1)))
    script.run = functools.partial(call, script.run)
if hasattr(script, "STOP_SIGNALS"):  # 06 and fsdp.py kill a child, as a DataLoader worker is
    multiprocessing.Process(target=signal.sigtimedwait, args=([], 150), daemon=True).start()
call(script.main)
