"""Each script, as its page starts it, in two processes on Gloo: it logs and saves.

Whoever copies a script can copy its row: nothing here needs the other files of tests/.
"""

import os
import re
import shutil
import socket
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch

from common.data import load_mnist
from common.model import ConvNet, VisionTransformer

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parent.parent
ONE = "torchrun --standalone --nproc-per-node=2 {script}"
TWO = (
    "torchrun --nnodes=2 --node-rank={node} --nproc-per-node=1 --master-addr=127.0.0.1 "
    "--master-port={port} {script}"
)
SPAWN = (
    "python {script} -n 2 -g 1 -i {node} --master-addr 127.0.0.1 --master-port {port}"
)
SCRIPTS = {  # how many nodes, and the command of each
    "01_dataparallel/train.py": (1, "python {script}"),
    "02_ddp_spawn/train.py": (1, "python {script} --nprocs 2"),
    "03_ddp_multinode_spawn/train.py": (2, SPAWN),
    "04_ddp_torchrun/train.py": (2, TWO),
    "05_model_parallel/train.py": (1, ONE),
    "05_model_parallel/fsdp.py": (1, ONE),
    "06_checkpointing/train.py": (1, ONE),
    "07_slurm/train.py": (1, ONE),
    "07_slurm/fsdp.py": (1, ONE),
    "08_docker/train.py": (1, ONE),
}
DEVICE, CLOSE = "cpu", 6e-5  # accuracy is printed with four digits
# at least 0.1
LINE = r"^epoch 1/1  .*accuracy (0\.[1-9]\d{3})  \d+\.\d s  \d+ images/s$"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy with a tenth of the digits, in a folder with a space in its name."""
    copy = tmp_path_factory.mktemp("smoke") / "a copy"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "data", "*.pt")
    )
    data = copy / "common/data.py"
    data.write_text(data.read_text().replace("[:1438", "[:140"))
    return copy


def start(nodes, command, script, folder, options):
    """Run the command of each node in its own folder; returns what they print.

    07 checks that all nodes see its checkpoint.
    """
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for node in range(nodes):
        own = folder / ("0" if "07" in str(script) else str(node))
        own.mkdir(exist_ok=True)
        words = command.split()  # before the script's path, which may have a space
        words = [word.format(script=script, node=node, port=port) for word in words]
        started.append(Popen([*words, *options], cwd=own, text=True, stdout=PIPE))
    printed = "".join(process.communicate(timeout=120)[0] for process in started)
    assert not any(process.returncode for process in started)
    return printed


@torch.no_grad()
def accuracy_of(model, file):
    """The accuracy of a model with the weights of a file."""
    model.load_state_dict(torch.load(file, "cpu", weights_only=True))
    images, labels = load_mnist(ROOT / "common")[1].tensors
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_processes_train_and_rank_0_saves(script, copy, tmp_path):
    """One device, loss and accuracy, and one file, which has that accuracy."""
    options = "--epochs 1 --output new/mnist.pt --data-dir".split()
    options.append(copy / "common")
    printed = start(*SCRIPTS[script], copy / script, tmp_path, options)
    [accuracy] = re.findall(LINE, printed, re.M)
    [loss] = re.findall(r"  loss \d\.\d{4}", printed)
    [_] = re.findall(f"^starting .*{DEVICE}", printed, re.M)
    [file] = tmp_path.glob("*/new/*")
    assert file == tmp_path / "0/new/mnist.pt"
    model = VisionTransformer(64, 3) if "fsdp" in script else ConvNet()
    assert abs(float(accuracy) - accuracy_of(model, file)) < CLOSE


def test_08_has_the_script_of_06():
    scripts = [ROOT / name / "train.py" for name in ("06_checkpointing", "08_docker")]
    assert scripts[0].read_text() == scripts[1].read_text()
