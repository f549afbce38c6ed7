"""Stop all ranks after the same step once one has had a signal: Slurm's, or Ctrl-C."""

import atexit
import multiprocessing
import os
import signal
import weakref

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
noted = False  # whether this process has had a signal
workers = weakref.WeakSet()  # of DataLoaders


class StopSignals:
    """From now on signals only set a flag. All ranks must make one, and vote alike."""

    def __init__(self):
        # Gloo sums the votes on the CPU: NCCL would wait for the GPU's work
        self.group = dist.new_group(backend="gloo")
        self.votes = self.work = None
        for number in SIGNALS:
            signal.signal(number, note)
        # other processes that are forked, such as a Pool's, end by a signal as usual
        os.register_at_fork(after_in_child=reset)
        atexit.register(kill_workers)

    def vote(self):
        """Return whether any rank had noted a signal at the call before this one.

        The answer is the same on all ranks. The votes are summed in the background, so
        that no step waits for them.
        """
        stop = False
        if self.work:
            self.work.wait()
            stop = self.votes.item() > 0
        self.votes = torch.tensor(int(noted))
        self.work = dist.all_reduce(self.votes, group=self.group, async_op=True)
        return stop

    def iterate(self, loader):
        """iter(loader), whose workers get no signals: they must work until the stop.

        A process inherits the signals that are blocked when it is started.
        """
        if loader.num_workers and not loader.multiprocessing_context:
            loader.multiprocessing_context = "fork"  # a forkserver is there already
        others = set(multiprocessing.active_children())
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            workers.update(set(multiprocessing.active_children()) - others)


def note(signum, frame):
    global noted
    noted = True


def reset():
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def kill_workers():
    """After an error: Python would send SIGTERM, which they block, and wait forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for worker in workers:
        worker.kill()
