"""Runs SCRIPT; CLIP takes the place of its MAX_GRAD_NORM, for gradients below and above it.

02 and 03 fork, as processes that import torch again take seconds; 03 is node RANK. Their main()
has THREADS threads.
"""

import functools
import importlib
import os
import signal
import sys

import torch


def call(function, *given):
    """Call main(); or run() of 02 and 03, which SIGINT must be able to end if main() is killed."""
    if given:  # a spawned process reads it when it imports torch
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    function(*given)
    assert not torch.distributed.is_initialized(), "the process group is left to the exit"
    assert not given or signal.getsignal(signal.SIGINT) == signal.SIG_DFL


mp = torch.multiprocessing
mp.spawn = functools.partial(mp.start_processes, start_method="fork")
if "-n" in sys.argv:
    sys.argv += ["-i", os.environ["RANK"], "--master-port", os.environ["MASTER_PORT"]]
script = importlib.import_module(os.environ["SCRIPT"])
script.MAX_GRAD_NORM = float(os.environ.get("CLIP", script.MAX_GRAD_NORM))
if hasattr(script, "run"):
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(int(os.environ.get("THREADS", 1)))
    script.run = functools.partial(call, script.run)
call(script.main)
