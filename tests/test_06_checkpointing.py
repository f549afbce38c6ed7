"""06: stopped at any moment, by anything, a run goes on as if it had not been."""

import argparse
import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import (
    DIGITS,
    ROOT,
    WITNESS,
    Running,
    copy_project,
    edit,
    equal,
    fewer_digits,
    free_port,
    load_script,
    processes,
    run,
    torchrun,
    wait_for,
    wait_until,
    with_dropout,
)
from test_02_ddp_spawn import check_two_ranks

FOLDER = ROOT / "06_checkpointing"
RUN = FOLDER / "run.sh"
STOPPED = 75


def test_both_ranks_train_evaluate_and_save_and_a_finished_run_says_so(tmp_path):
    check_two_ranks(RUN, tmp_path, epochs=3, at_least=0.95)
    (tmp_path / "weights.pt").rename(tmp_path / "first.pt")
    again = run(["bash", RUN, "--data-dir", DIGITS, "--output", "weights.pt"], tmp_path)
    assert again.code == 0, again
    assert again.output == "going on from checkpoint.pt, which has all 3 epochs; --resume never starts anew\n", again
    assert equal(tmp_path / "first.pt", tmp_path / "weights.pt")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A copy that trains on few digits, 10 steps of two ranks an epoch, with random numbers in every step."""
    small = tmp_path_factory.mktemp("small") / "a project"
    copy_project(small, FOLDER / "train.py", "checkpoint.py", "join.py", "run.sh")
    fewer_digits(small)
    with_dropout(small)
    return small


def train(project, folder, *options, nproc=2, **environment):
    """Train in a folder with torchrun, to the end or to a signal, without restarts."""
    data = ["--data-dir", project / "common"]
    return torchrun(project / "train.py", nproc, *data, *options, cwd=folder, **WITNESS, **environment)


def test_stopped_after_every_step():
    # 20 steps, and the last one of an epoch is one of them
    result = run([sys.executable, ROOT / "tests/interrupt.py", "stop", 2], ROOT)
    assert result.output == "20 stops, at different steps; 20 starts went on, 0 of them past a damaged file; equal\n"


def test_three_ranks_that_accumulate():
    # DDP adds up in another order after its first step; three numbers show it, as for two there is but one order
    options = ["--amp", "--accumulate", 2, "--batch-size", 50]
    result = run([sys.executable, ROOT / "tests/interrupt.py", "stop", 3, *options], ROOT)
    assert result.output == "10 stops, at different steps; 10 starts went on, 0 of them past a damaged file; equal\n"


def test_killed_while_it_saves():
    result = run([sys.executable, ROOT / "tests/interrupt.py", "kill", 10], ROOT)
    assert result.code == 0, result
    assert int(re.match(r"10 kills, (\d+) of them in a save; ", result.output)[1]) >= 3, result


def test_on_another_number_of_processes(tmp_path):
    project = tmp_path / "project"
    copy_project(project, FOLDER / "train.py", "checkpoint.py")
    line = "indices = torch.frombuffer"
    record = "print(len(self), indices, file=open(os.environ['SEEN'], 'a'))"
    edit(project, "common/data.py", (line, f"{record}\n        {line}"))
    for nproc, at in ((2, f"1 {int(signal.SIGTERM)} 30"), (1, f"0 {int(signal.SIGUSR1)} 250"), (2, "0 0 0")):
        result = train(project, tmp_path, nproc=nproc, SIGNAL_AT_BATCH=at, SEEN=str(tmp_path / "seen"))
    assert result.code == 0, result
    assert "in epoch 2/3 after " in result.output
    assert float(result.epochs()[-1]["accuracy"]) >= 0.95
    seen = [line.split(" ", 1) for line in (tmp_path / "seen").read_text().splitlines()]
    epochs, previous = [], "359"
    for size, indices in seen:  # the test set, at the end of each epoch, tells where one ends
        if size == "12942" and previous == "359":
            epochs.append(Counter())
        if size == "12942":
            epochs[-1].update(json.loads(indices))
        previous = size
    once = dict.fromkeys(range(12942), 1)
    assert [dict(sorted(epoch.items())) for epoch in epochs] == [once] * 3


LONG = ["--epochs", 12, "--batch-size", 16, "--save-every", 3]  # 480 steps, about 5 s


@pytest.fixture(scope="module")
def long_run(small, tmp_path_factory):
    """The weights of a run long enough to be disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = train(small, folder, *LONG)
    assert result.code == 0, result
    return folder / "mnist.pt"


def start(project, folder, *options, **environment):
    """Start run.sh, and return when it has saved."""
    command = ["bash", project / "run.sh", "--data-dir", project / "common", *LONG, *options]
    running = Running(command, folder, **environment)
    wait_until((folder / "checkpoint.pt.previous").exists, running)
    return running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher(number, small, tmp_path):
    running = start(small, tmp_path)
    running.process.send_signal(number)
    result = running.finish(60)
    assert result.code == STOPPED, result
    assert "Traceback" not in result.errors
    assert result.output.splitlines()[-1].startswith("stopped in epoch "), result


