"""06 and 07/fsdp.py: interrupted, a run resumes as if nothing had happened."""

import contextlib
import os
import re
import signal
import time

from helpers import (
    Running,
    copy_project,
    equal,
    free_port,
    order_of,
    processes,
    torchrun,
    train,
    wait_for,
    wait_until,
)

TRAIN, FSDP = "06_checkpointing/train.py", "07_slurm/fsdp.py"
# after calling these, a rank waits for a signal: the start of a worker, a step, ...
MOMENTS = [
    "multiprocessing.process.BaseProcess.start",
    "common.model.warmup_then_decay",
    "os.fsync",
    "common.gather.gather_in_order",
]
STOP = r" (\d+%)  loss .*\nstopped: the same command resumes\nstarting .*'done': (\d+)"


class Run:
    """A script in two folders: `whole` is undisturbed, `run` is interrupted."""

    def __init__(self, folder, script, *options):
        self.folder = folder
        directory, name = script.split("/")
        copy_project(folder / "a project", directory, small=("data", "model"))
        self.script = folder / "a project" / name
        self.options = ["--batch-size=16", "--save-every=3", *options]
        if name == "fsdp.py":
            self.options += ["--width=16", "--depth=1"]

    def start(self, *options, fault=None, **settings):
        command = torchrun(self.script, 2, *self.options, *options, fault=fault)
        return self.run(command, **settings)

    def run(self, command, **settings):
        return Running(command, self.folder / "run", OMP_NUM_THREADS=1, **settings)

    def run_sh(self, **settings):
        command = ["bash", self.script.with_name("run.sh"), *self.options]
        return self.run(command, **settings)

    def check(self):
        """The final weights are those of an undisturbed run."""
        whole = self.folder / "whole"
        train(self.script, 2, *self.options, cwd=whole)
        assert equal(self.folder / "run/mnist.pt", whole / "mnist.pt")


def test_killed_while_it_saves(tmp_path):
    """06, in the third torch.save after each start: a file is partly written."""
    run = Run(tmp_path, TRAIN, "--save-every=1")
    settings = {"PET_MAX_RESTARTS": 50, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
    result = run.start(fault="killed_in_save:3", **settings).finish()
    assert result.code == 0 and result.output.count("starting at ") > 2, result
    run.check()


def test_06_run_sh_restarts_killed_ranks(tmp_path):
    """Three times: whenever rank 1 has read 350 of its 1150 images."""
    run = Run(tmp_path, TRAIN, "--epochs=10")
    result = run.run_sh(READ="1 350 9").finish()
    assert result.code == 0 and result.output.count("starting at ") == 4, result
    run.check()


def test_06_training_continues_on_one_node_when_the_other_one_leaves(tmp_path):
    """The other torchrun is killed; the first node trains to the end, with code 0."""
    run = Run(tmp_path, TRAIN, "--epochs=20")
    slow = tmp_path / "run/slow"
    slow.parent.mkdir()
    slow.write_text("0.02")
    settings = {"NPROC": 1, "RDZV_ID": "a", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    first = run.run_sh(**settings)
    wait_for("epoch 1/", first)
    second = run.run_sh(**settings)
    wait_for("on 2 ranks", first, second)
    second.process.kill()
    left = second.finish()
    wait_for("on 1 ranks", first, times=2)
    slow.unlink()
    stayed = first.finish()
    assert stayed.code == 0 and left.code != 0, stayed
    assert (left.output + stayed.output).count("'done': 0}") == 1, stayed  # resumed


def test_the_ranks_end_with_torchrun(tmp_path):
    """At once, even if it is killed: else the same command would start a second run."""
    run = Run(tmp_path, TRAIN, "--epochs=10")
    (tmp_path / "run").mkdir()
    slow = tmp_path / "run/slow"
    slow.write_text("0.02")
    running = run.start()
    wait_for("epoch 2/10 ", running)
    running.process.kill()
    running.process.wait()
    wait_until(lambda: not processes(running.token), limit=5)
    slow.unlink()
    assert run.start().finish().code == 0
    run.check()


def test_signals_to_all_processes_at_each_moment(tmp_path):
    """To torchrun, ranks and workers, as from a scheduler; nothing is lost."""
    run = Run(tmp_path, FSDP, "--epochs=4", "--save-every=99", "--workers=2")
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM]
    output = ""
    for moment, number in zip(MOMENTS, numbers, strict=True):
        running = run.start(fault=f"pause:{moment}")
        paused = tmp_path / "run/paused-0"
        wait_until(paused.exists, running)
        time.sleep(1)  # for the other rank
        for process in processes(running.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        result = running.finish(120)
        assert result.code == 1 and "DataLoader worker" not in result.errors, result
        paused.unlink()
        output += result.output
    last = run.start().finish()
    assert last.code == 0, last
    stops = re.findall(STOP, output + last.output)
    assert len(stops) == len(MOMENTS), output
    assert all(percent == f"{int(done) / 181:.0%}" for percent, done in stops), output
    run.check()


def test_a_worker_is_killed(tmp_path):
    """All ranks end within seconds and leave no process; the run can be resumed."""
    run = Run(tmp_path, FSDP, "--epochs=2", "--workers=2", "--batch-size=4")
    image = order_of(1, 181, 2, seed=0)[150]
    failed = run.start(IMAGE=f"{image} 9").finish(120)
    assert failed.code == 1 and "killed by signal: Killed" in failed.errors, failed
    resumed = run.start().finish()
    assert resumed.code == 0 and "'done': 0}" not in resumed.output, resumed
    run.check()
