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
import tempfile
import time
import uuid
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FOLDERS = sorted(path.parent.name for path in ROOT.glob("0*/train.py"))
DIGITS = ROOT / "common"  # as --data-dir: the bundled digits, with no look at the network
WITNESS = {"PYTHONPATH": str(ROOT / "tests/witness")}  # what makes Python read witness/sitecustomize.py
EPOCH = re.compile(
    r"epoch (?P<epoch>\d+)/(?P<epochs>\d+)  loss (?P<loss>\d+\.\d{4})  accuracy (?P<accuracy>[01]\.\d{4})  "
    r"(?P<seconds>\d+\.\d) s  (?P<speed>\d+) images/s"
)

SETTINGS = {  # of launch files and of torchrun, which a test sets or leaves out
    *("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "RANK", "LOCAL_RANK"),
    *("RDZV_ENDPOINT", "RDZV_ID", "MAX_RESTARTS", "START_TIMEOUT", "GLOO_SOCKET_IFNAME"),
    *("LAUNCHER", "SCRIPT", "IMAGE", "DATA_DIR", "BUILD_OPTIONS", "OPTIONS", "USER_ID", "GROUP_ID"),
}


def clean_environment():
    """The environment of the tests, without what would change a launch file's ways."""
    return {name: value for name, value in os.environ.items() if name not in SETTINGS and name[:6] != "SLURM_"}


def label(path):
    """What a path is called in the list of tests."""
    return str(path.relative_to(ROOT))


class Result:
    """What a command printed, its exit code and how long it took."""

    def __init__(self, command, code, output, errors, seconds):
        self.command, self.code, self.output, self.errors, self.seconds = command, code, output, errors, seconds

    def __repr__(self):
        return f"{self.command}\nexit code {self.code} after {self.seconds:.1f} s\n{self.output}\n{self.errors}"

    def epochs(self):
        """The epoch lines, as dictionaries; every line that begins like one must be one."""
        lines = [line for line in self.output.splitlines() if line.startswith("epoch")]
        matches = [EPOCH.fullmatch(line) for line in lines]
        assert all(matches), str(self)
        return [match.groupdict() for match in matches]


class Running:
    """A command that has been started, and whatever it starts itself."""

    def __init__(self, command, cwd, **environment):
        self.command, self.token, self.start = command, uuid.uuid4().hex, time.monotonic()
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=clean_environment() | environment | {"TEST_RUN": self.token},
            stdin=subprocess.DEVNULL,
            stdout=self.files[0],
            stderr=self.files[1],
            start_new_session=True,
        )

    def printed(self):
        """What it has printed so far: its standard output and its errors."""
        for file in self.files:
            file.seek(0)
        return [file.read() for file in self.files]

    def kill(self, *words):
        """End, with SIGKILL, one process in whose command line all these words stand."""
        for process in processes(self.token):
            if all(word.encode() in Path(f"/proc/{process}/cmdline").read_bytes() for word in words):
                os.kill(process, signal.SIGKILL)
                return
        raise AssertionError(f"no process of {self.command} has {words} in its command line")

    def kill_all(self):
        """End it and whatever it has started."""
        kill(self.token)
        self.process.wait()

    def finish(self, limit=120):
        """Wait for its end; end all of it at the limit. Nothing of it may live on after its end."""
        try:
            self.process.wait(max(0, self.start + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill(self.token)
            raise AssertionError(f"{self.command} did not end within {limit} s\n" + "\n".join(self.printed())) from None
        seconds, left = time.monotonic() - self.start, wait_until_gone(self.token)
        kill(self.token)
        result = Result(self.command, self.process.returncode, *self.printed(), seconds)
        assert not left, f"still running: {left}\n{result}"
        return result


def wait_until(condition, *running, limit=60):
    """Wait until a condition holds; none of these commands may end before."""
    end = time.monotonic() + limit
    while not condition():
        state = [each.printed() for each in running]
        assert all(each.process.poll() is None for each in running) and time.monotonic() < end, state
        time.sleep(0.05)


def wait_for(text, *running, times=1, limit=60):
    """Wait until this stands so often in the output of these commands together; none of them may end before."""
    wait_until(lambda: sum(each.printed()[0].count(text) for each in running) >= times, *running, limit=limit)


def run(command, cwd, limit=120, **environment):
    """Run a command to its end, which must come before the limit, and with it the end of whatever it starts."""
    return Running(command, cwd, **environment).finish(limit)


def torchrun(script, nproc, *options, cwd, **environment):
    """Run a script with torchrun, in so many processes on this machine, which share two cores."""
    command = ["torchrun", "--standalone", f"--nproc-per-node={nproc}", script, *options]
    return run(command, cwd, **{"OMP_NUM_THREADS": str(max(1, 2 // nproc)), **environment})


def free_port():
    """A port that nothing listens at."""
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


def run_two_nodes(script, options, cwd, **settings):
    """Run a launch file as two nodes of one process each, on this machine; prints both exit codes.

    What node 0 and node 1 print is in node0.out, node0.err, node1.out and node1.err.
    """
    start = [
        f"NODE_RANK={rank} bash '{script}' {options[rank]} > node{rank}.out 2> node{rank}.err & node{rank}=$!"
        for rank in (0, 1)
    ]
    end = 'wait "$node0"; first=$?; wait "$node1"; echo "$first $?"'
    settings = settings or {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run(["bash", "-c", "\n".join([*start, end])], cwd, NNODES="2", NPROC="1", **settings)


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


def copy_project(folder, script, *others):
    """Copy one script, and others of its folder, with common/ beside, as a reader does for a project of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (script.name, *others):
        shutil.copy(script.parent / name, folder / name)
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


def with_dropout(project):
    """Let the copied ConvNet use random numbers in each step."""
    features = "self.layer2(self.layer1(images)).flatten(1)"
    edit(project, "common/model.py", (features, f"nn.functional.dropout({features}, 0.1, self.training)"))


def pairs(one, other):
    """The tensors of two files of weights, which must have the same names."""
    one, other = (torch.load(path, weights_only=True) for path in (one, other))
    assert one.keys() == other.keys()
    return [(one[name], other[name]) for name in one]


def distance(one, other):
    """The largest difference between two files of weights."""
    return max((tensor - other_tensor).abs().max().item() for tensor, other_tensor in pairs(one, other))


def equal(one, other):
    """Whether two files hold the same weights, bit by bit."""
    return all(torch.equal(tensor, other_tensor) for tensor, other_tensor in pairs(one, other))