def test_signals_to_all_processes_three_times(small, long_run, tmp_path):
    """As a scheduler sends them: to torchrun, which passes them on, to the ranks, to the workers of their loaders."""
    project = shutil.copytree(small, tmp_path / "workers")
    edit(project, "train.py", ('loading["generator"]', 'loading["num_workers"] = 2\n    loading["generator"]'))
    running = start(project, tmp_path)
    everything = processes(running.token)
    assert len(everything) >= 7, everything  # torchrun, two ranks, two workers of each
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        for process in everything:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
    result = running.finish(60)
    assert result.code == STOPPED, result
    assert "DataLoader worker" not in result.errors, result
    assert result.output.splitlines()[-1].startswith("stopped in epoch "), result
    rest = run(["bash", small / "run.sh", "--data-dir", small / "common", *LONG], tmp_path)
    assert rest.code == 0, rest
    assert rest.output.startswith("going on from checkpoint.pt, in epoch "), rest
    assert equal(tmp_path / "mnist.pt", long_run)


def test_killed_processes_start_again(small, long_run, tmp_path):
    running = start(small, tmp_path)
    for kills in range(3):
        wait_for("going on from ", running, times=kills)
        time.sleep(0.3)
        running.kill("-u", "train.py")
    result = running.finish()
    assert result.code == 0, result
    assert result.output.count("going on from ") == 3, result
    assert equal(tmp_path / "mnist.pt", long_run)


def test_a_killed_launcher_takes_its_ranks_along(small, tmp_path):
    running = start(small, tmp_path)
    running.process.kill()
    result = running.finish(60)  # which fails if a process is left
    assert result.output.splitlines()[-1].startswith("stopped in epoch "), result


def test_a_lost_node_is_done_without(small, tmp_path):
    settings = {"NNODES": "1:2", "NPROC": "1", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "START_TIMEOUT": "20"}
    command = ["bash", small / "run.sh", "--data-dir", small / "common", "--epochs", 60, "--save-every", 10]
    nodes = [Running(command, tmp_path, **settings)]
    wait_for("epoch 1/", nodes[0])
    nodes.append(Running(command, tmp_path, **settings))
    wait_for("going on from ", *nodes)  # both, as one has joined
    nodes[1].kill_all()
    result = nodes[0].finish(150)
    assert result.code == 0, result
    assert result.output.count("going on from ") == 2 - nodes[1].printed()[0].count("going on from "), result
    assert result.epochs()[-1]["epoch"] == "60"


DISK = """
mount -t tmpfs -o size=600k none "$1"  # room for two checkpoints, but at the end of a save there are three of them
cd "$1" && shift
"$@"; echo "code $?"
mount -o remount,ro .
"$@"; echo "code $?"
mount -o remount,rw,size=2m .
"$@"; echo "code $?"
"""


def test_a_full_disk_and_a_read_only_one(small, tmp_path):
    (tmp_path / "disk").mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    enter = ["unshare", "--mount", *user, "bash", "-c"]
    possible = run([*enter, "mount -t tmpfs none ."], tmp_path)
    if possible.code:
        pytest.skip(f"no disk of one's own on this machine: {possible.errors}")
    command = ["bash", small / "run.sh", "--data-dir", small / "common", "--epochs", 3, "--output", tmp_path / "m"]
    result = run([*enter, DISK, "_", tmp_path / "disk", *command], tmp_path)
    epochs = [line["epoch"] for line in result.epochs()]
    assert epochs == ["1", "2", "3", "3"], result
    others = [line for line in result.output.splitlines() if not line.startswith("epoch ")]
    assert others == ["code 0", "code 2", "going on from checkpoint.pt, in epoch 3/3 after 0 of 1260 images", "code 0"]
    assert [line for line in result.errors.splitlines() if not line.startswith("usage: ")] == [
        "warning: checkpoint.pt was not saved ([Errno 28] No space left on device); the last one stays",
        "train.py: error: --checkpoint checkpoint.pt: cannot write this file; "
        "name another in a folder that exists and is yours",
    ]


# What is read, and what is refused


class Refused(Exception):
    pass


class RunsCode:
    """Its pickle makes a file when it is loaded by anything that trusts it."""

    def __reduce__(self):
        return open, ("code-was-run", "w")


