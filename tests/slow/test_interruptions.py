"""Killed or stopped, a job leaves no process; 06 and 07/fsdp.py resume exactly."""

import contextlib
import os
import re
import signal
import time

from helpers import (
    ROOT,
    Running,
    copy_repository,
    equal,
    free_port,
    processes,
    torchrun,
    train,
    wait_until,
)


class Run:
    """A script in a folder `run`, where it is interrupted, and in `whole`."""

    def __init__(self, folder, script, *options):
        self.place, self.options = folder / "run", ["--batch-size=16", *options]
        self.place.mkdir()
        self.script = copy_repository(folder / "a project", small=True) / script
        self.run_sh = ["bash", self.script.with_name("run.sh")]

    def start(self, *command, **settings):
        command = [*command, *self.options]
        return Running(command, self.place, OMP_NUM_THREADS=1, **settings)

    def check(self):
        """It has the weights of an undisturbed run."""
        whole = self.place.with_name("whole")
        train(self.script, 2, *self.options, cwd=whole)
        assert equal(self.place / "mnist.pt", whole / "mnist.pt")


def test_06_run_sh_restarts_ranks_that_are_killed_in_a_save(tmp_path):
    """In the third file after each start, of which a part is written: four starts."""
    run = Run(tmp_path, "06_checkpointing/train.py", "--epochs=1", "--save-every=1")
    settings = {"SCRIPT": ROOT / "tests/faults.py", "NPROC": 2}
    result = run.start(
        *run.run_sh, "signal_after:torch.save:3:9:0", run.script, **settings
    ).finish()
    assert result.code == 0 and result.output.count("starting at ") == 4, result
    run.check()


def test_06_continues_on_one_node_when_the_other_one_leaves(tmp_path):
    """The other torchrun is killed, and with it end its ranks."""
    run = Run(tmp_path, "06_checkpointing/train.py", "--epochs=20")
    (slow := run.place / "slow").write_text("0.02")  # seconds for each image
    given = {"RDZV_ID": "a", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "NPROC": 1}
    first = run.start(*run.run_sh, **given)
    wait_until(lambda: "epoch 1/" in first.output, first)
    second = run.start(*run.run_sh, **given)
    both = first, second
    wait_until(lambda: any("on 2 ranks" in each.output for each in both), *both)
    second.process.kill()
    assert second.finish().code != 0
    wait_until(lambda: first.output.count("on 1 ranks") == 2, first)
    slow.write_text("0")
    assert first.finish().code == 0, first
    assert (first.output + second.output).count("'done': 0}") == 1, both  # resumed


# after calling these, a rank waits for a signal: the start of a worker, a step, ...
MOMENTS = {
    "multiprocessing.process.BaseProcess.start": signal.SIGTERM,
    "common.model.warmup_then_decay": signal.SIGINT,
    "os.fsync": signal.SIGHUP,
    "common.gather.gather_in_order": signal.SIGTERM,
}
STOP = r" (\d+%)  loss .*\nstopped: the same command resumes\nstarting .*'done': (\d+)"


def test_fsdp_signals_to_all_processes_at_each_moment(tmp_path):
    """To torchrun, ranks and workers, as from a scheduler; nothing is lost."""
    run = Run(tmp_path, "07_slurm/fsdp.py", "--epochs=4", "--width=16", "--depth=1")
    run.options += ["--save-every=99", "--workers=2"]
    output = ""
    for moment, number in MOMENTS.items():
        running = run.start(*torchrun(run.script, 2, fault=f"pause:{moment}"))
        paused = run.place / "paused-0"
        wait_until(paused.exists, running)
        time.sleep(1)  # for the other rank
        for process in processes(running.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        result = running.finish()
        assert result.code == 1 and "DataLoader worker" not in result.errors, result
        paused.unlink()
        output += result.output
    stops = re.findall(
        STOP, output + run.start(*torchrun(run.script, 2)).finish().output
    )
    assert len(stops) == len(MOMENTS), output
    assert all(percent == f"{int(done) / 181:.0%}" for percent, done in stops), output
    run.check()
