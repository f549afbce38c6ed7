"""06: whatever interrupts a run, it resumes as if nothing had happened."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers.checks import equal
from helpers.commands import Running, free_port, processes, run, wait_for, wait_until
from helpers.paths import ROOT
from helpers.projects import copy_project, edit, with_dropout
from helpers.ranks import exit_codes, run_ranks, start_ranks

STOPPED = 1  # torchrun's exit code after a signal
FEW_DIGITS = ["--data-dir", "common"]
RUN = ["bash", "run.sh", *FEW_DIGITS]
LONG = ["--epochs", 12, "--batch-size", 16, "--save-every", 3]  # 480 steps of two ranks
ENDLESS = [*RUN, "--epochs", 10**6, "--save-every", 10]
WHOLE = ["--checkpoint", "whole-run.pt", "--output", "whole.pt"]  # of an undisturbed run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A copy with few digits, and with dropout, after an undisturbed run with LONG."""
    whole = copy_project(tmp_path_factory.mktemp("undisturbed") / "a project",
                         ROOT / "06_checkpointing/train.py", "run.sh")
    with_dropout(whole)
    train(whole, 2, *LONG, *WHOLE)
    return whole


@pytest.fixture
def project(whole, tmp_path):
    """It has whole.pt, the weights of the undisturbed run, and no checkpoint."""
    ignored = shutil.ignore_patterns("whole-run.pt", "best.pt")
    return shutil.copytree(whole, tmp_path / "a project", ignore=ignored)


def train(project, ranks, *options, **settings):
    """Train in forked ranks, and return what they print."""
    return run_ranks("train.py", ranks, *FEW_DIGITS, *options, cwd=project, **settings).output


def epoch_lines(text):
    """The epochs and their accuracy: losses and times are those since the last start."""
    return re.findall(r"^(epoch \S+) .* (accuracy [0-9.]+)", text, re.M)


