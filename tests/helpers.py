"""Run scripts as their users do, and read what they print."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
DIGITS = ROOT / "common"  # as --data-dir: the bundled digits, with no look at the network
EPOCH = re.compile(
    r"epoch (?P<epoch>\d+)/(?P<epochs>\d+)  loss (?P<loss>\d+\.\d{4})  accuracy (?P<accuracy>[01]\.\d{4})  "
    r"(?P<seconds>\d+\.\d) s  (?P<speed>\d+) images/s"
)


def label(path):
    """What a path is called in the list of tests."""
    return str(path.relative_to(ROOT))


class Result:
    """What a command printed, its exit code and how long it took."""

    def __init__(self, command, code, output, errors, seconds):
        self.command, self.code, self.output, self.errors, self.seconds = command, code, output, errors, seconds

    def __str__(self):
        return f"{self.command}\nexit code {self.code} after {self.seconds:.1f} s\n{self.output}\n{self.errors}"

    def epochs(self):
        """The epoch lines, as dictionaries; every line that begins like one must be one."""
        lines = [line for line in self.output.splitlines() if line.startswith("epoch")]
        matches = [EPOCH.fullmatch(line) for line in lines]
        assert all(matches), str(self)
        return [match.groupdict() for match in matches]


def run(command, cwd, limit=120, **environment):
    """Run a command and whatever it starts; end all of it at the limit. Nothing of it may live on after its end."""
    token = uuid.uuid4().hex
    settings = {"NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "RANK", "LOCAL_RANK"}
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    start = time.monotonic()
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **environment, "TEST_RUN": token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill(token)
        output, errors = process.communicate()
        raise AssertionError(f"{command} did not end within {limit} s\n{output}\n{errors}") from None
    result = Result(command, process.returncode, output, errors, time.monotonic() - start)
    left = wait_until_gone(token)
    kill(token)
    assert not left, f"still running: {left}\n{result}"
    return result


def run_two_nodes(script, options, cwd):
    """Run a launch file as two nodes of one process each, on this machine; prints both exit codes.

    What node 0 and node 1 print is in node0.out, node0.err, node1.out and node1.err.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    start = [
        f"NODE_RANK={rank} bash '{script}' {options[rank]} > node{rank}.out 2> node{rank}.err & node{rank}=$!"
        for rank in (0, 1)
    ]
    end = 'wait "$node0"; first=$?; wait "$node1"; echo "$first $?"'
    settings = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return run(["bash", "-c", "\n".join([*start, end])], cwd, **settings)


def processes(token):
    """The ids of all processes that a run() with this token started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or not ours
            continue
    return found


def wait_until_gone(token, limit=5):
    """Give what a run left a moment to end, and return the ids of what did not."""
    end = time.monotonic() + limit
    while (left := processes(token)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def kill(token):
    for process in processes(token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def load_script(path):
    """The module of a script, which is not run."""
    spec = importlib.util.spec_from_file_location(f"script_{uuid.uuid4().hex}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bare_accuracy(weights):
    """The accuracy of saved weights in a bare ConvNet, computed image by image, without any code of the scripts."""
    from common.data import load_mnist
    from common.model import ConvNet

    model = ConvNet()
    model.load_state_dict(torch.load(weights, weights_only=True))
    model.eval()
    test_set = load_mnist(DIGITS)[1]
    with torch.no_grad():
        right = sum(int(model(image[None]).argmax()) == int(label) for image, label in test_set)
    return right / len(test_set)


def copy_project(folder, script):
    """Copy one script with a copy of common/ beside it, as a reader does who takes it into a project of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(script, folder / script.name)
    shutil.copytree(ROOT / "common", folder / "common", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / script.name


def edit(project, file, *changes):
    """Replace texts, which must be there, in a file of a copied project."""
    path = project / file
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)


def fewer_digits(project):
    """Let the copy train on 140 of the digits at nine positions each: 630 images for each of two ranks."""
    edit(project, "common/data.py", ("images[:1438,", "images[:140,"), ("labels[:1438]", "labels[:140]"))


def without_batch_norm(project):
    """Give the copied ConvNet GroupNorm, which treats each image alone, so that a batch may be cut, and float64.

    In float32 the rounding of a sum that is taken in another order grows from step to step; float64 leaves a clear gap.
    """
    edit(
        project,
        "common/model.py",
        ("nn.BatchNorm2d(16)", "nn.GroupNorm(4, 16)"),
        ("nn.BatchNorm2d(32)", "nn.GroupNorm(4, 32)"),
        ("nn.Linear(7 * 7 * 32, 10)", "nn.Linear(7 * 7 * 32, 10)\n        self.double()"),
        ("self.layer1(images)", "self.layer1(images.double())"),
    )


def distance(one, other):
    """The largest difference between two files of weights."""
    one, other = (torch.load(path, weights_only=True) for path in (one, other))
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
