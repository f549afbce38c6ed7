"""Run commands and scripts as users do, and compare what they print and save."""

import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import re
import runpy
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).resolve().parent.parent
COPIES = ROOT / "tests/copies"
FOLDERS = sorted(path.parent.name for path in ROOT.glob("0*/train.py"))
TORCHRUN = ["torchrun", "--standalone", "--local-addr=127.0.0.1"]
IGNORED = shutil.ignore_patterns(".git", ".venv", "*cache*", "data", "site", "*.pt")
# conftest.py hides them, and workers of pytest-xdist inherit what it has set
VISIBLE_GPUS = os.environ.setdefault(
    "VISIBLE_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all")
)
EPOCH = re.compile(
    r"epoch (?P<epoch>\d+)/(?P<epochs>\d+)  loss (?P<loss>\d+\.\d{4})  accuracy "
    r"(?P<accuracy>[01]\.\d{4})  (?P<seconds>\d+\.\d) s  (?P<speed>\d+) images/s"
    r"(?P<memory>  \d+\.\d\d GB)?"
)
# torch 2.8 prints this, in pieces
GLOO = re.compile(
    r"^(?:\[Gloo\] Rank |is connected to |peer ranks\. |\d| |Expected number of "
    r"connected peer ranks is : )*\n",
    re.M,
)
# What launchers and launch files read: a test sets them itself or leaves them out. With
# PYTHONUNBUFFERED two processes print a line in pieces
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


class Running:
    """A command that runs in a folder, with all processes that it starts."""

    def __init__(self, command, cwd, **environment):
        Path(cwd).mkdir(exist_ok=True)
        self.command = command
        self.token = uuid.uuid4().hex
        self.start = time.monotonic()
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
        # seek() and read() would move the position at which the processes write
        printed = []
        for file in self.files:
            number = file.fileno()
            content = os.pread(number, os.fstat(number).st_size, 0)
            printed.append(content.decode(errors="replace"))
        return printed

    def kill_all(self):
        """End it and everything that it has started."""
        for process in processes(self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()
        atexit.unregister(self.kill_all)

    def finish(self, limit=300):
        """Return the result. It must end before the limit, and leave no process."""
        end = self.start + limit
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0, end - time.monotonic()))
            end = time.monotonic() + 60  # for the last processes
        while (left := processes(self.token)) and time.monotonic() < end:
            time.sleep(0.1)
        self.kill_all()
        result = Result(self.command, self.process.returncode, *self.printed())
        assert not left, f"still running: {left}\n{result}"
        return result


def run(command, cwd, limit=300, **environment):
    """Run a command to its end; returns the result."""
    return Running(command, cwd, **environment).finish(limit)


def wait_until(condition, *running, limit=300):
    """Wait until a condition holds. None of these commands may end before."""
    end = time.monotonic() + limit
    while not condition():
        state = [text[-3000:] for each in running for text in each.printed()]
        alive = all(each.process.poll() is None for each in running)
        assert alive and time.monotonic() < end, state
        time.sleep(0.05)


def wait_for(text, *running, times=1):
    """Wait until these commands have printed a text so many times."""
    wait_until(
        lambda: sum(each.printed()[0].count(text) for each in running) >= times,
        *running,
    )


def each_row(text):
    """Call a test with the cells of each row of a text, between which there is a |."""
    rows = [re.split(r" *\| *", line.strip()) for line in text.strip().splitlines()]
    return pytest.mark.parametrize("row", rows, ids=lambda row: row[0])


def free_port():
    """A port on which nothing listens, below those of connections."""
    while True:
        port = 10_000 + secrets.randbelow(19_000)
        with contextlib.suppress(OSError):  # something listens there
            socket.create_server(("", port)).close()
            return port


