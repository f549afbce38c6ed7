"""Run SCRIPT, which pauses once, at a MOMENT, until it has got a signal.

MOMENT: step, start (of the first worker), save or evaluation. Each rank writes a file
`paused-RANK` when it pauses.
"""

import importlib
import os
import signal
import time

script = importlib.import_module(os.environ["SCRIPT"])
made = []  # the StopSignals of this rank
paused = []


def pause(limit=60):
    """Wait for a signal, which is noted, or is pending where signals are blocked."""
    if paused or not made:
        return
    paused.append(True)
    open(f"paused-{os.environ['RANK']}", "w").close()
    end = time.monotonic() + limit
    while not made[0].noted and not signal.sigpending() and time.monotonic() < end:
        time.sleep(0.01)


def pause_before(owner, name):
    function = getattr(owner, name)

    def paused_function(*given, **options):
        pause()
        return function(*given, **options)

    setattr(owner, name, paused_function)


class StopSignals(script.StopSignals):
    def __init__(self):
        super().__init__()
        made.append(self)


script.StopSignals = StopSignals
moment = os.environ["MOMENT"]
if moment == "step":
    pause_before(script, "warmup_then_decay")
elif moment == "save":
    pause_before(os, "fsync")
elif moment == "evaluation":
    pause_before(script, "evaluate")
elif moment == "start":
    # registered before those of StopSignals, so they are called before them; a worker
    # only gets a signal that is sent to all processes
    os.register_at_fork(after_in_parent=pause, after_in_child=lambda: pause(limit=2))

if __name__ == "__main__":
    script.main()
