"""Run commands and scripts as users do, and compare what they print and save."""

import atexit
import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).resolve().parent.parent
SEED = 3
FOLDERS = sorted(path.parent.name for path in ROOT.glob("0*/train.py"))
TORCHRUN = ["torchrun", "--standalone", "--local-addr=127.0.0.1"]
IGNORED = shutil.ignore_patterns(".git", ".venv", "*cache*", "data", "site", "*.pt")
# conftest.py hides them, and workers of pytest-xdist inherit what it has set
VISIBLE_GPUS = os.environ.setdefault(
    "VISIBLE_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
)
EPOCH = re.compile(
    r"epoch (?P<epoch>\d+)/\d+  (loss (?P<loss>\d+\.\d{4})  )?accuracy "
    r"(?P<accuracy>[01]\.\d{4})  \d+\.\d s  \d+ images/s"
)
# torch 2.8 prints this, in pieces
GLOO = re.compile(
    r"^(?:\[Gloo\] Rank |is connected to |peer ranks\. |\d| |Expected number of "
    r"connected peer ranks is : )*\n",
    re.M,
)
# What launchers and launch files read: a test sets them itself or leaves them out. With
# PYTHONUNBUFFERED a line is printed in pieces, which mix with those of other processes
SETTINGS = re.compile(
    r"SLURM_.*|TORCH_.*|N(PROC|NODES|ODE_RANK)|MASTER_.*|OMP_NUM_THREADS|"
    r"(LOCAL_)?(RANK|WORLD_SIZE)|.*_SOCKET_IFNAME|RDZV_.*|SCRIPT|OPTIONS|USER_ID|"
    r"GROUP_ID|PYTHONUNBUFFERED"
)


def clean_environment():
    return {
        name: value
        for name, value in os.environ.items()
        if not SETTINGS.fullmatch(name)
    }


class Result:
    """A finished command: its exit code and what it printed."""

    def __init__(self, command, code, output, errors):
        self.command, self.code, self.errors = command, code, errors
        self.output = GLOO.sub("", output) if "peer ranks" in output else output

    def __repr__(self):
        command = " ".join(map(str, self.command))
        return f"{command}\nexit code {self.code}\n{self.output}\n{self.errors}"

    def epochs(self):
        """The epoch lines as dictionaries."""
        return [line.groupdict() for line in EPOCH.finditer(self.output)]


def lines(*results):
    """The printed lines about saves and epochs, without the time."""
    output = "".join(result.output for result in results)
    return re.findall(r"^epoch .*?(?=  \d+\.\d s|$)", output, re.M)


class Running:
    """A command that runs in a folder, with all processes that it starts."""

    def __init__(self, command, cwd, **environment):
        Path(cwd).mkdir(exist_ok=True)
        self.command = command
        self.token = uuid.uuid4().hex
        self.files = [tempfile.TemporaryFile() for _ in range(2)]
        atexit.register(self.kill_all)  # if the test fails
        settings = {name: str(value) for name, value in environment.items()}
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            env=clean_environment() | settings | {"TEST_RUN": self.token},
            stdout=self.files[0],
            stderr=self.files[1],
            start_new_session=True,
        )

    def printed(self):
        """What it has printed so far: standard output and standard error."""
        # seek() and read() would move the position where the processes write
        printed = []
        for file in self.files:
            number = file.fileno()
            content = os.pread(number, os.fstat(number).st_size, 0)
            printed.append(content.decode(errors="replace"))
        return printed

    def kill_all(self):
        """Kill it and everything that it has started."""
        for process in processes(self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()
        atexit.unregister(self.kill_all)

    def finish(self, limit=300):
        """Return the result. It must end before the limit, and leave no process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit)
        end = time.monotonic() + 60  # for the last processes
        while (left := processes(self.token)) and time.monotonic() < end:
            time.sleep(0.1)
        self.kill_all()
        result = Result(self.command, self.process.returncode, *self.printed())
        assert not left, f"still running: {left}\n{result}"
        return result


def run(command, cwd, limit=300, **environment):
    """Run a command to its end and return the result."""
    return Running(command, cwd, **environment).finish(limit)


def wait_until(condition, *running, limit=300):
    """Wait until a condition holds. None of these commands may end before that."""
    end = time.monotonic() + limit
    while not condition():
        state = [text[-3000:] for each in running for text in each.printed()]
        alive = all(each.process.poll() is None for each in running)
        assert alive and time.monotonic() < end, state
        time.sleep(0.05)


def wait_for(text, *running, times=1):
    """Wait until these commands have printed a text this many times."""
    wait_until(
        lambda: sum(each.printed()[0].count(text) for each in running) >= times,
        *running,
    )


def each_row(text):
    """Call a test with the cells of each row of a text. A | separates them."""
    rows = [re.split(r" *\| *", line.strip()) for line in text.strip().splitlines()]
    return pytest.mark.parametrize("row", rows, ids=lambda row: row[0])


def free_port():
    """A port on which nothing listens, below those of connections."""
    while True:
        port = 10_000 + secrets.randbelow(19_000)
        with contextlib.suppress(OSError):  # something listens there
            socket.create_server(("", port)).close()
            return port


def processes(token):
    """The ids of a Running's processes, by its token."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if token.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def tools(folder, bare=False, **scripts):
    """A PATH on which these shell scripts come before the real tools.

    bare: they replace the real tools, except bash and dirname.
    """
    folder.mkdir(parents=True)
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    for tool in ("bash", "dirname") if bare else ():
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder) if bare else f"{folder}:{os.environ['PATH']}"


