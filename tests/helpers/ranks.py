"""Run scripts in ranks that are forked, not started by torchrun: seconds sooner."""

import multiprocessing.connection
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

import torch

from helpers.commands import SITECUSTOMIZE, STANDALONE, Result, free_port
from helpers.paths import ROOT

LAUNCHED = {"TORCHELASTIC_RUN_ID": "any"}  # as torchrun sets it
# Ranks are forked from a process that has imported torch: torchrun takes seconds to start them
RANKS = multiprocessing.get_context("forkserver")
MODULES = "nn fsdp pipelining tensor.parallel checkpoint.state_dict".split()
RANKS.set_forkserver_preload(["tqdm", *(f"torch.distributed.{name}" for name in MODULES)])


def start_ranks(script, nproc, options, cwd, files, **environment):
    """Start a script in ranks as torchrun does; they append to two files, output and errors."""
    launch = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    launch |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""), **environment}
    given = [{"RANK": rank, "LOCAL_RANK": rank, **launch} for rank in range(nproc)]
    return start(run_rank, [(Path(cwd, script), options, cwd, each, files) for each in given])


def start(function, arguments):
    """Call a function with each of these arguments in a process forked as above."""
    ranks = [RANKS.Process(target=function, args=given) for given in arguments]
    for process in ranks:
        process.start()
    return ranks


def exit_codes(ranks, limit=300):
    """Wait for the ends of ranks and return their exit codes; SIGKILL ends them at the limit.

    That is a minute after one of them has failed: the others may wait for it.
    """
    end = time.monotonic() + limit
    while running := [process.sentinel for process in ranks if process.exitcode is None]:
        if not multiprocessing.connection.wait(running, max(0, end - time.monotonic())):
            break
        if any(process.exitcode for process in ranks):
            end = min(end, time.monotonic() + 60)
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def run_ranks(script, nproc, *options, cwd, code=0, stop=None, **environment):
    """Run a script in ranks, for tests of what it computes; they must end with this exit code.

    stop: a rank, a signal's number and the number of the batch for which the rank then asks.
    """
    if stop:
        environment |= {"SIGNAL_AT_BATCH": " ".join(map(str, map(int, stop))), **LAUNCHED}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "output"), Path(folder, "errors")]
        codes = exit_codes(start_ranks(script, nproc, options, cwd, files, **environment))
        printed = [file.read_text() for file in files]
    command = [*STANDALONE, f"--nproc-per-node={nproc}", script, *options]
    result = Result(command, max(map(abs, codes)), *printed)
    assert result.code == code, result
    return result


def run_rank(script, options, cwd, settings, files):
    os.chdir(cwd)
    os.environ.update({name: str(value) for name, value in settings.items()})
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = open(1, "w", closefd=False)  # a line in one piece, also from two ranks
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # DataLoader workers, as usual
    runpy.run_path(str(SITECUSTOMIZE))  # which a new Python would read at its start
    sys.argv = [str(script), *map(str, options)]
    sys.path[:] = [str(Path(script).parent), *(path for path in sys.path if path != str(ROOT))]
    runpy.run_path(str(script), run_name="__main__")
