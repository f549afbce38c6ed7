"""06: whatever interrupts a run, it resumes as if nothing had happened."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    WITNESS,
    Running,
    copy_project,
    edit,
    equal,
    free_port,
    processes,
    run,
    run_ranks,
    start_ranks,
    torchrun,
    wait_for,
    wait_until,
    with_dropout,
)

FOLDER = ROOT / "06_checkpointing"
STOPPED = 75
LONG = ["--epochs", 12, "--batch-size", 16, "--save-every", 3]  # 480 steps of two ranks
ENDLESS = ["--epochs", 10**6, "--save-every", 10]
LIMIT = 400  # seconds, for a busy machine


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A copy with few digits, and with dropout, so that random numbers matter."""
    small = tmp_path_factory.mktemp("small") / "a project"
    copy_project(small, FOLDER / "train.py", "run.sh")
    with_dropout(small)
    return small


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    """The weights of an undisturbed run with LONG."""
    folder = tmp_path_factory.mktemp("undisturbed")
    data = ["--data-dir", small / "common"]
    result = torchrun(small / "train.py", 2, *data, *LONG, cwd=folder, limit=LIMIT)
    assert result.code == 0, result
    return folder / "mnist.pt"


def command(project, *options):
    return ["bash", project / "run.sh", "--data-dir", project / "common", *options]


def start(project, folder, *options):
    """Start run.sh, and return when there is a checkpoint."""
    running = Running(command(project, *options), folder)
    wait_until((folder / "checkpoint.pt").exists, running, limit=LIMIT)
    return running


def epoch_lines(text):
    """The epoch lines without their times."""
    return re.findall("^epoch .* accuracy [0-9.]+", text, re.M)


def undisturbed_ranks(small, folder, ranks, *options):
    """The epoch lines of an undisturbed training, which writes its weights to whole.pt."""
    files = ["--checkpoint", "whole-run.pt", "--output", "whole.pt"]
    result = run_ranks(small / "train.py", ranks, *options, *files, cwd=folder)
    assert result.code == 0, result
    return epoch_lines(result.output)