def torchrun(script, ranks, *options, fault=None):
    """The command that starts a script as its page does, with a fault of faults.py."""
    command = [*TORCHRUN, f"--nproc-per-node={ranks}"]
    if fault:
        command += [ROOT / "tests/faults.py", fault]
    return [*command, script, *options]


def train(script, ranks, *options, cwd, code=0, fault=None, **environment):
    """Run a script with torchrun to its end; it must end with this exit code."""
    command = torchrun(script, ranks, *options, fault=fault)
    result = run(command, cwd, **{"OMP_NUM_THREADS": 1, **environment})
    assert result.code == code, result
    return result


def copy_project(folder, *files, small=()):
    """Copy files, or the scripts and run.sh of folders, and common/ into one folder.

    small: "data" or "model", whose file in common/ is replaced by that of tests/small/.
    """
    common = folder / "common"
    shutil.copytree(ROOT / "common", common, ignore=IGNORED)
    for file in files:
        path = ROOT / file
        for each in path.glob("*.[ps]*") if path.is_dir() else [path]:
            shutil.copy(each, folder)
    if "model" in small:
        (common / "model.py").rename(common / "whole.py")
    for name in [small] if isinstance(small, str) else small:
        shutil.copy(ROOT / f"tests/small/{name}.py", common)
    return folder


def edit(file, old, new):
    text = file.read_text()
    assert old in text, f"{file} has no {old}"
    file.write_text(text.replace(old, new))


def fewer_digits(project, digits=140):
    """Let a copy train on this many of the digits, each at nine positions."""
    edit(project / "common/data.py", "[:1438", f"[:{digits}")
    return project


def without_batch_norm(project):
    """Let a copied ConvNet normalise each image alone, so that a batch can be split."""
    edit(project / "common/model.py", "nn.BatchNorm2d(", "nn.GroupNorm(4, ")
    return project


def copy_repository(folder, digits=140):
    """Copy this repository, with few digits, which are also its `data`."""
    shutil.copytree(ROOT, folder, ignore=IGNORED)
    (folder / "data").symlink_to("common")
    return fewer_digits(folder, digits)


def load(path):
    return torch.load(path, "cpu", weights_only=True)


def distance(one, other):
    """The largest difference of two files or dictionaries of weights."""
    one = one if isinstance(one, dict) else load(one)
    other = other if isinstance(other, dict) else load(other)
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def equal(*files):
    """Whether two files have equal contents, with tensors equal bit for bit."""

    def content(tensor):
        return tensor.dtype, tensor.shape, tensor.numpy().tobytes()

    one, other = [tree_map_only(torch.Tensor, content, load(file)) for file in files]
    return one == other


def module(path):
    """A file as a module."""
    spec = importlib.util.spec_from_file_location("module", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def order_of(epoch, length, ranks, seed=SEED):
    """The indices of an epoch, in the order in which the ranks get them, with padding.

    As DistributedSampler deals them, and as 06 and 07 do without it.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(length, generator=generator).tolist()
    return order + order[: -length % ranks]
