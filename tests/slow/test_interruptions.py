"""06: whatever interrupts a run, it resumes as if nothing had happened."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.checks import equal
from helpers.commands import (
    WITNESS,
    Running,
    free_port,
    new_namespace,
    processes,
    run,
    wait_for,
    wait_until,
)
from helpers.paths import ROOT
from helpers.projects import copy_project, edit, with_dropout
from helpers.ranks import run_ranks, start_ranks

FOLDER = ROOT / "06_checkpointing"
STOPPED = 1  # torchrun's exit code after a signal
LONG = ["--epochs", 12, "--batch-size", 16, "--save-every", 3]  # 480 steps of two ranks
ENDLESS = ["--epochs", 10**6, "--save-every", 10]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A copy with few digits, and with dropout, so that random numbers matter."""
    small = tmp_path_factory.mktemp("small") / "a project"
    copy_project(small, FOLDER / "train.py", "run.sh")
    with_dropout(small)
    return small


def train(project, ranks, folder, *options, **settings):
    """Train in forked ranks, and return what they print."""
    options = ["--data-dir", project / "common", *options]
    result = run_ranks(project / "train.py", ranks, *options, cwd=folder, **settings)
    assert result.code == 0, result
    return result.output


def train_undisturbed(small, ranks, folder, *options):
    """The epoch lines of an undisturbed training, which writes its weights to whole.pt."""
    files = ["--checkpoint", "whole-run.pt", "--output", "whole.pt"]
    return epoch_lines(train(small, ranks, folder, *options, *files))


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    """The weights of an undisturbed run with LONG."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_undisturbed(small, 2, folder, *LONG)
    return folder / "whole.pt"


def epoch_lines(text):
    """The epochs and their accuracy: losses and times are those since the last start."""
    return re.findall(r"^(epoch \S+) .* (accuracy [0-9.]+)", text, re.M)


def command(project, *options):
    return ["bash", project / "run.sh", "--data-dir", project / "common", *options]


def signal_at_batch(rank, number, batch):
    """The settings with which a rank receives a signal when it asks for this batch."""
    stop = f"{rank} {number:d} {batch}"
    return {"SIGNAL_AT_BATCH": stop, "TORCHELASTIC_RUN_ID": "any", **WITNESS}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, ["--batch-size", 350]), (2, ["--batch-size", 88, "--accumulate", 2, "--amp"])],
    ids=["1", "2"],
)
def test_stopped_after_every_step(ranks, options, small, tmp_path):
    """One of the ranks receives a signal in the first step of every start.

    An epoch has four steps. The last has fewer images, and the last micro-batch fewer again.
    """
    options = ["--epochs", 2, "--save-every", 1000, *options]
    expected = train_undisturbed(small, ranks, tmp_path, *options)
    output = ""
    for start in range(8):
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[start // ranks % 3]
        stop = signal_at_batch(start % ranks, number, 1)
        output += train(small, ranks, tmp_path, *options, **stop)
    output += train(small, ranks, tmp_path, *options)  # which has only the last evaluation to do
    assert output.count("stopped at ") == output.count("resuming from ") == 8
    assert epoch_lines(output) == expected
    assert equal(tmp_path / "mnist.pt", tmp_path / "whole.pt")


def test_killed_while_it_saves(small, tmp_path):
    """KILLS=100 in the environment kills it more often."""
    kills = int(os.environ.get("KILLS", 10))
    options = ["--epochs", 2 + kills, "--batch-size", 210, "--save-every", 1]  # 3 steps per epoch
    expected = train_undisturbed(small, 2, tmp_path, *options)
    files = [tmp_path / "output", tmp_path / "errors"]
    checkpoint, temporary = tmp_path / "checkpoint.pt", tmp_path / "checkpoint.pt.tmp"
    given = ["--data-dir", small / "common", *options]
    incomplete = 0
    for _ in range(kills):
        ranks = start_ranks(small / "train.py", 2, given, tmp_path, files)
        end = time.monotonic() + 300
        # Without a pause, as a save takes only a millisecond; the first one of all is completed
        while not (temporary.exists() and checkpoint.exists()):
            assert all(rank.is_alive() for rank in ranks) and time.monotonic() < end
        time.sleep(random.choice((0, random.uniform(0, 0.004))))
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
        incomplete += temporary.exists()
        temporary.unlink(missing_ok=True)
    assert incomplete >= 3
    output = files[0].read_text() + train(small, 2, tmp_path, *options)
    assert output.count("resuming from ") == kills
    lines = list(dict.fromkeys(epoch_lines(output)))  # one comes again if its save was incomplete
    assert lines == expected
    assert equal(tmp_path / "mnist.pt", tmp_path / "whole.pt")


RECORDED = """
class Recorded(list):
    def __iter__(self):
        for index in super().__iter__():
            print(self.epoch, index, file=open("seen", "a"))
            yield index

