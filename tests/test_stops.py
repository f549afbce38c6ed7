"""common/stops.py: which processes end by a signal, and which do not."""

import multiprocessing
import os
import signal

import torch.distributed as dist
from helpers import ROOT, train
from torch.utils.data import DataLoader


def test_only_workers_of_iterate_ignore_signals(tmp_path):
    """The processes of a Pool and other forked processes end."""
    train(__file__, 1, cwd=tmp_path, PYTHONPATH=ROOT)


def main():
    from common.stops import SIGNALS, StopSignals

    dist.init_process_group("gloo")
    stops = StopSignals()
    fork = multiprocessing.get_context("fork")
    for number in SIGNALS:
        process = fork.Process(target=signal.raise_signal, args=[number])
        process.start()
        process.join()
        assert process.exitcode == -number
    with fork.Pool(2) as pool:  # its end sends SIGTERM, and waits
        pool.map(abs, range(9))
    batches = stops.iterate(DataLoader(range(9), num_workers=2))
    for worker in multiprocessing.active_children():
        for number in SIGNALS:
            os.kill(worker.pid, number)
    assert len([*batches]) == 9
    os.kill(os.getpid(), signal.SIGTERM)
    assert [stops.vote() for _ in range(2)] == [False, True]


if __name__ == "__main__":
    main()
