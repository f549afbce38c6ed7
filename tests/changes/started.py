"""Start 02 and 03 by fork, as an import takes seconds; 03 is node `rank`.

At the end, check what is left. main() has TEST_THREADS threads. CLIP takes the place of
MAX_GRAD_NORM, for gradients below and above it.
"""

import functools
import os
import signal
import sys

import helpers
import torch


def change(script, rank):
    def call(function, *given):
        """Call main(), or run() of a spawned process, and check what it leaves."""
        if given:  # as a spawned process does when it imports torch
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        code = None
        try:
            function(*given)
        except SystemExit as end:  # 07
            code = end.code
        assert not torch.distributed.is_initialized(), "the group is left to the exit"
        # compiled code refers to the group; its threads may abort the exit
        if hasattr(script, "DDP") and "--compile" not in sys.argv:
            helpers.wait_until(lambda: not helpers.threads_of_gloo(), limit=5)
        if hasattr(script, "rest_of_epoch"):
            assert torch.initial_seed() > 99, "steps without seeds of their own"
        assert not given or signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        sys.exit(code)

    multiprocessing = torch.multiprocessing
    multiprocessing.spawn = functools.partial(
        multiprocessing.start_processes, start_method="fork"
    )
    if "-n" in sys.argv:
        sys.argv += ["-i", str(rank), "--master-port", os.environ["MASTER_PORT"]]
    gather = getattr(script, "gather_in_order", None)

    def gather_in_order(*given):
        assert not torch.is_grad_enabled(), "an evaluation with gradients"
        return gather(*given)

    script.gather_in_order = gather_in_order
    if script.__name__ == "pipeline":  # rank 1 may have no memory for all weights
        script.dist.all_gather_object = None
    script.MAX_GRAD_NORM = float(os.environ.get("CLIP", script.MAX_GRAD_NORM))
    if hasattr(script, "run"):
        os.environ.pop("OMP_NUM_THREADS", None)
        torch.set_num_threads(int(os.environ.get("TEST_THREADS", 1)))
        script.run = functools.partial(call, script.run)
    script.main = functools.partial(call, script.main)