def processes(token, word=b""):
    """The ids of a Running's processes, by its token, with a word in the command."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            command, environment = [
                (entry / name).read_bytes() for name in ("cmdline", "environ")
            ]
            if token.encode() in environment and word in command:
                found.append(int(entry.name))
    return found


def tools(folder, bare=False, **scripts):
    """A PATH on which these shell scripts come before the real tools.

    bare: instead of them, so that there are no others but bash and dirname.
    """
    folder.mkdir(parents=True)
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    for tool in ("bash", "dirname") if bare else ():
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder) if bare else f"{folder}:{os.environ['PATH']}"


def threads_of_gloo():
    """How many this process has: some, while anything refers to a process group."""
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            count += "gloo" in path.read_text()
    return count


# Ranks, forked from a process that has imported torch: torchrun would take seconds

RANKS = multiprocessing.get_context("forkserver")
MODULES = "fsdp pipelining tensor.parallel checkpoint.state_dict".split()
RANKS.set_forkserver_preload(
    ["tqdm", *(f"torch.distributed.{name}" for name in MODULES)]
)


def start(function, arguments):
    """Call a function with each of these arguments in a process of its own."""
    ranks = [RANKS.Process(target=function, args=given) for given in arguments]
    for process in ranks:
        process.start()
    return ranks


def exit_codes(ranks, limit=120):
    """The exit codes of ranks. SIGKILL ends them at the limit, or after one's bad end.

    When one was killed, the others have a second; when one has failed, 30 to fail too.
    """
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [process.exitcode for process in ranks]
        if None not in codes:
            break
        if any(codes):
            left = 1 if -signal.SIGKILL in codes else 30
            end = min(end, time.monotonic() + left)
        time.sleep(0.01)
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def start_ranks(script, nproc, options, cwd, files, **environment):
    """Start a script in ranks as torchrun does.

    They append to two files, output and errors. With SHARED_GPU in the environment they
    share one, which NCCL accepts, as it takes each rank for another machine.
    """
    Path(cwd).mkdir(exist_ok=True)
    launch = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name in ("CUDA_VISIBLE_DEVICES", "TRAIN_IMAGES"):  # the forkserver's are older
        launch[name] = os.environ.get(name, "")
    launch |= environment
    arguments = []
    for rank in range(nproc):
        settings = {"RANK": rank, "LOCAL_RANK": rank, **launch}
        if "SHARED_GPU" in os.environ:
            settings |= {"LOCAL_RANK": 0, "NCCL_HOSTID": rank}
            settings |= {"NCCL_SOCKET_IFNAME": "lo"}
        arguments.append((Path(cwd, script), options, cwd, settings, files))
    return start(run_rank, arguments)


def run_rank(script, options, cwd, settings, files):
    """What each process of start_ranks() does."""
    os.chdir(cwd)
    os.environ.update({name: str(value) for name, value in settings.items()})
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # as with python -u, but a line is in one piece, also from two ranks
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # DataLoader workers, as usual
    sys.argv = [str(script), *map(str, options)]
    others = [path for path in sys.path if path != str(ROOT)]
    sys.path[:] = [str(Path(script).parent), *others]
    if "CHANGE" in settings or "CHANGES" in settings:
        script = importlib.import_module(script.stem)
        names = {"os": os, "sys": sys, "torch": torch, "rank": settings["RANK"]}
        for name in settings.get("CHANGES", "").split():
            path = next(ROOT.glob(f"tests/**/changes/{name}.py"))
            module(path).change(script, settings["RANK"])
        exec(settings.get("CHANGE", ""), names | {"script": script})
        return script.main()
    runpy.run_path(str(script), run_name="__main__")


def run_ranks(script, nproc, *options, cwd, code=0, **environment):
    """Run a script in ranks; their largest exit code must be this one.

    CHANGES names files of changes/, whose change(script, rank) is called before
    script.main(). After them comes CHANGE, a program of at most three lines, which uses
    `script` and `rank`.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "output"), Path(folder, "errors")]
        codes = exit_codes(
            start_ranks(script, nproc, options, cwd, files, **environment)
        )
        printed = [file.read_text() for file in files]
    command = [*TORCHRUN, f"--nproc-per-node={nproc}", script, *options]
    result = Result(command, max(map(abs, codes)), *printed)
    assert result.code == code, result
    return result


