"""Run scripts as their users do, and read what they print."""

import contextlib
import importlib.util
import math
import multiprocessing
import os
import re
import runpy
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

VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")  # conftest.py hides them, except in test_cuda
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FOLDERS = sorted(path.parent.name for path in ROOT.glob("0*/train.py"))
DIGITS = ROOT / "common"  # as --data-dir: the bundled digits, without a download
FEW = 140 * 9  # training images in a copy
IGNORED = shutil.ignore_patterns(".git", ".venv", "*cache*", "data", "*.pt")
SITECUSTOMIZE = ROOT / "tests/witness/sitecustomize.py"
WITNESS = {"PYTHONPATH": str(SITECUSTOMIZE.parent)}  # makes Python read it at its start
EPOCH = r"epoch (?P<epoch>\d+)/(?P<epochs>\d+)  loss (?P<loss>\d+\.\d{4})  "
EPOCH += r"accuracy (?P<accuracy>[01]\.\d{4})  (?P<seconds>\d+\.\d) s  (?P<speed>\d+) images/s"
EPOCH = re.compile(EPOCH)

# Of launch files and torchrun, as those of Slurm: a test sets them itself or leaves them out
SETTINGS = """
    NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS RANK LOCAL_RANK WORLD_SIZE
    LOCAL_WORLD_SIZE GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME RDZV_ENDPOINT SCRIPT OPTIONS USER_ID
    GROUP_ID TORCH_DISABLE_SHARE_RDZV_TCP_STORE TORCH_ELASTIC_SHUTDOWN_TIMEOUT
""".split()


def clean_environment():
    """The environment of the tests, without what would change what a launch file does."""
    names = [name for name in os.environ if not name.startswith("SLURM_")]
    return {name: os.environ[name] for name in names if name not in SETTINGS}


def label(path):
    """The name of a path in the list of tests."""
    return str(path.relative_to(ROOT))


