"""Run commands and scripts as users do, and compare what they print and save."""

import atexit
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ["torchrun", "--standalone", "--local-addr=127.0.0.1"]
IGNORED = shutil.ignore_patterns(".git", ".venv", "*cache*", "data", "site", "*.pt")
# conftest.py hides them, and workers of pytest-xdist inherit what it has set
VISIBLE_GPUS = os.environ.setdefault(
    "VISIBLE_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
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


class Running:
    """A command that runs in a folder, with all processes that it starts."""

    def __init__(self, command, cwd, **environment):
        Path(cwd).mkdir(exist_ok=True)
        self.token = secrets.token_hex()
        self.files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        atexit.register(self.kill_all)  # if the test fails
        settings = environment | {"TEST_RUN": self.token}
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self.files[0],
            stderr=self.files[1],
            env=clean_environment() | {name: f"{settings[name]}" for name in settings},
            start_new_session=True,
        )

    def __repr__(self):
        return "\n".join([*self.process.args, f"{self.code}", self.output, self.errors])

    @property
    def code(self):
        """Its exit code, or None."""
        return self.process.poll()

    @property
    def output(self):
        """What it has printed so far."""
        text = self.printed(0)
        return GLOO.sub("", text) if "peer ranks" in text else text

    @property
    def errors(self):
        return self.printed(1)

    def printed(self, number):
        # read() would move the position where the processes write
        file = Path(f"/proc/self/fd/{self.files[number].fileno()}")
        return file.read_bytes().decode(errors="replace")

    def kill_all(self):
        """Kill it and everything that it has started."""
        for process in processes(self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()
        atexit.unregister(self.kill_all)

    def finish(self):
        """Wait for its end, which must come in time, and leave no process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(600)
        end = time.monotonic() + 60  # for the last processes
        while (left := processes(self.token)) and time.monotonic() < end:
            time.sleep(0.1)
        self.kill_all()
        assert not left, f"still running: {left}\n{self}"
        return self


def lines(*results):
    """The printed lines about saves and epochs, without the time."""
    output = "".join(result.output for result in results)
    return re.findall(r"^epoch .*?(?=  \d+\.\d s|$)", output, re.M)


def run(command, cwd, **environment):
    """Run a command to its end."""
    return Running(command, cwd, **environment).finish()


def wait_until(condition, *running):
    """Wait until a condition holds. None of these commands may end before that."""
    end = time.monotonic() + 300
    while not condition():
        alive = all(each.code is None for each in running)
        assert alive and time.monotonic() < end, running
        time.sleep(0.05)


def each_row(text, slow=""):
    """Call a test with the cells of each row of a text. A | separates them."""
    rows = [
        pytest.param(row := re.split(r" *\| *", line), id=row[0], marks=marks)
        for part, marks in ((text, ()), (slow, pytest.mark.slow))
        for line in part.strip().splitlines()
    ]
    return pytest.mark.parametrize("row", rows)


def free_port():
    """A random port below those of connections: hardly ever does anything listen."""
    return 10_000 + secrets.randbelow(19_000)


def processes(token):
    """The ids of a Running's processes, by its token."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if token.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def torchrun(script, ranks, *options, fault=None):
    """The command that starts a script as its page does, with a fault of faults.py."""
    command = [*TORCHRUN, f"--nproc-per-node={ranks}"]
    if "ONE_GPU" in os.environ:  # which NCCL only shares with ranks of other hosts
        line = 'NCCL_SOCKET_IFNAME=lo NCCL_HOSTID=$RANK LOCAL_RANK=0 exec python "$@"'
        command += ["--no-python", "bash", "-c", line, "-"]
    if fault:
        command += [ROOT / "tests/faults.py", fault]
    return [*command, script, *options]


def train(script, ranks, *options, cwd, code=0, fault=None, **environment):
    """Run a script with torchrun to its end; it must end with this exit code."""
    command = torchrun(script, ranks, *options, fault=fault)
    result = run(command, cwd, **{"OMP_NUM_THREADS": 1, **environment})
    assert result.code == code, result
    return result


def edit(file, old, new):
    text = file.read_text()
    assert old in text, f"{file} has no {old}"
    file.write_text(text.replace(old, new))


def copy_repository(folder, digits=140, small=False):
    """Copy this repository, with few digits to train on, which are also its `data`.

    small: with tests/small/data.py in place of common/data.py.
    """
    shutil.copytree(ROOT, folder, ignore=IGNORED)
    (folder / "data").symlink_to("common")
    edit(folder / "common/data.py", "[:1438", f"[:{digits}")
    if small:
        shutil.copy(ROOT / "tests/small/data.py", folder / "common")
    return folder


def load(path):
    return torch.load(path, "cpu", weights_only=True)


def check_close(file, weights, most=1e-8):
    """The weights of a file may differ by this much from these, or another file's."""
    if isinstance(weights, Path):
        weights = load(weights)
    torch.testing.assert_close(load(file), weights, rtol=0, atol=most)


def equal(*files):
    """Whether two files have equal contents, with tensors equal bit for bit."""

    def bits(tensor):
        return tensor.dtype, tensor.shape, tensor.numpy().tobytes()

    one, other = [tree_map_only(torch.Tensor, bits, load(file)) for file in files]
    return one == other


def order_of(seed, length, ranks=1):
    """The indices of an epoch, in the order in which the ranks get them, with padding.

    As DistributedSampler deals them, and as 06 and 07 do without it.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(length, generator=generator).tolist()
    return order + order[: -length % ranks]
