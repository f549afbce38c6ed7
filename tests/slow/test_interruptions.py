"""06 and 07: whatever interrupts a run, it resumes as if nothing had happened."""

import contextlib
import os
import random
import re
import shutil
import signal
import time

import pytest
from helpers import (TORCHRUN, Running, copy_project, equal, exit_codes, free_port,
    order_of, processes, run_ranks, start_ranks, wait_for)

RUN = ["bash", "run.sh"]
LONG = ["--epochs", 40, "--batch-size", 16, "--save-every", 3]  # 240 steps of two ranks
WHOLE = ["--checkpoint", "whole-run.pt", "--output", "whole.pt"]  # of an undisturbed run


@pytest.fixture
def project(tmp_path):
    """A copy of 06 with whole.pt, the weights of an undisturbed run with LONG, and slow images."""
    project = copy_project(tmp_path / "a project", "06_checkpointing", small=("data", "model"))
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
    options = ["--epochs", 2 + kills, "--batch-size", 31, "--save-every", 1]  # 3 steps per epoch
    train(project, 2, *options, *WHOLE)
    files = [project / "output", project / "errors"]
    checkpoint, temporary = project / "checkpoint.pt", project / "checkpoint.pt.tmp"
    incomplete = 0
    for _ in range(kills):
        ranks = start_ranks("train.py", 2, options, project, files)
        end = time.monotonic() + 300
        # Without a pause, as a save takes only a millisecond; the first one of all is completed
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
    """Three times, as run.sh allows: a rank is killed whenever it has read 1250 of 4600 images."""
    result = Running([*RUN, *LONG], project, READ="1 1250 9").finish()
    assert result.code == 0 and result.output.count("resuming from ") == 3, result
    assert "epoch 40/40, restart 3  loss" in result.output, result
    assert equal(project / "mnist.pt", project / "whole.pt")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_training_continues_on_one_node_when_the_other_one_leaves(number, project):
    """By a signal to its torchrun, which run.sh has become; to the end, with exit code 0."""
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
    assert both.count("resuming from ") >= 2 and "epoch 40/40, restart 1  loss" in both, both


def test_without_its_launcher_a_run_ends_at_its_next_save(project):
    """After `kill -9` of run.sh, which is torchrun: a rerun would train next to the ranks."""
    running = Running([*RUN, *LONG], project, PYTHONOPTIMIZE=1)  # without asserts
    wait_for("epoch 2/40", running)
    running.process.kill()
    result = running.finish()  # which checks that nothing runs any more
    assert result.errors.count("RuntimeError: torchrun was killed") == 2, result
    assert train(project, 2, *LONG).startswith("resuming from ")
    assert equal(project / "mnist.pt", project / "whole.pt")


# With DataLoader workers


def finish_with_workers(start, interrupt=lambda running: None):
    """Start a run, interrupt it and return its result; all of it once more if that fails.

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


OWN = """
import atexit, multiprocessing, os, subprocess, time
import train
evaluate, helpers = train.evaluate, []

def with_helpers(*given):  # started while the handlers are installed, after workers were
    if not helpers:
        helpers.append(subprocess.Popen(["sleep", "1000"]))
        helpers.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000]))
        helpers[1].start()
        with multiprocessing.get_context("fork").Pool(2) as pool:  # its end waits after SIGTERM
            pool.map(time.sleep, [1, 1], 1)
        atexit.register(lambda: [(each.terminate(), wait()) for each, wait in zip(
            helpers, (helpers[0].wait, helpers[1].join))])
    return evaluate(*given)

train.evaluate = with_helpers
if __name__ == "__main__":
    multiprocessing.set_start_method(os.environ["METHOD"], force=True)
    train.main()
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_07_signals_to_all_processes(method, tmp_path):
    """As a scheduler may send them: to torchrun, the ranks and the workers; nothing is lost.

    Whatever method the script's own code sets for starting processes. Helpers of its own end in
    seconds, when the run is stopped and when it has finished.
    """
    project = copy_project(tmp_path / "a project", "07_slurm", small=("data", "model"))
    (project / "own.py").write_text(OWN)
    (project / "slow").write_text("0.003")
    command = [*TORCHRUN, "--nproc-per-node=2", "own.py", "--epochs", 6, *LONG[2:]]
    run_ranks("train.py", 2, "--epochs", 6, *LONG[2:], *WHOLE, cwd=project)

    def start(saved):
        (project / "checkpoint.pt").unlink(missing_ok=True)
        if saved:
            shutil.copy(project / "stopped.pt", project / "checkpoint.pt")
        return Running([*command, "--workers", 2], project, METHOD=method)

    def send_signals(running):
        wait_for("epoch 2/6  ", running)
        while len(everything := processes(running.token)) < 11:  # torchrun, ranks, what they start
            assert running.process.poll() is None  # between two epochs there are no workers
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            for process in everything:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    result = finish_with_workers(lambda: start(False), send_signals)
    assert result.code == 1, result  # torchrun's after a signal
    [stop] = re.findall("^stopped (at .*); rerun", result.output, re.M)
    assert "DataLoader worker" not in result.errors, result
    (project / "slow").unlink()
    (project / "checkpoint.pt").rename(project / "stopped.pt")
    rest = finish_with_workers(lambda: start(True))
    assert f"resuming from checkpoint.pt {stop} on 2 ranks\n" in rest.output, rest
    assert rest.code == 0, rest
    assert equal(project / "mnist.pt", project / "whole.pt")


@pytest.mark.parametrize("folder", ["06_checkpointing", "07_slurm"])
@pytest.mark.parametrize(("event", "error"), [
    (0, "this image cannot be read"), (9, "killed by signal: Killed")])
def test_a_worker_cannot_read_an_image_or_is_killed(folder, event, error, tmp_path):
    """Nothing waits for it: the ranks are restarted, and resume."""
    project = copy_project(tmp_path / "a project", folder, small="data")
    options = ["--epochs", 2, "--batch-size", 4, "--save-every", 3]
    run_ranks("train.py", 2, *options, *WHOLE, cwd=project)
    image = order_of(1, 181, 2, seed=0)[150]  # of step 19 of 23
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=3", "train.py", *options]
    settings = {"IMAGE": f"{image} {event}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}

    def start():
        for file in ("happened", "checkpoint.pt"):
            (project / file).unlink(missing_ok=True)
        return Running([*command, "--workers", 2], project, **settings)

    result = finish_with_workers(start)
    assert error in result.errors, result
    assert result.code == 0 and "resuming from " in result.output, result
    assert equal(project / "mnist.pt", project / "whole.pt")
