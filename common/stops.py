"""A signal stops all ranks after the same step: Slurm's, systemd's or Ctrl-C.

Signals reach the ranks at different moments, and if one rank stopped, the others would
wait for it. So the ranks only note them, and vote in each step.
"""

import atexit
import multiprocessing
import os
import signal
import weakref

import torch
import torch.distributed as dist
from tqdm import tqdm

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # torchrun forwards these


class StopSignals:
    """Notes the stop signals that this process gets. All ranks must make one."""

    def __init__(self):
        self.noted = 0
        self.blocked = False  # whether the processes that are forked now get no signals
        self.workers = weakref.WeakSet()  # of DataLoaders; it forgets those that ended
        # Gloo, as NCCL would wait for the GPU. It is referred to weakly, because Python
        # keeps this object until the exit, and the group must end with the others
        self.group = weakref.ref(dist.new_group(backend="gloo"))
        for number in SIGNALS:
            signal.signal(number, self._note)
        # no signal may come between a fork and the moment when its child has reset the
        # handlers: the child would note it, and continue
        os.register_at_fork(
            before=self._block,
            after_in_parent=self._unblock,
            after_in_child=self._after_in_child,
        )
        atexit.register(self._kill_workers)

    def vote(self):
        """Return whether any rank has noted a signal: the same on all ranks."""
        votes = torch.tensor(self.noted)
        dist.all_reduce(votes, group=self.group())
        return votes.item() > 0

    def iterate(self, loader):
        """Return an iterator over a DataLoader whose workers do not get the signals.

        The ranks need their batches until they stop. The workers are forked, because
        only these inherit the block for sure: worker_init_fn would come too late. What
        a worker starts inherits it, too: end that with kill(), not with terminate().
        """
        if loader.num_workers:
            loader.multiprocessing_context = "fork"
        others = set(multiprocessing.active_children())
        self.blocked = True
        try:
            return iter(loader)
        finally:  # also if only some workers could be started
            self.blocked = False
            self._unblock()  # a signal that has come meanwhile arrives now
            self.workers.update(set(multiprocessing.active_children()) - others)

    def end(self, progress):
        """Log the stop, wait until rank 0 has saved, and return the exit code, 1."""
        if dist.get_rank() == 0:
            tqdm.write(f"stopped at {progress}; rerun the same command to resume")
        dist.barrier(self.group())  # the end of one rank is the end of the job
        return 1

    def _note(self, signum, frame):
        self.noted += 1

    def _block(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _unblock(self):
        if not self.blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _after_in_child(self):
        self.workers.clear()  # they are its parent's
        for number in SIGNALS:  # processes of a Pool, for example, end by them as usual
            signal.signal(number, signal.SIG_DFL)
        self._unblock()

    def _kill_workers(self):
        """End the workers after an error: Python would send SIGTERM, which they block.

        Not other processes, such as a Pool's: its end would wait for a lock that a
        killed process has held.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises if one dies
        for process in self.workers:
            process.kill()
