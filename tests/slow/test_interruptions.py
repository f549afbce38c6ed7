"""06, 07 and fsdp.py: interrupted, a run resumes as if nothing had happened."""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    TORCHRUN,
    Running,
    copy_project,
    equal,
    exit_codes,
    free_port,
    order_of,
    processes,
    run_ranks,
    start_ranks,
    wait_for,
    wait_until,
)
from places import stopped_and_resumed

RUN = ["bash", "run.sh"]
LONG = ["--epochs", 40, "--batch-size", 16, "--save-every", 3]  # 240 steps of two ranks
# of an undisturbed run
WHOLE = ["--checkpoint", "whole-run.pt", "--output", "whole.pt"]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.fixture
def project(tmp_path):
    """A copy of 06 with slow images, and whole.pt, the end of an undisturbed run."""
    project = copy_project(
        tmp_path / "a project", "06_checkpointing", small=("data", "model")
    )
    train(project, 2, *LONG, *WHOLE)
    (project / "whole-run.pt").unlink()
    (project / "slow").write_text("0.003")
    return project


def train(project, ranks, *options, **settings):
    """Train in forked ranks, as fast as possible, and return what they print."""
    (project / "slow").unlink(missing_ok=True)
    return run_ranks("train.py", ranks, *options, cwd=project, **settings).output


def test_killed_while_it_saves(project):
    kills = 10
    # 3 steps per epoch
    options = ["--epochs", 2 + kills, "--batch-size", 31, "--save-every", 1]
    train(project, 2, *options, *WHOLE)
    files = [project / "output", project / "errors"]
    checkpoint, temporary = project / "checkpoint.pt", project / "checkpoint.pt.tmp"
    incomplete = 0
    for _ in range(kills):
        ranks = start_ranks("train.py", 2, options, project, files)
        end = time.monotonic() + 300
        # without a pause, as a save takes only a millisecond; the first one of all is
        # completed
        while not (temporary.exists() and checkpoint.exists()):
            assert all(rank.is_alive() for rank in ranks) and time.monotonic() < end
        time.sleep(random.choice((0, random.uniform(0, 0.004))))
        exit_codes(ranks, limit=0)  # kills them
        incomplete += temporary.exists()
        temporary.unlink(missing_ok=True)
    assert incomplete >= 3
    output = files[0].read_text() + train(project, 2, *options)
    assert output.count("resuming from ") == kills
    assert equal(project / "mnist.pt", project / "whole.pt")


def test_killed_ranks_are_restarted(project):
    """Three times, as run.sh allows: whenever rank 1 has read 1250 of 4600 images."""
    result = Running([*RUN, *LONG], project, READ="1 1250 9").finish()
    assert result.code == 0 and result.output.count("resuming from ") == 3, result
    assert "epoch 40/40  loss" in result.output, result
    assert equal(project / "mnist.pt", project / "whole.pt")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_training_continues_on_one_node_when_the_other_one_leaves(number, project):
    """By a signal to its torchrun, which run.sh has become; to the end, with code 0."""
    settings = {"NPROC": 1, "OMP_NUM_THREADS": 1, "RDZV_ID": "a"}
    settings["RDZV_ENDPOINT"] = f"127.0.0.1:{free_port()}"
    first = Running([*RUN, *LONG], project, **settings)
    wait_for("epoch 1/", first)
    second = Running([*RUN, *LONG], project, **settings)
    wait_for("resuming from ", first, second)  # both train, from the last checkpoint
    wait_for("%  loss", first, second, times=9)
    second.process.send_signal(number)
    assert second.finish().code != 0
    (project / "slow").unlink()
    assert first.finish().code == 0
    both = "".join(each.printed()[0] for each in (first, second))
    assert both.count("resuming from ") >= 2 and "epoch 40/40  loss" in both, both


def test_without_its_launcher_a_run_ends_at_its_next_save(project):
    """After `kill -9` of run.sh, which is torchrun: a rerun would train beside them."""
    running = Running([*RUN, *LONG], project, PYTHONOPTIMIZE=1)  # without asserts
    wait_for("epoch 2/40", running)
    running.process.kill()
    result = running.finish()  # which checks that nothing runs any more
    assert result.errors.count("RuntimeError: torchrun was killed") == 2, result
    assert "resuming from " in train(project, 2, *LONG)
    assert equal(project / "mnist.pt", project / "whole.pt")


# With DataLoader workers


def finish_with_workers(start, interrupt=lambda running: None):
    """Start a run, interrupt it, return its result; all of it once more if that fails.

    One in fifty runs hangs, by CPython's gh-112275: a forked worker waits for a lock.
    """
    for last in (False, True):
        running = start()
        try:
            interrupt(running)
            return running.finish(120)
        except AssertionError:
            running.kill_all()
            if last:
                raise


@pytest.fixture(params=["07_slurm/train.py", "05_model_parallel/fsdp.py"])
def stoppable(request, tmp_path):
    """A run of 07 or fsdp.py by programs that interrupt it, and an undisturbed run."""
    return Stoppable(tmp_path / "a project", request.param)


