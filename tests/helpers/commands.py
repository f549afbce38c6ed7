"""Run commands as users do, and read what they print."""

import contextlib
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

from helpers.paths import ROOT

VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")  # conftest.py hides them, except in test_cuda
SITECUSTOMIZE = ROOT / "tests/witness/sitecustomize.py"
WITNESS = {"PYTHONPATH": str(SITECUSTOMIZE.parent)}  # makes Python read it at its start
EPOCH = re.compile(r"epoch (?P<epoch>\d+)/(?P<epochs>\d+)  loss (?P<loss>\d+\.\d{4}|nan)  accuracy "
                   r"(?P<accuracy>[01]\.\d{4})  (?P<seconds>\d+\.\d) s  (?P<speed>\d+) images/s")
GLOO = re.compile(r"^(?:\[Gloo\] Rank |is connected to |peer ranks\. |\d| |Expected number of "
                  r"connected peer ranks is : )*\n", re.M)  # torch 2.8 prints it, in pieces

STANDALONE = ["torchrun", "--standalone", "--local-addr=127.0.0.1"]
GIVEN_PORTS = set()  # by free_port()

# Of launch files and torchrun, as those of Slurm: a test sets them itself or leaves them out
SETTINGS = re.compile("""(?x)SLURM_.*|TORCH_.*|N(PROC|NODES|ODE_RANK)|MASTER_.*|OMP_NUM_THREADS|
    (LOCAL_)?(RANK|WORLD_SIZE)|.*_SOCKET_IFNAME|RDZV_ENDPOINT|SCRIPT|OPTIONS|USER_ID|GROUP_ID""")


def clean_environment():
    """The environment of the tests, without what would change what a launch file does."""
    return {name: value for name, value in os.environ.items()
            if not SETTINGS.fullmatch(name)}


class Result:
    """A finished command: its exit code and what it printed."""

    def __init__(self, command, code, output, errors):
        self.command, self.code, self.errors = command, code, errors
        self.output = GLOO.sub("", output) if "peer ranks" in output else output

    def __repr__(self):
        command = " ".join(map(str, self.command))
        return f"{command}\nexit code {self.code}\n{self.output}\n{self.errors}"

    def epochs(self):
        """The epoch lines as dictionaries. Raises if a line begins like one and is none."""
        lines = [line for line in self.output.splitlines() if line.startswith("epoch")]
        assert all(EPOCH.fullmatch(line) for line in lines), self
        return [EPOCH.fullmatch(line).groupdict() for line in lines]


class Running:
    """A command that has been started, with all processes that it starts."""

    def __init__(self, command, cwd, **environment):
        self.command, self.token, self.start = command, uuid.uuid4().hex, time.monotonic()
        self.files = [tempfile.TemporaryFile() for _ in range(2)]
        environment = clean_environment() | environment | {"TEST_RUN": self.token}
        self.process = subprocess.Popen(
            [str(part) for part in command], cwd=cwd, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self.files[0], stderr=self.files[1],
        )

    def printed(self):
        """What it has printed so far: standard output and standard error."""
        # A seek() and read() would move the position at which the running processes write
        sizes = [(file.fileno(), os.fstat(file.fileno()).st_size) for file in self.files]
        return [os.pread(file, size, 0).decode(errors="replace") for file, size in sizes]

    def kill_all(self):
        """End it and everything that it has started."""
        for process in processes(self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def finish(self, limit=300):
        """Return the result. It must end before the limit, and leave no process running."""
        try:
            self.process.wait(max(0, self.start + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill_all()
            printed = "\n".join(self.printed())
            raise AssertionError(f"{self.command}: no end within {limit} s\n{printed}") from None
        end = time.monotonic() + limit  # for the last processes
        while (left := processes(self.token)) and time.monotonic() < end:
            time.sleep(0.1)
        self.kill_all()
        result = Result(self.command, self.process.returncode, *self.printed())
        assert not left, f"still running: {left}\n{result}"
        return result


def wait_until(condition, *running, limit=300):
    """Wait until a condition holds. None of these commands may end before."""
    end = time.monotonic() + limit
    while not condition():
        state = [text[-3000:] for each in running for text in each.printed()]
        alive = all(each.process.poll() is None for each in running)
        assert alive and time.monotonic() < end, state
        time.sleep(0.05)


def wait_for(text, *running, times=1):
    """Wait until these commands have printed a text so many times; none of them may end before."""
    wait_until(lambda: sum(each.printed()[0].count(text) for each in running) >= times, *running)


def run(command, cwd, limit=300, **environment):
    """Run a command to its end; returns the result."""
    return Running(command, cwd, **environment).finish(limit)


def torchrun(script, nproc, *options, cwd, **environment):
    """Run a script with torchrun, in this number of processes on two cores."""
    command = [*STANDALONE, f"--nproc-per-node={nproc}", script, *options]
    return run(command, cwd, **{"OMP_NUM_THREADS": str(max(1, 2 // nproc)), **environment})


def free_port():
    """A port on which nothing listens, another at each call, and below those of connections."""
    while True:
        port = 10_000 + secrets.randbelow(19_000)
        with contextlib.suppress(OSError):  # something listens there
            if port not in GIVEN_PORTS:
                socket.create_server(("", port)).close()
                GIVEN_PORTS.add(port)
                return port


def processes(token):
    """The ids of all processes that the Running with this token has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if token.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def fake_tools(folder, **scripts):
    """A PATH on which these shell scripts come before the real tools of their names."""
    folder.mkdir(parents=True)
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def bare_tools(folder, **scripts):
    """A PATH on which there are bash, dirname and these shell scripts, and nothing else."""
    fake_tools(folder, **scripts)
    for tool in ("bash", "dirname"):
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)