"""


def test_resumes_on_another_number_of_processes(small, tmp_path):
    """Three processes, three, two, one, and other batches: each image is used once per epoch."""
    project = shutil.copytree(small, tmp_path / "project")
    fill = "        train_sampler[:] = "
    edit(project, "train.py", ("\ndef parse_args", f"{RECORDED}\ndef parse_args"),
         ("train_sampler = []", "train_sampler = Recorded()"),
         (fill, f"        train_sampler.epoch = epoch\n{fill}"))
    for ranks, *batch in ((3, 20, 1), (3, 10, 2), (2, 12, 2)):  # in the first epoch, in the second
        options = ["--epochs", 3, "--batch-size", batch[0], "--accumulate", batch[1]]
        stop = signal_at_batch(0, signal.SIGTERM, 15)
        assert "stopped at " in train(project, ranks, tmp_path, *options, **stop)
    assert "resuming from " in train(project, 1, tmp_path, *options)
    seen = Counter((tmp_path / "seen").read_text().splitlines())
    assert seen == Counter(f"{epoch} {image}" for epoch in (1, 2, 3) for image in range(1260))


def test_signals_to_all_processes_with_dataloader_workers(small, undisturbed, tmp_path):
    """As a scheduler may send them: to torchrun, the ranks and the workers."""
    project = shutil.copytree(small, tmp_path / "workers")
    edit(project, "train.py", ('options = {"', 'options = {"num_workers": 2, "'))
    running = Running(command(project, *LONG), tmp_path)
    wait_until((tmp_path / "checkpoint.pt").exists, running)
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
    assert train(small, 2, tmp_path, *LONG).startswith("resuming from ")
    assert equal(tmp_path / "mnist.pt", undisturbed)


def test_killed_ranks_are_restarted(small, undisturbed, tmp_path):
    """Three times, as run.sh allows."""
    running = Running(command(small, *LONG), tmp_path)
    for kills in range(3):
        wait_for("epoch ", running, times=1 + 3 * kills)
        running.kill("-u", "train.py")
        wait_for("resuming from ", running, times=1 + kills)
    result = running.finish()
    assert result.code == 0, result
    assert result.output.count("resuming from ") == 3, result
    assert equal(tmp_path / "mnist.pt", undisturbed)


def test_training_continues_without_a_lost_node(small, tmp_path):
    settings = {"NPROC": "1", "OMP_NUM_THREADS": "1"}
    settings["RDZV_ENDPOINT"] = f"127.0.0.1:{free_port()}"  # and 1 to 2 nodes, run.sh's default
    nodes = [Running(command(small, *ENDLESS), tmp_path, **settings)]
    wait_for("epoch 1/", nodes[0])
    nodes.append(Running(command(small, *ENDLESS), tmp_path, **settings))
    wait_for("resuming from ", *nodes)  # both train, from the last checkpoint
    on_lost_node = nodes[1].printed()[0].count("resuming from ")
    nodes[1].kill_all()
    wait_for("resuming from ", nodes[0], times=2 - on_lost_node)
    epochs = nodes[0].printed()[0].count("\nepoch ")
    wait_for("\nepoch ", nodes[0], times=epochs + 2)
    nodes[0].process.terminate()
    result = nodes[0].finish()
    assert result.code == STOPPED, result


def test_without_its_launcher_a_run_saves_and_ends(small, undisturbed, tmp_path):
    """After `kill -9` of run.sh, which is torchrun: a rerun would train next to the ranks."""
    running = Running(command(small, *LONG), tmp_path)
    wait_for("epoch 2/12", running)
    running.process.kill()
    result = running.finish()  # which checks that nothing runs any more
    stopped = re.fullmatch("stopped (at .*); rerun .*", result.output.splitlines()[-1])
    assert stopped, result
    again = run(command(small, *LONG), tmp_path)
    assert again.output.startswith(f"resuming from checkpoint.pt {stopped[1]}\n"), again
    assert equal(tmp_path / "mnist.pt", undisturbed)


def test_without_its_launcher_a_run_that_is_starting_ends(small, tmp_path):
    """Killed while its processes import torch, half a second after they were started."""
    running = Running(command(small, *ENDLESS), tmp_path)
    wait_until(lambda: len(ranks_of(running)) == 2, running)
    time.sleep(0.5)
    assert not running.printed()[0], running.printed()
    running.process.kill()
    result = running.finish()
    assert re.search("^stopped at {'epoch': 1, ", result.output, re.M), result


def ranks_of(running):
    """The processes in which Python runs the script, which torchrun has started."""
    lines = [Path(f"/proc/{number}/cmdline").read_bytes() for number in processes(running.token)]
    return [line for line in lines if b"-u\0" in line and b"train.py" in line]


@pytest.mark.parametrize(("seconds", "saved"), [(20, True), (2, False)])
def test_torchrun_waits_as_long_as_run_sh_says(seconds, saved, small, tmp_path):
    """Before it kills; a step takes 4 s. Before torch 2.12 it waits 30 s, whatever run.sh says."""
    project = shutil.copytree(small, tmp_path / "slow steps")
    line = "            nn.utils.clip_grad_norm_("
    sleep = "            print('step', flush=True)\n            time.sleep(4)\n"
    edit(project, "train.py", (line, f"{sleep}{line}"))
    edit(project, "run.sh", ("SHUTDOWN_TIMEOUT=120", f"SHUTDOWN_TIMEOUT={seconds}"))
    running = Running(command(project), tmp_path)
    wait_for("step", running, times=2)
    running.process.terminate()
    result = running.finish()
    assert result.code == STOPPED, result
    assert ("stopped at " in result.output) == (tmp_path / "checkpoint.pt").exists() == saved


# The disk is full in the middle of a run, which ends; then it has room, and the job runs again
ON_A_FULL_DISK = """
mount -t tmpfs -o size=2m none "$1" && cd "$1" && shift
"$@" 2> ../errors &
until [ -e checkpoint.pt ]; do sleep 0.05; done
until ! kill -0 $! 2> ../no; do cat /dev/zero >> other 2> ../no; sleep 0.05; done
wait $! && exit 99
rm other
exec "$@"
"""


def test_a_full_disk_ends_a_run_which_resumes_when_there_is_room(small, undisturbed, tmp_path):
    enter = [*new_namespace("mount"), "bash", "-c"]
    possible = run([*enter, "mount -t tmpfs none ."], tmp_path)
    if possible.code:
        pytest.skip(f"this machine does not let us mount a disk: {possible.errors}")
    (tmp_path / "disk").mkdir()
    training = command(small, *LONG, "--output", tmp_path / "weights.pt")
    result = run([*enter, ON_A_FULL_DISK, "_", tmp_path / "disk", *training], tmp_path)
    errors = (tmp_path / "errors").read_text()
    assert result.code == 0, f"{result}\n{errors}"
    assert re.search("No space left on device|PytorchStreamWriter failed", errors), errors
    assert "resuming from checkpoint.pt at {" in result.output, result
    assert len(re.findall("^epoch 12/12 ", result.output, re.M)) == 1, result
    assert equal(tmp_path / "weights.pt", undisturbed)