class Stoppable:
    def __init__(self, project, script):
        copy_project(project, script, small=("data", "model"))
        for program in ("moments", "processes"):
            shutil.copy(ROOT / f"tests/small/own_{program}.py", project)
        self.project, self.script = project, project / Path(script).name
        self.options = ["--epochs", 12, *LONG[2:]]
        if self.script.stem == "fsdp":
            self.options += ["--width", 16, "--depth", 1]
        self.finish(project / "undisturbed")

    def finish(self, folder):
        """Train in forked ranks, as fast as possible, and return what they print."""
        (folder / "slow").unlink(missing_ok=True)
        return run_ranks(self.script, 2, *self.options, cwd=folder).output

    def torchrun(self, program, before, folder, slow, **settings):
        """Start a program of tests/small/ that goes on with the run in `before`."""
        shutil.rmtree(folder, ignore_errors=True)
        before.mkdir(exist_ok=True)
        ignored = shutil.ignore_patterns("paused-*")
        shutil.copytree(before, folder, ignore=ignored)
        (folder / "slow").write_text(str(slow))
        command = [*TORCHRUN, "--nproc-per-node=2", self.project / program]
        command += [*self.options, "--workers", 2]
        return Running(command, folder, SCRIPT=self.script.stem, **settings)

    def check_equal(self, folder):
        for file in ("mnist.pt", "best.pt"):
            assert equal(folder / file, self.project / "undisturbed" / file)


def send(number, process_ids):
    for process in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_signals_to_all_processes(method, stoppable):
    """As a scheduler may send them: to torchrun, ranks and workers; nothing is lost.

    Whatever method the script's own code sets for starting processes. Helpers of its
    own end in seconds, when the run is stopped and when it has finished.
    """
    run, rest = stoppable.project / "run", stoppable.project / "rest"

    def start(before, folder, slow):
        program = "own_processes.py"
        return stoppable.torchrun(program, before, folder, slow, METHOD=method)

    def send_signals(running):
        wait_for("epoch 2/12  ", running)
        # torchrun, ranks, what they start: between two epochs there are no workers
        while len(everything := processes(running.token)) < 11:
            assert running.process.poll() is None
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            send(number, everything)

    empty = stoppable.project / "empty"
    result = finish_with_workers(lambda: start(empty, run, 0.003), send_signals)
    assert result.code == 1, result  # torchrun's after a signal
    assert "DataLoader worker" not in result.errors, result
    after = finish_with_workers(lambda: start(run, rest, 0))
    assert after.code == 0, after
    stopped, resumed = stopped_and_resumed(result.output + after.output)
    assert len(stopped) == 1 and stopped == resumed, after
    stoppable.check_equal(rest)


@pytest.mark.parametrize("target", ["torchrun", "all processes"])
def test_a_signal_at_each_moment(target, stoppable):
    """While workers start, in a step, in a save and in an evaluation, one per start."""

    def start(before, folder, moment):
        program = "own_moments.py"
        return stoppable.torchrun(program, before, folder, 0, MOMENT=moment)

    def interrupt(paused, number, running):
        wait_until(paused, running)
        everything = processes(running.token)
        torchrun = [running.process.pid]
        send(number, torchrun if target == "torchrun" else everything)

    first = 1 if target == "torchrun" else 0  # each signal at other moments
    before, output = stoppable.project / "empty", ""
    for number, moment in enumerate(["start", "step", "save", "evaluation"], first):
        folder = stoppable.project / moment
        begin = partial(start, before, folder, moment)
        end = partial(interrupt, (folder / "paused-0").exists, SIGNALS[number % 3])
        result = finish_with_workers(begin, end)
        assert result.code == 1, result
        assert "DataLoader worker" not in result.errors, result
        before, output = folder, output + result.output
    output += stoppable.finish(folder)
    stopped, resumed = stopped_and_resumed(output)
    assert stopped == [(1, 32), (1, 64), (1, 128), (1, 181)], output
    assert stopped == resumed, output
    stoppable.check_equal(folder)


@pytest.mark.parametrize("error", ["with workers", "no memory"])
def test_other_processes_neither_hang_nor_are_killed(error, tmp_path):
    """What is open when the exit by an error kills the workers of `iterate`.

    Also if that is an error of the start of a worker, after another one has started.
    """
    project = copy_project(tmp_path / "a project", "tests/small/own_pools.py")
    running = Running([sys.executable, "own_pools.py", error], project)
    running.process.wait(120)
    output, errors = running.printed()
    assert f"Error: {error}\n" in errors
    [command] = re.findall(r"^started (\d+)$", output, re.M)
    assert processes(running.token, b"sleep") == [int(command)]
    os.kill(int(command), signal.SIGKILL)
    assert running.finish().code == 1  # which checks that nothing else runs


@pytest.mark.parametrize(
    "script",
    ["06_checkpointing/train.py", "07_slurm/train.py", "05_model_parallel/fsdp.py"],
)
@pytest.mark.parametrize(
    ("event", "error"),
    [(0, "this image cannot be read"), (9, "killed by signal: Killed")],
)
def test_a_worker_cannot_read_an_image_or_is_killed(script, event, error, tmp_path):
    """Nothing waits for it: the ranks are restarted, and resume."""
    project = copy_project(tmp_path / "a project", script, small="data")
    script = project / Path(script).name
    options = ["--epochs", 2, "--batch-size", 4, "--save-every", 3]
    run_ranks(script, 2, *options, cwd=project / "undisturbed")
    image = order_of(1, 181, 2, seed=0)[150]  # of step 19 of 23
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=3", script, *options]
    settings = {"IMAGE": f"{image} {event}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
    run = project / "run"

    def start():
        shutil.rmtree(run, ignore_errors=True)
        return Running([*command, "--workers", 2], run, **settings)

    result = finish_with_workers(start)
    assert error in result.errors, result
    assert result.code == 0 and "resuming from " in result.output, result
    assert equal(run / "mnist.pt", project / "undisturbed/mnist.pt")
