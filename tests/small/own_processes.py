"""Run SCRIPT, whose first evaluation starts processes of its own.

METHOD is the method that multiprocessing uses for what does not say which.
"""

import atexit
import importlib
import multiprocessing
import os
import subprocess
import time

script = importlib.import_module(os.environ["SCRIPT"])
fork = multiprocessing.get_context("fork")
evaluate = script.evaluate
others = []


def end_others():
    command, process = others
    command.terminate()
    command.wait()
    process.terminate()
    process.join()


def evaluate_with_others(*given):
    """Start them while signals are noted, after workers were started."""
    if not others:
        process = fork.Process(target=time.sleep, args=[1000])
        process.start()
        others.extend([subprocess.Popen(["sleep", "1000"]), process])
        with fork.Pool(2) as pool:  # its end sends SIGTERM, and waits
            pool.map(time.sleep, [1, 1], 1)
        atexit.register(end_others)
    return evaluate(*given)


script.evaluate = evaluate_with_others
if __name__ == "__main__":
    multiprocessing.set_start_method(os.environ["METHOD"], force=True)
    script.main()