@pytest.mark.parametrize(("ranks", "options"), [
    (1, ["--batch-size", 350]), (2, ["--batch-size", 88, "--accumulate", 2, "--amp"])
], ids=["1", "2"])
def test_stopped_after_every_step(ranks, options, project):
    """One of the ranks receives a signal in the first step of every start.

    An epoch has four steps. The last has fewer images, and the last micro-batch fewer again.
    """
    options = ["--epochs", 2, "--save-every", 1000, *options]
    expected = epoch_lines(train(project, ranks, *options, *WHOLE))
    output = ""
    for start in range(8):
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[start // ranks % 3]
        output += train(project, ranks, *options, stop=(start % ranks, number, 1))
    output += train(project, ranks, *options)  # which has only the last evaluation to do
    assert output.count("stopped at ") == output.count("resuming from ") == 8
    assert epoch_lines(output) == expected
    assert equal(project / "mnist.pt", project / "whole.pt")


def test_killed_while_it_saves(project):
    """KILLS=100 in the environment kills it more often."""
    kills = int(os.environ.get("KILLS", 10))
    options = ["--epochs", 2 + kills, "--batch-size", 210, "--save-every", 1]  # 3 steps per epoch
    expected = epoch_lines(train(project, 2, *options, *WHOLE))
    files = [project / "output", project / "errors"]
    checkpoint, temporary = project / "checkpoint.pt", project / "checkpoint.pt.tmp"
    incomplete = 0
    for _ in range(kills):
        ranks = start_ranks("train.py", 2, [*FEW_DIGITS, *options], project, files)
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
    lines = list(dict.fromkeys(epoch_lines(output)))  # one comes again if its save was incomplete
    assert lines == expected
    assert equal(project / "mnist.pt", project / "whole.pt")


def test_signals_to_all_processes_with_dataloader_workers(project):
    """As a scheduler may send them: to torchrun, the ranks and the workers."""
    edit(project, "train.py", ('options = {"', 'options = {"num_workers": 2, "'))
    running = Running([*RUN, *LONG], project)
    wait_until((project / "checkpoint.pt").exists, running)
    everything = processes(running.token)
    assert len(everything) >= 7, everything  # torchrun, two ranks, two workers each
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        for process in everything:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
    result = running.finish()
    assert result.code == STOPPED, result
    assert result.output.splitlines()[-1].startswith("stopped at "), result
    assert "DataLoader worker" not in result.errors, result
    assert train(project, 2, *LONG).startswith("resuming from ")
    assert equal(project / "mnist.pt", project / "whole.pt")


def ranks_of(running):
    """The processes in which Python runs the script, which torchrun has started."""
    return [process for process in processes(running.token)
            if b"\0-u\0" in Path(f"/proc/{process}/cmdline").read_bytes()]


def test_killed_ranks_are_restarted(project):
    """Three times, as run.sh allows."""
    running = Running([*RUN, *LONG], project)
    for kills in range(3):
        wait_for("epoch ", running, times=1 + 3 * kills)
        os.kill(ranks_of(running)[0], signal.SIGKILL)
        wait_for("resuming from ", running, times=1 + kills)
    result = running.finish()
    assert result.code == 0, result
    assert result.output.count("resuming from ") == 3, result
    assert equal(project / "mnist.pt", project / "whole.pt")


def test_training_continues_without_a_lost_node(project):
    settings = {"NPROC": "1", "OMP_NUM_THREADS": "1"}
    settings["RDZV_ENDPOINT"] = f"127.0.0.1:{free_port()}"  # and 1 to 2 nodes, run.sh's default
    nodes = [Running(ENDLESS, project, **settings)]
    wait_for("epoch 1/", nodes[0])
    nodes.append(Running(ENDLESS, project, **settings))
    wait_for("resuming from ", *nodes)  # both train, from the last checkpoint
    on_lost_node = nodes[1].printed()[0].count("resuming from ")
    nodes[1].kill_all()
    wait_for("resuming from ", nodes[0], times=2 - on_lost_node)
    epochs = nodes[0].printed()[0].count("\nepoch ")
    wait_for("\nepoch ", nodes[0], times=epochs + 2)
    nodes[0].process.terminate()
    result = nodes[0].finish()
    assert result.code == STOPPED, result


def test_without_its_launcher_a_run_saves_and_ends(project):
    """After `kill -9` of run.sh, which is torchrun: a rerun would train next to the ranks."""
    running = Running([*RUN, *LONG], project)
    wait_for("epoch 2/12", running)
    running.process.kill()
    result = running.finish()  # which checks that nothing runs any more
    stopped = re.fullmatch("stopped (at .*); rerun .*", result.output.splitlines()[-1])
    assert stopped, result
    again = train(project, 2, *LONG)
    assert again.startswith(f"resuming from checkpoint.pt {stopped[1]}\n"), again
    assert equal(project / "mnist.pt", project / "whole.pt")


def test_without_its_launcher_a_run_that_is_starting_ends(project):
    """Killed while its processes import torch."""

    def import_torch():
        maps = [Path(f"/proc/{rank}/maps").read_text() for rank in ranks_of(running)]
        return len(maps) == 2 and all("libtorch" in each for each in maps)

    running = Running([*RUN, *LONG], project)
    wait_until(import_torch, running)
    running.process.kill()
    result = running.finish()
    assert re.search("^stopped at {'epoch': 1, ", result.output, re.M), result


# The disk is full in the middle of a run, which ends; then it has room, and the job runs again
ON_A_FULL_DISK = """
mount -t tmpfs -o size=2m none disk
"$@" 2> errors &
until [ -e disk/checkpoint.pt ]; do sleep 0.05; done
until ! kill -0 $! 2> no; do cat /dev/zero >> disk/other 2> no; sleep 0.05; done
wait $! && exit 99
rm disk/other
exec "$@"
"""


def test_a_full_disk_ends_a_run_which_resumes_when_there_is_room(unshare, project):
    (project / "disk").mkdir()
    training = [*RUN, *LONG, "--checkpoint", "disk/checkpoint.pt", "--best", "disk/best.pt"]
    result = run([*unshare, "bash", "-c", ON_A_FULL_DISK, "_", *training], project)
    errors = (project / "errors").read_text()
    assert result.code == 0, f"{result}\n{errors}"
    assert re.search("No space left on device|PytorchStreamWriter failed", errors), errors
    assert "resuming from disk/checkpoint.pt at {" in result.output, result
    assert equal(project / "mnist.pt", project / "whole.pt")