NEVER = "--resume never starts anew"


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Read as a rank does, in a folder with two checkpoints that were made with the default options."""
    from common.model import ConvNet

    script = load_script(FOLDER / "checkpoint.py")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def refuse(line):
        raise Refused(line)

    def arguments(**options):
        defaults = {"epochs": 3, "batch_size": 64, "lr": 0.1, "seed": 0, "resume": "auto"}
        return argparse.Namespace(checkpoint=Path("checkpoint.pt"), **defaults | options)

    for name in ("checkpoint.pt.previous", "checkpoint.pt"):
        net = ConvNet()
        torch.save({"run": script.describe(arguments(), net), "model": net.state_dict(), "name": name}, name)
    return lambda net=None, **options: script.read(arguments(**options), net or ConvNet(), refuse)


def test_the_newest_is_read_by_rank_0_alone(read, monkeypatch):
    assert read()["name"] == read(resume="must")["name"] == "checkpoint.pt"
    assert all(tensor.device.type == "cpu" for tensor in read()["model"].values())
    monkeypatch.setenv("RANK", "1")
    assert read() is None


def test_never_holds_for_the_first_start_only(read, monkeypatch):
    assert read(resume="never") is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert read(resume="never")["name"] == "checkpoint.pt"


def test_none_is_there(read):
    Path("checkpoint.pt").unlink()
    assert read()["name"] == "checkpoint.pt.previous"  # a stop between the two renames leaves it so
    Path("checkpoint.pt.previous").unlink()
    assert read() is None
    with pytest.raises(Refused, match=f"^--checkpoint checkpoint.pt does not exist; {NEVER}$"):
        read(resume="must")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"batch_size": 32}, "--batch-size 64, not 32"),
        ({"seed": 1}, "--seed 0, not 1"),
        ({"lr": 0.2}, "--lr 0.1, not 0.2"),
        ({"epochs": 4}, "--epochs 3, not 4"),
    ],
)
def test_other_options_are_refused(read, options, line):
    with pytest.raises(Refused, match=f"^--checkpoint checkpoint.pt was made with {line}; {NEVER}$"):
        read(**options)


def test_another_architecture_is_refused(read):
    from common.model import ConvNet

    wider, deeper = ConvNet(), ConvNet()
    wider.fc = torch.nn.Linear(7 * 7 * 32, 20)
    deeper.fc2 = torch.nn.Linear(10, 10)
    with pytest.raises(Refused, match=r"was made with fc.weight \[10, 1568\], not \[20, 1568\]; "):
        read(wider)
    with pytest.raises(Refused, match=r"was made with fc2.weight None, not \[10, 10\]; "):
        read(deeper)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in a tensor, where torch.load does not see it
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "File is not a zip file"),
        (flip_a_bit, "a checksum is wrong"),
        (lambda path: path.write_bytes(b""), "File is not a zip file"),
        (lambda path: path.write_bytes(bytes(10_000)), "File is not a zip file"),
        (lambda path: path.write_bytes(pickle.dumps(RunsCode())), "File is not a zip file"),
        (lambda path: torch.save({"run": RunsCode()}, path), "it could run code"),
    ],
    ids=["truncated", "flipped bit", "empty", "zeros", "pickle", "code"],
)
def test_what_cannot_be_read_is_passed_over_once(damage, reason, read):
    unread = f"checkpoint.pt cannot be read ({reason}); "
    damage(Path("checkpoint.pt"))
    state = read()
    assert (state["name"], state["warning"]) == ("checkpoint.pt.previous", f"warning: {unread}")
    with pytest.raises(Refused, match=f"^--checkpoint {re.escape(unread)}{NEVER}$"):
        read(resume="must")
    damage(Path("checkpoint.pt.previous"))
    with pytest.raises(Refused, match=re.escape(unread + unread.replace(".pt", ".pt.previous") + NEVER)):
        read()
    assert not Path("code-was-run").exists()


def test_weights_alone_are_no_checkpoint(read):
    torch.save({"fc.weight": torch.zeros(1)}, "checkpoint.pt")
    with pytest.raises(Refused, match=f"^--checkpoint checkpoint.pt is no checkpoint of this script; {NEVER}$"):
        read()


def test_run_sh_says_it_in_a_line(small, tmp_path):
    command = ["bash", small / "run.sh", "--data-dir", small / "common", "--epochs", 2]
    assert run(command, tmp_path).code == 0
    (tmp_path / "mnist.pt").rename(tmp_path / "whole.pt")

    refused = run([*command, "--seed", 1], tmp_path)
    assert refused.code == 2, refused
    line = f"train.py: error: --checkpoint checkpoint.pt was made with --seed 0, not 1; {NEVER}"
    assert refused.errors.splitlines()[1:] == [line], refused

    truncate(tmp_path / "checkpoint.pt")
    result = run(command, tmp_path)
    assert result.code == 0, result
    line = "warning: checkpoint.pt cannot be read (File is not a zip file); "
    line += "going on from checkpoint.pt.previous, in epoch 2/2 after 0 of 1260 images"
    assert result.output.splitlines()[0] == line, result
    assert equal(tmp_path / "whole.pt", tmp_path / "mnist.pt")

    result = run([*command, "--seed", 1, "--resume", "never"], tmp_path)
    assert result.code == 0 and result.output.startswith("epoch 1/2 "), result
    assert torch.load(tmp_path / "checkpoint.pt.old", weights_only=True)["run"]["--seed"] == 0

    fewer = shutil.copytree(small, tmp_path / "other data")
    edit(fewer, "common/data.py", ("images[:140,", "images[:70,"), ("labels[:140]", "labels[:70]"))
    other = train(fewer, tmp_path, "--epochs", 2, "--seed", 1)
    assert other.code == 1, other
    line = f"error: checkpoint.pt was made with 1260 images, not 630; {NEVER}"
    assert other.errors.splitlines().count(line) == 1, other