@pytest.mark.parametrize(
    ("ranks", "options", "stops"),
    [
        (1, ["--batch-size", 128], 20),
        (2, ["--batch-size", 128], 10),
        (2, ["--batch-size", 50, "--accumulate", 2, "--amp"], 14),
    ],
    ids=["1", "2", "accumulate"],
)
def test_stopped_after_every_step(ranks, options, stops, small, tmp_path):
    """One of the ranks receives a signal in the first step of every start."""
    options = ["--data-dir", small / "common", "--epochs", 2, "--save-every", 1000, *options]
    expected = undisturbed_ranks(small, tmp_path, ranks, *options)
    output = ""
    for start in range(stops + 1):
        number = (signal.SIGTERM, signal.SIGINT)[start // ranks % 2]
        stop = {"SIGNAL_AT_BATCH": f"{start % ranks} {number:d} 1", "TORCHELASTIC_RUN_ID": "any"}
        stop = {} if start == stops else {**stop, **WITNESS}  # the last start has nothing to do
        result = run_ranks(small / "train.py", ranks, *options, cwd=tmp_path, **stop)
        assert result.code == 0, result
        output += result.output
    assert output.count("stopped after ") == output.count("resuming from ") == stops
    assert epoch_lines(output) == expected
    assert equal(tmp_path / "mnist.pt", tmp_path / "whole.pt")


def kill_while_saving(ranks, checkpoint):
    """Kill all ranks after some saves and just after the next has begun; was it incomplete?"""

    def wait_until(condition):  # without a pause, as a save takes only a millisecond
        end = time.monotonic() + LIMIT
        while not condition():
            assert all(rank.is_alive() for rank in ranks) and time.monotonic() < end

    def version():
        return checkpoint.exists() and checkpoint.stat().st_ino

    for _ in range(random.randrange(8)):
        before = version()
        wait_until(lambda before=before: version() != before)
    temporary = checkpoint.with_name(f"{checkpoint.name}.tmp")
    wait_until(temporary.exists)
    time.sleep(random.choice((0, random.uniform(0, 0.004))))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()
    incomplete = temporary.exists()
    temporary.unlink(missing_ok=True)
    return incomplete


def test_killed_while_it_saves(small, tmp_path):
    """KILLS=100 in the environment kills it more often."""
    kills = int(os.environ.get("KILLS", 10))
    # An epoch has 10 steps, and at most 8 are done before each kill
    options = ["--data-dir", small / "common", "--epochs", 2 + kills, "--save-every", 1]
    expected = undisturbed_ranks(small, tmp_path, 2, *options)
    files = [tmp_path / "output", tmp_path / "errors"]
    incomplete = 0
    for _ in range(kills):
        ranks = start_ranks(small / "train.py", 2, options, tmp_path, files)
        incomplete += kill_while_saving(ranks, tmp_path / "checkpoint.pt")
    assert incomplete >= 3
    result = run_ranks(small / "train.py", 2, *options, cwd=tmp_path)
    assert result.code == 0, result
    output = files[0].read_text() + result.output
    assert output.count("resuming from ") >= 3
    lines = list(dict.fromkeys(epoch_lines(output)))  # one comes again if its save was incomplete
    assert lines == expected
    assert equal(tmp_path / "mnist.pt", tmp_path / "whole.pt")


def test_resumes_on_another_number_of_processes(small, tmp_path):
    """Three processes, three, two, one: each image is used once per epoch."""
    project = shutil.copytree(small, tmp_path / "project")
    line = "indices = torch.frombuffer"
    record = "print(len(self), indices, file=open(os.environ['SEEN'], 'a'))"
    edit(project, "common/data.py", (line, f"{record}\n        {line}"))
    seen = tmp_path / "seen"
    options = ["--data-dir", project / "common", "--epochs", 9, "--batch-size", 20]

    def batches():
        return seen.read_text().splitlines() if seen.exists() else []

    for ranks in (3, 3, 2):
        torch_run = ["torchrun", "--standalone", f"--nproc-per-node={ranks}"]
        running = Running([*torch_run, project / "train.py", *options], tmp_path, SEEN=str(seen))
        enough = len(batches()) + 110
        wait_until(lambda enough=enough: len(batches()) >= enough, running, limit=LIMIT)
        running.process.terminate()
        result = running.finish(LIMIT)
        assert "stopped after " in result.output, result
    settings = {"cwd": tmp_path, "limit": LIMIT, "SEEN": str(seen)}
    result = torchrun(project / "train.py", 1, *options, **settings)
    assert result.code == 0 and result.output.startswith("resuming from "), result

    epochs, previous = [], "359"
    for batch in batches():  # an epoch ends with the test set
        size, indices = batch.split(" ", 1)
        if size == "1260" and previous == "359":
            epochs.append(Counter())
        if size == "1260":
            epochs[-1].update(json.loads(indices))
        previous = size
    once = dict.fromkeys(range(1260), 1)
    assert [dict(sorted(epoch.items())) for epoch in epochs] == [once] * 9


def test_ctrl_c_saves_once(small, tmp_path):
    """A terminal sends SIGINT to all processes of the foreground group, here three times."""
    interruptible = ["env", "--default-signal=INT"]  # even if the tests run in the background
    running = Running([*interruptible, *command(small, *ENDLESS)], tmp_path)
    wait_for("epoch 1/", running, limit=LIMIT)
    for _ in range(3):
        os.killpg(running.process.pid, signal.SIGINT)
    result = running.finish(LIMIT)
    assert result.code == STOPPED, result
    assert result.output.count("stopped after ") == 1, result


def test_signals_to_all_processes_with_dataloader_workers(small, undisturbed, tmp_path):
    """As a scheduler may send them: to run.sh, torchrun, the ranks and the workers."""
    project = shutil.copytree(small, tmp_path / "workers")
    options = 'loader_options["worker_init_fn"]'
    edit(project, "train.py", (options, f'loader_options["num_workers"] = 2\n    {options}'))
    running = start(project, tmp_path, *LONG)
    everything = processes(running.token)
    assert len(everything) >= 8, everything  # run.sh, torchrun, two ranks, two workers each
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        for process in everything:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
    result = running.finish(LIMIT)
    assert result.code == STOPPED, result
    assert result.output.splitlines()[-1].startswith("stopped after "), result
    assert "DataLoader worker" not in result.errors, result
    rest = run(command(small, *LONG), tmp_path, limit=LIMIT)
    assert rest.code == 0 and rest.output.startswith("resuming from "), rest
    assert equal(tmp_path / "mnist.pt", undisturbed)


@pytest.mark.parametrize("starting", ["torchrun", "-u"], ids=["torchrun", "ranks"])
def test_sigterm_while_it_starts(starting, small, tmp_path):
    """torchrun runs the ranks with `python -u`; finish() fails if a process is left.

    It signals when the process imports torch: torchrun loses a rank that it has not quite forked.
    """

    def started():
        for folder in (Path(f"/proc/{process}") for process in processes(running.token)):
            with contextlib.suppress(OSError):  # a process has ended
                words = re.split("[/\0]", (folder / "cmdline").read_text())
                if starting in words and "libtorch" in (folder / "maps").read_text():
                    return True
        return False

    running = Running(command(small, *ENDLESS), tmp_path)
    wait_until(started, running, limit=LIMIT)
    running.process.terminate()
    result = running.finish(LIMIT)
    assert result.code == STOPPED, result
    assert result.output.count("epoch") == 0, result
    assert not (tmp_path / "checkpoint.pt").exists()


def test_killed_ranks_are_restarted(small, undisturbed, tmp_path):
    running = start(small, tmp_path, *LONG)
    for kills in range(3):
        wait_for("epoch ", running, times=1 + 3 * kills, limit=LIMIT)
        running.kill("-u", "train.py")
        wait_for("resuming from ", running, times=1 + kills, limit=LIMIT)
    result = running.finish(LIMIT)
    assert result.code == 0, result
    assert result.output.count("resuming from ") == 3, result
    assert equal(tmp_path / "mnist.pt", undisturbed)


def test_training_continues_without_a_lost_node(small, tmp_path):
    settings = {"NNODES": "1:2", "NPROC": "1", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    nodes = [Running(command(small, *ENDLESS), tmp_path, **settings)]
    wait_for("epoch 1/", nodes[0], limit=LIMIT)
    nodes.append(Running(command(small, *ENDLESS), tmp_path, **settings))
    wait_for("resuming from ", *nodes, limit=LIMIT)  # both train, from the last checkpoint
    on_lost_node = nodes[1].printed()[0].count("resuming from ")
    nodes[1].kill_all()
    wait_for("resuming from ", nodes[0], times=2 - on_lost_node, limit=LIMIT)
    epochs = nodes[0].printed()[0].count("\nepoch ")
    wait_for("\nepoch ", nodes[0], times=epochs + 2, limit=LIMIT)
    nodes[0].process.terminate()
    result = nodes[0].finish(LIMIT)
    assert result.code == STOPPED, result


FAIL_AND_REPAIR = """
fail=$1 repair=$2
mount -t tmpfs -o size=2m none "$3" && cd "$3" && shift 3
"$@" 2> ../errors &
until [ -e checkpoint.pt ]; do sleep 0.05; done
until grep -q "^warning: " ../errors; do eval "$fail"; sleep 0.05; done 2> /dev/null
wait $! || exit
eval "$repair"
exec "$@"
"""


@pytest.mark.parametrize(
    ("fail", "repair", "reason"),
    [
        ("cat /dev/zero >> other", "rm other", "No space left on device"),
        ("mount -o remount,ro .", "mount -o remount,rw .", "Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_training_continues_when_the_disk_fails(fail, repair, reason, small, undisturbed, tmp_path):
    (tmp_path / "disk").mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    enter = ["unshare", "--mount", *user, "bash", "-c"]
    possible = run([*enter, "mount -t tmpfs none ."], tmp_path)
    if possible.code:
        pytest.skip(f"this machine does not let us mount a disk: {possible.errors}")
    weights = ["--output", tmp_path / "weights.pt"]
    script = [FAIL_AND_REPAIR, "_", fail, repair, tmp_path / "disk"]
    result = run([*enter, *script, *command(small, *LONG, *weights)], tmp_path, limit=LIMIT)
    errors = (tmp_path / "errors").read_text()
    assert result.code == 0, f"{result}\n{errors}"
    warnings = [line for line in errors.splitlines() if line.startswith("warning: ")]
    for line in warnings:
        assert line.startswith("warning: checkpoint.pt was not saved (") and reason in line
    first, rest = result.output.split("resuming from ")  # only the rerun resumes
    assert "epoch 12/12 " in first and "epoch 12/12 " in rest, result
    assert equal(tmp_path / "weights.pt", undisturbed)
