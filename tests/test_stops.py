"""common/stops.py, in one process: what a signal ends, and what it does not end."""

import multiprocessing
import os
import signal
import time

import torch.distributed as dist
from helpers import exit_codes, start
from torch.utils.data import DataLoader

from common.stops import SIGNALS, StopSignals


def signal_at_once():
    """Processes of a script's own end by a signal that comes in their first moment."""
    for number in 12 * SIGNALS:
        child = os.fork()
        if child == 0:
            time.sleep(9)  # if it has only noted the signal
            os._exit(0)
        os.kill(child, number)
        assert os.waitpid(child, 0)[1] == number  # the signal that has ended it
    fork = multiprocessing.get_context("fork")
    for _ in range(12):
        process = fork.Process(target=time.sleep, args=[9])
        process.start()
        process.terminate()
        process.join()
        assert process.exitcode == -signal.SIGTERM
    for _ in range(5):
        with fork.Pool(2):  # its end sends SIGTERM, and waits
            pass


def signal_workers(stops):
    """Workers ignore signals, and only they are killed at the exit."""
    other = multiprocessing.Process(target=time.sleep, args=[99])
    other.start()
    for end in (list, next):  # of the epoch, or in it
        batches = stops.iterate(DataLoader(range(9), num_workers=2))
        workers = {*multiprocessing.active_children()} - {other}
        assert len(workers) == 2
        for worker in workers:
            for number in SIGNALS:
                os.kill(worker.pid, number)
        end(batches)
    assert not stops.vote()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stops.vote()
    stops._kill_workers()
    for worker in workers:
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
    assert other.is_alive()
    other.terminate()


def rank(folder):
    dist.init_process_group("gloo", f"file://{folder}/store", None, 1, 0)
    stops = StopSignals()
    signal_at_once()
    signal_workers(stops)


def test_07_fsdp_only_workers_do_not_end_by_signals(tmp_path):
    assert exit_codes(start(rank, [(tmp_path,)])) == [0]