class Result:
    """A finished command: its exit code and what it printed."""

    def __init__(self, command, code, output, errors):
        self.command, self.code, self.output, self.errors = command, code, output, errors

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
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        environment = clean_environment() | environment | {"TEST_RUN": self.token}
        self.process = subprocess.Popen(
            [str(part) for part in command], cwd=cwd, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self.files[0], stderr=self.files[1],
        )

    def printed(self):
        """What it has printed so far: standard output and standard error."""
        for file in self.files:
            file.seek(0)
        return [file.read() for file in self.files]

    def kill(self, *words):
        """End, with SIGKILL, one process whose command line contains all these words."""
        for process in processes(self.token):
            command = Path(f"/proc/{process}/cmdline").read_text()
            if all(word in command for word in words):
                return os.kill(process, signal.SIGKILL)
        raise AssertionError(f"no process of {self.command} has {words} in its command line")

    def kill_all(self):
        """End it and everything that it has started."""
        kill(self.token)
        self.process.wait()

    def finish(self, limit=300):
        """Return the result. It must end before the limit, and leave no process running."""
        try:
            self.process.wait(max(0, self.start + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill(self.token)
            printed = "\n".join(self.printed())
            raise AssertionError(f"{self.command}: no end within {limit} s\n{printed}") from None
        end = time.monotonic() + 30  # for the last processes
        while (left := processes(self.token)) and time.monotonic() < end:
            time.sleep(0.1)
        kill(self.token)
        result = Result(self.command, self.process.returncode, *self.printed())
        assert not left, f"still running: {left}\n{result}"
        return result


def wait_until(condition, *running, limit=300):
    """Wait until a condition holds. None of these commands may end before."""
    end = time.monotonic() + limit
    while not condition():
        state = [text[-3000:] for each in running for text in each.printed()]
        assert all(each.process.poll() is None for each in running), state
        assert time.monotonic() < end, state
        time.sleep(0.05)


def wait_for(text, *running, times=1, limit=300):
    """Wait until these commands have printed a text so many times; none of them may end before."""

    def printed_often_enough():
        return sum(each.printed()[0].count(text) for each in running) >= times

    wait_until(printed_often_enough, *running, limit=limit)


def run(command, cwd, limit=300, **environment):
    """Run a command to its end; returns the result."""
    return Running(command, cwd, **environment).finish(limit)


def torchrun(script, nproc, *options, cwd, **environment):
    """Run a script with torchrun, in this number of processes on two cores."""
    command = ["torchrun", "--standalone", f"--nproc-per-node={nproc}", script, *options]
    return run(command, cwd, **{"OMP_NUM_THREADS": str(max(1, 2 // nproc)), **environment})


# Ranks are forked from a process that has imported torch: torchrun takes seconds to start them
RANKS = multiprocessing.get_context("forkserver")
MODULES = "nn fsdp pipelining tensor.parallel checkpoint.state_dict".split()
RANKS.set_forkserver_preload(["tqdm", *(f"torch.distributed.{name}" for name in MODULES)])


def start_ranks(script, nproc, options, cwd, files, **environment):
    """Start a script in ranks as torchrun does; they append to two files, output and errors."""
    launch = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    launch |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""), **environment}
    given = [{"RANK": rank, "LOCAL_RANK": rank, **launch} for rank in range(nproc)]
    return start(run_rank, [(Path(cwd, script), options, cwd, each, files) for each in given])


def start(function, arguments):
    """Call a function with each of these arguments in a process forked as above."""
    ranks = [RANKS.Process(target=function, args=given) for given in arguments]
    for process in ranks:
        process.start()
    return ranks


def exit_codes(ranks, limit=300):
    """Wait for the ends of ranks and return their exit codes; SIGKILL ends them at the limit."""
    end = time.monotonic() + limit
    for process in ranks:
        process.join(max(0, end - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def run_ranks(script, nproc, *options, cwd, errors=None, limit=300, **environment):
    """Run a script in ranks, for tests of what it computes; errors may be a terminal."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "output"), errors or Path(folder, "errors")]
        codes = exit_codes(start_ranks(script, nproc, options, cwd, files, **environment), limit)
        printed = [file.read_text() if file.is_file() else "" for file in files]
    command = ["torchrun", "--standalone", f"--nproc-per-node={nproc}", script, *options]
    return Result(command, max(map(abs, codes)), *printed)


def run_rank(script, options, cwd, settings, files):
    os.chdir(cwd)
    os.environ.update({name: str(value) for name, value in settings.items()})
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = open(1, "w", closefd=False)  # a line in one piece, also from two ranks
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # DataLoader workers, as usual
    if "PYTHONPATH" in settings:  # which a new Python would read at its start
        runpy.run_path(str(SITECUSTOMIZE))
    sys.argv = [str(script), *map(str, options)]
    sys.path[:] = [str(Path(script).parent), *(path for path in sys.path if path != str(ROOT))]
    runpy.run_path(str(script), run_name="__main__")


def free_port():
    """A port on which nothing listens."""
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


def processes(token):
    """The ids of all processes that the Running with this token has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if token.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def kill(token):
    for process in processes(token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


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


def load_script(path):
    """Import a script as a module, without running its main()."""
    spec = importlib.util.spec_from_file_location("script", path)
    module = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stderr(sys.__stderr__):  # a file, which faulthandler needs
        spec.loader.exec_module(module)
    return module


def declare_torchvision_operators():
    """Let this process import torchvision where torch's build is not the one it was built for.

    PyPI's torchvision does not import with a CPU build of torch, as its C++ extension does not load
    and declares no operators. Commands and ranks do this at their start if their environment has
    WITNESS and TORCHVISION_OPERATORS=1: run_ranks(..., TORCHVISION_OPERATORS="1", **WITNESS).
    """
    os.environ["TORCHVISION_OPERATORS"] = "1"
    runpy.run_path(str(SITECUSTOMIZE))
    del os.environ["TORCHVISION_OPERATORS"]


def parse(monkeypatch, script, *options, gpus=0, **environment):
    """Call a script's parse_args() with these options, on a machine with this number of GPUs.

    From 04 on a script reads RANK: give RANK=0, or the rank that it is about.
    """
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("sys.argv", [script.name, *map(str, options)])
    return load_script(script).parse_args()


def rejected(monkeypatch, capsys, script, *options, **settings):
    """The error that argparse prints below its usage when a script rejects these options."""
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, script, *options, **settings)
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"{script.name}: error: ")
    return error.removeprefix(f"{script.name}: error: ")


def bare_accuracy(weights):
    """The accuracy of saved weights, image by image, without the code of the scripts."""
    from common.data import load_mnist  # here: a rank imports this file, then a copy's common/
    from common.model import ConvNet

    model = ConvNet().eval()
    model.load_state_dict(torch.load(weights, weights_only=True))
    test_set = load_mnist(DIGITS)[1]
    with torch.no_grad():
        right = [int(model(image[None]).argmax()) == int(label) for image, label in test_set]
    return sum(right) / len(right)


class Launch(Running):
    """A run.sh of a copied repository with few digits, started in a folder of its own."""

    def __init__(self, place, repository, folder, *options, tools=None, **settings):
        self.place, self.repository = place, repository
        place.mkdir()
        (place / "data").symlink_to(repository / "common")
        settings |= {**WITNESS, "WITNESS": str(place / "witness")}
        if tools:
            settings["PATH"] = tools(place)
        super().__init__(["bash", repository / folder / "run.sh", *options], place, **settings)

    def check(self, **expected):
        """It has trained, and no line of the repository caused a warning."""
        result = self.finish()
        check_warnings(result, self.repository)
        check_trained(result, self.place, **expected)
        return result


def check_warnings(result, repository=ROOT):
    """No line of the repository caused a warning of Python, such as a deprecation."""
    warning = rf"^{re.escape(str(repository))}.*Warning"
    assert not re.search(warning, result.errors, re.M), result


def check_trained(result, folder, epochs=3, ranks=2, at_least=0.6, accuracy_of=bare_accuracy):
    """Check the epoch lines, and that the saved weights have the accuracy of the last one.

    With several ranks also: each adds its share to the loss, a mean over all images, and only
    rank 0 saves.
    """
    assert result.code == 0, result
    lines = result.epochs()
    assert [line["epoch"] for line in lines] == [str(n) for n in range(1, epochs + 1)], result
    assert float(lines[-1]["accuracy"]) >= at_least, result
    assert lines[-1]["accuracy"] == f"{accuracy_of(folder / 'mnist.pt'):.4f}", result
    if ranks == 1:
        return
    rows = [line.split() for line in (folder / "witness").read_text().splitlines()]
    assert {int(world) for _, world, *_ in rows} == {ranks}
    assert {rank for rank, _, *what in rows if what == ["saves"]} == {"0"}
    rows = [row for row in rows if row[2] != "saves"]
    shares = [[row[2:] for row in rows if int(row[0]) == n] for n in range(ranks)]
    for line, of_epoch in zip(lines, zip(*shares, strict=True), strict=True):
        losses, images = zip(*[map(float, share) for share in of_epoch], strict=True)
        assert min(losses) > 0 and sum(images) == math.ceil(FEW / ranks) * ranks
        assert abs(float(line["loss"]) - sum(losses) / sum(images)) < 6e-5


def copy_project(folder, script, *others):
    """Copy a script, other files of its folder and common/ as a reader does, with few digits."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (script.name, *others):
        shutil.copy(script.parent / name, folder / name)
    shutil.copytree(ROOT / "common", folder / "common", ignore=IGNORED)
    fewer_digits(folder)
    return folder


def copy_repository(folder):
    """Copy this repository, with few digits and room for a project."""
    shutil.copytree(ROOT, folder, ignore=IGNORED)
    fewer_digits(folder)
    (folder / "data").symlink_to("common")
    (folder / "YOUR_PROJECT").mkdir()
    return folder


def edit(project, file, *changes):
    """Replace texts, which must be there, in a file of a copied project."""
    path = project / file
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)


def fewer_digits(project, now=1438, digits=140):
    """Let the copy train on few digits, each of them at nine positions."""
    changes = [(f"images[:{now},", f"images[:{digits},"), (f"labels[:{now}]", f"labels[:{digits}]")]
    edit(project, "common/data.py", *changes)


def without_batch_norm(project):
    """Let the copied ConvNet normalise each image separately, and the copy compute in float64.

    Then a batch may be split: float64 leaves a clear gap between rounding and a mistake.
    """
    edit(project, "common/model.py", ("nn.BatchNorm2d(", "nn.GroupNorm(4, "))
    float64 = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
    edit(project, "common/data.py", ("import torch\n", float64))


def clip_at(project, norm, *scripts):
    """Let copied scripts clip the gradients at another norm.

    Clipping may hide a wrong divisor: it gives every large gradient the same norm.
    """
    for script in scripts:
        edit(project, script, ("MAX_GRAD_NORM = 0.7", f"MAX_GRAD_NORM = {norm}"))


def splittable(folder):
    """Copy 04, for a comparison of how its batches are split, without the clipping of gradients."""
    project = copy_project(folder, ROOT / "04_ddp_torchrun/train.py")
    clip_at(project, 1e9, "train.py")
    without_batch_norm(project)
    return project


def trained(project, nproc, *options):
    """The weights of a copied project after an epoch."""
    output = project / f"weights-{len(list(project.glob('*.pt')))}.pt"
    options = ["--data-dir", "common", "--epochs", 1, "--lr", 0.01, "--output", output, *options]
    result = run_ranks("train.py", nproc, *options, cwd=project)
    assert result.code == 0, result
    return output


def with_dropout(project):
    """Let the copied ConvNet use random numbers in each step."""
    features = "self.layer2(self.layer1(images)).flatten(1)"
    dropout = f"nn.functional.dropout({features}, 0.1, self.training)"
    edit(project, "common/model.py", (features, dropout))


def pairs(one, other):
    """The tensors of two files of weights, which must have the same names."""
    one, other = (torch.load(path, weights_only=True) for path in (one, other))
    assert one.keys() == other.keys()
    return [(one[name], other[name]) for name in one]


def distance(one, other):
    """The largest difference between two files of weights."""
    return max((tensor - another).abs().max().item() for tensor, another in pairs(one, other))


def equal(one, other):
    """Whether two files contain the same weights, bit by bit."""
    return all(torch.equal(tensor, another) for tensor, another in pairs(one, other))


def bits(state):
    """A state to be compared bit by bit: its tensors as their type, shape and bytes."""
    if isinstance(state, dict):
        return {name: bits(part) for name, part in state.items()}
    if isinstance(state, list):
        return [bits(part) for part in state]
    if isinstance(state, torch.Tensor):
        return state.dtype, state.shape, state.numpy().tobytes()
    return state
