"""Each train.py, as its page starts it, in two processes on Gloo: it logs and saves.

Whoever copies a script can copy its row: nothing here needs the other files of tests/.
"""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from common.data import load_mnist
from common.model import ConvNet

ROOT = Path(__file__).resolve().parent.parent
ONE = "torchrun --standalone --nproc-per-node=2 {script}"
TWO = (
    "torchrun --nnodes=2 --node-rank={node} --nproc-per-node=1 --master-addr=127.0.0.1 "
    "--master-port={port} {script}"
)
SPAWN = (
    "python {script} -n 2 -g 1 -i {node} --master-addr 127.0.0.1 --master-port {port}"
)
TASK = (
    "env SLURM_PROCID={node} SLURM_LOCALID={node} SLURM_STEP_NUM_TASKS=2 "
    "MASTER_ADDR=127.0.0.1 MASTER_PORT={port} python {script}"
)
SCRIPTS = {  # how many nodes, and the command of each
    "01_dataparallel/train.py": (1, "python {script}"),
    "02_ddp_spawn/train.py": (1, "python {script} --nprocs 2"),
    "03_ddp_multinode_spawn/train.py": (2, SPAWN),
    "04_ddp_torchrun/train.py": (2, TWO),
    "05_model_parallel/train.py": (1, ONE),
    "06_checkpointing/train.py": (1, ONE),
    "07_slurm/train.py": (2, TASK),
    "08_docker/train.py": (1, ONE),
}
LINE = r"epoch 1/1  loss (\d\.\d{4})  accuracy (\d\.\d{4})  \d+\.\d s  \d+ images/s\n"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy with a tenth of the digits, in a folder with a space in its name."""
    copy = tmp_path_factory.mktemp("smoke") / "a copy"
    ignored = shutil.ignore_patterns(".*", "tests", "data", "*.pt")
    shutil.copytree(ROOT, copy, ignore=ignored)
    data = copy / "common/data.py"
    data.write_text(data.read_text().replace("[:1438", "[:140"))
    return copy


def start(nodes, command, script, folder, *options):
    """Run the command of each node, in a folder of its own; returns what they print."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = []
    for node in range(nodes):
        (folder / str(node)).mkdir()
        words = command.split()  # before the script's path, which may have a space
        words = [word.format(script=script, node=node, port=port) for word in words]
        process = subprocess.Popen(
            [*words, *options],
            cwd=folder / str(node),
            text=True,
            env=environment,
            stdout=subprocess.PIPE,
        )
        started.append(process)
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return printed


@torch.no_grad()
def accuracy_of(weights):
    """The accuracy of a ConvNet, image by image."""
    model = ConvNet().eval()
    model.load_state_dict(weights)
    test_set = load_mnist(ROOT / "common")[1]
    correct = sum(model(image[None]).argmax() == label for image, label in test_set)
    return correct / len(test_set)


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_processes_train_and_rank_0_saves(script, copy, tmp_path):
    """One line for an epoch, and one file, which has the accuracy of that line."""
    options = ["--epochs", "1", "--data-dir", copy / "common"]
    options += ["--output", "new/mnist.pt"]
    printed = start(*SCRIPTS[script], copy / script, tmp_path, *options)
    [(loss, accuracy)] = re.findall(LINE, "".join(printed))
    assert float(loss) < 5 and float(accuracy) > 0.1, printed
    [file] = tmp_path.glob("*/new/*")
    assert file == tmp_path / "0/new/mnist.pt"
    assert accuracy == f"{accuracy_of(torch.load(file, weights_only=True)):.4f}"
