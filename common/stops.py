"""Stop all ranks after the same step once one has received a signal, such as Ctrl-C."""

import atexit
import multiprocessing
import os
import signal
import weakref

import torch
import torch.distributed as dist

# Slurm's, Ctrl-C's and a lost terminal's
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
noted = False  # whether this process has received a signal
workers = weakref.WeakSet()  # of DataLoaders


class StopSignals:
    """From now on signals only set a flag. All ranks create one and vote together."""

    def __init__(self):
        # Gloo sums the votes on the CPU: NCCL would wait for the GPU's work
        self.group = dist.new_group(backend="gloo")
        self.votes = self.work = None
        for number in SIGNALS:
            signal.signal(number, note)
        # signals end forked processes as usual, unless iterate() blocks them
        os.register_at_fork(after_in_child=reset)
        atexit.register(kill_workers)

    def vote(self):
        """Return whether any rank had noted a signal at the previous call.

        The answer is the same on all ranks. The votes are summed in the background, so
        that no step waits for them. Nobody reads the last ones.
        """
        stop = False
        if self.work:
            self.work.wait()
            stop = self.votes.item() > 0
        self.votes = torch.tensor(int(noted))
        self.work = dist.all_reduce(self.votes, group=self.group, async_op=True)
        return stop

    def iterate(self, loader):
        """iter(loader), with the signals blocked in its workers.

        The workers must deliver batches until the stop. They inherit what is blocked.
        """
        if loader.num_workers and not loader.multiprocessing_context:
            # Python 3.14 would fork them from a server that started before this block
            loader.multiprocessing_context = "fork"
        others = set(multiprocessing.active_children())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            workers.update(set(multiprocessing.active_children()) - others)


def note(signum, frame):
    global noted
    noted = True


def reset():
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def kill_workers():
    """After an error Python would send SIGTERM, which they block, and wait forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for worker in workers:
        worker.kill()
