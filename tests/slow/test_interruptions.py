"""06, 07, 08 and fsdp.py: whatever interrupts a run, it resumes as if nothing had happened."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers import (TORCHRUN, Running, copy_project, equal, exit_codes, free_port,
    order_of, processes, run_ranks, start_ranks, wait_for, wait_until)

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
    """KILLS=100 in the environment kills it more often."""
    kills = int(os.environ.get("KILLS", 10))
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
    assert equal(project / "mnist.pt", project / "whole.pt")


def test_training_continues_without_a_lost_node(project):
    """On one of one to two nodes, as run.sh has them."""
    command = [*RUN, "--epochs", 10**6]
    settings = {"NPROC": 1, "OMP_NUM_THREADS": 1, "RDZV_ID": "a"}
    settings["RDZV_ENDPOINT"] = f"127.0.0.1:{free_port()}"
    nodes = [Running(command, project, **settings)]
    wait_for("epoch 1/", nodes[0])
    nodes.append(Running(command, project, **settings))
    wait_for("resuming from ", *nodes)  # both train, from the last checkpoint
    on_lost_node = nodes[1].printed()[0].count("resuming from ")
    nodes[1].kill_all()
    wait_for("resuming from ", nodes[0], times=2 - on_lost_node)
    epochs = nodes[0].printed()[0].count("\nepoch ")
    wait_for("\nepoch ", nodes[0], times=epochs + 2)
    nodes[0].process.terminate()
    assert nodes[0].finish().code == 1  # torchrun's after a signal


@pytest.mark.parametrize("while_it", ["starts", "trains"])
def test_without_its_launcher_a_run_saves_and_ends(while_it, project):
    """After `kill -9` of run.sh, which is torchrun: a rerun would train next to the ranks."""

    def ranks_import_torch():
        ranks = processes(running.token, b"\0-u\0")
        maps = [Path(f"/proc/{rank}/maps").read_text() for rank in ranks]
        return len(maps) == 2 and all("libtorch" in each for each in maps)

    running = Running([*RUN, *LONG], project)
    wait_until(ranks_import_torch, running)
    if while_it == "trains":
        wait_for("epoch 2/40", running)
    running.process.kill()
    last = running.finish().output.splitlines()[-1]  # which checks that nothing runs any more
    assert (stopped := re.fullmatch("stopped (at .*); rerun .*", last)), last
    again = train(project, 2, *LONG)
    assert again.startswith(f"resuming from checkpoint.pt {stopped[1]}\n"), again
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


AUGMENTED = """
import importlib, multiprocessing, os, torch
from multiprocessing import resource_tracker
from common.data import Images
multiprocessing.set_start_method(os.environ["METHOD"], force=True)
resource_tracker.ensure_running()  # before 3.14 its start unblocks signals, and tqdm would start it
script, read = importlib.import_module(os.environ["SCRIPT"]), Images.__getitem__
rest_of_epoch, Images.seed = script.rest_of_epoch, 0

def with_noise(self, index):
    torch.manual_seed(hash((self.seed, index)))
    image, label = read(self, index)
    return image + torch.randn_like(image), label

def remember(length, seed, done):
    Images.seed = seed  # of this epoch
    return rest_of_epoch(length, seed, done)

Images.__getitem__, script.rest_of_epoch = with_noise, remember
if __name__ == "__main__":
    script.main()
"""


@pytest.mark.parametrize(("script", "method"), [
    ("train", "fork"), ("train", "forkserver"), ("fsdp", "forkserver")])
def test_signals_to_all_processes(script, method, tmp_path):
    """As a scheduler may send them: to torchrun, the ranks and the workers.

    Also where Python starts other processes by a server, as from 3.14 on. With random augmentation
    in the workers the run resumes as if nothing had happened.
    """
    folder = {"train": "06_checkpointing", "fsdp": "05_model_parallel"}[script]
    project = copy_project(tmp_path / "a project", folder, small=("data", "model"))
    (project / "augmented.py").write_text(AUGMENTED)
    options, given = ["--epochs", 6, *LONG[2:]], {"SCRIPT": script, "METHOD": method}
    launch = [*TORCHRUN, "--nproc-per-node=2", "augmented.py", *options, "--workers", 2]
    run_ranks("augmented.py", 2, *options, *WHOLE, cwd=project, **given)
    (project / "slow").write_text("0.003")

    def saved():
        return [*project.glob("checkpoint.pt"), *project.glob("checkpoint/*/.metadata")]

    def start():
        (project / "checkpoint.pt").unlink(missing_ok=True)
        shutil.rmtree(project / "checkpoint", ignore_errors=True)
        return Running(launch, project, **given)

    def send_signals(running):
        wait_until(saved, running, limit=100)
        everything = processes(running.token)
        assert len(everything) >= 7, everything  # torchrun, two ranks, two workers each
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            for process in everything:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    result = finish_with_workers(start, send_signals)
    assert result.code == 1, result  # torchrun's after a signal
    assert result.output.splitlines()[-1].startswith("stopped at "), result
    assert "DataLoader worker" not in result.errors, result
    (project / "slow").unlink()
    rest = run_ranks("augmented.py", 2, *options, "--workers", 2, cwd=project, **given)
    assert "resuming from " in rest.output
    assert equal(project / "mnist.pt", project / "whole.pt")


@pytest.mark.parametrize(("folder", "restarts"), [
    ("06_checkpointing", 3), ("07_slurm", 3), ("05_model_parallel", 0)])
def test_a_worker_cannot_read_an_image_or_is_killed(folder, restarts, tmp_path):
    """Nothing waits for it: 06 (which is 08) and 07 are restarted, fsdp.py ends; all resume."""
    project = copy_project(tmp_path / "a project", folder, small="data")
    script = project / ("fsdp.py" if folder == "05_model_parallel" else "train.py")
    command = [script, "--epochs", 2, "--batch-size", 4, "--save-every", 3]
    run_ranks(command[0], 2, *command[1:], "--workers", 0, cwd=tmp_path)
    image = order_of(1, 181, 2, seed=0)[150]  # of step 19 of 23
    for event, error in ((0, "this image cannot be read"), (9, "killed by signal: Killed")):
        place = tmp_path / f"event {event}"

        def start(place=place, event=f"{image} {event}"):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            launch = [*TORCHRUN, "--nproc-per-node=2", f"--max-restarts={restarts}"]
            return Running([*launch, *command, "--workers", 2], place, IMAGE=event,
                           TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)

        result = finish_with_workers(start)
        assert error in result.errors, result
        if not restarts:
            assert result.code == 1 and time.time() - (place / "happened").stat().st_mtime < 60
            result = run_ranks(command[0], 2, *command[1:], "--workers", 0, cwd=place)
        assert result.code == 0 and "resuming from " in result.output, result
        assert equal(place / "mnist.pt", tmp_path / "mnist.pt")