def copy_project(folder, *files, small=()):
    """Copy files, or the scripts and run.sh of folders, and common/ into one folder.

    small: "data" or "model", whose file in common/ is replaced by that of tests/small/.
    """
    common = folder / "common"
    shutil.copytree(ROOT / "common", common, ignore=IGNORED, dirs_exist_ok=True)
    for file in files:
        path = ROOT / file
        for each in path.glob("*.[ps]*") if path.is_dir() else [path]:
            shutil.copy(each, folder)
    for name in [small] if isinstance(small, str) else small:
        shutil.copy(ROOT / f"tests/small/{name}.py", common)
    return folder


def edit(file, old, new):
    text = file.read_text()
    assert old in text, f"{file} has no {old}"
    file.write_text(text.replace(old, new))


def fewer_digits(project, digits=140):
    """Let a copy train on so many of the digits, each of them at nine positions."""
    edit(project / "common/data.py", "[:1438", f"[:{digits}")
    return project


def without_batch_norm(project):
    """Let a copied ConvNet normalise each image by itself: a batch may be split."""
    edit(project / "common/model.py", "nn.BatchNorm2d(", "nn.GroupNorm(4, ")
    return project


def copy_repository(folder, digits=140):
    """Copy this repository, with few digits, also as `data`."""
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
    """Whether two files contain the same, in tensors of equal type, shape and bytes."""

    def content(tensor):
        return tensor.dtype, tensor.shape, tensor.numpy().tobytes()

    one, other = [tree_map_only(torch.Tensor, content, load(file)) for file in files]
    return one == other


def torchvision_datasets():
    """Also where torch's build is not the one that torchvision was built for."""
    try:
        return importlib.import_module("torchvision.datasets")
    except RuntimeError:  # its C++ extension did not load
        for name in ("nms", "qnms"):
            arguments = "(Tensor a, Tensor b, float c) -> Tensor"
            torch.library.define(f"torchvision::{name}", arguments)
        return importlib.import_module("torchvision.datasets")


def module(path):
    """A file as a module."""
    spec = importlib.util.spec_from_file_location("module", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


# What one process computes, without the scripts

SEED = 3


def order_of(epoch, length, ranks, seed=SEED, mixed=True):
    """The indices of an epoch, in the order in which the ranks get them, with padding.

    mixed: by the seed that 06 computes, or else by that of a DistributedSampler.
    """
    seed = hash((seed, epoch)) if mixed else seed + epoch
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(length, generator=generator).tolist()
    return order + order[: -length % ranks]


def gradients_alone(model, data_set, step, ranks, batch):
    """Add the gradients of the mean loss of the images of a step, by micro-batches.

    Returns the loss of each image.
    """
    losses = []
    for rank in range(ranks):
        buffers = {}
        if rank > 0:  # copies, as BatchNorm's statistics are those of rank 0
            buffers = {name: part.clone() for name, part in model.named_buffers()}
        for part in torch.tensor(step[rank::ranks]).split(batch):
            images, labels = [each[part] for each in data_set.tensors]
            logits = torch.func.functional_call(model, buffers, images)
            chances = logits.log_softmax(1)
            each = -0.9 * chances[range(len(part)), labels] - 0.1 * chances.mean(1)
            (each.sum() / len(step)).backward()
            losses += each.tolist()
    return losses


def rate_factor(middle):
    """What the scripts multiply the peak rate by, in a formula of the tests' own.

    middle: the part of the run that is done in the middle of a step.
    """
    return middle / 0.4 if middle < 0.4 else (1 - middle) / 0.6
