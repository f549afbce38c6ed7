"""common/data.py: each machine downloads MNIST once, or all ranks get the digits."""

import gzip
import importlib
import os
import struct
import sys

import pytest
import torch
from helpers import ROOT, Running, free_port, module, wait_until

from common import data
from common.data import load_mnist


def test_mnist_is_downloaded_and_loaded(tmp_path, monkeypatch):
    """An incomplete file is replaced."""
    module(ROOT / "tests/small/sitecustomize.py")
    mnist = importlib.import_module("torchvision.datasets").MNIST
    (raw := tmp_path / "root/MNIST/raw").mkdir(parents=True)
    labels = struct.pack(">II", 2049, 100) + bytes(n % 10 for n in range(100))
    pixels, sizes = [], {}
    for part in ("train", "t10k"):
        pixels.append(torch.randint(256, (100, 28, 28)).byte())
        images = struct.pack(">IIII", 2051, 100, 28, 28) + bytes(pixels[-1].flatten())
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            name = f"{part}-{kind}-ubyte"
            (raw / name).write_bytes(content)
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
            sizes[name] = len(content)
    (raw / name).write_bytes(b"1234")
    monkeypatch.setattr(data, "BYTES", sizes)
    monkeypatch.setattr(mnist, "resources", [(f"{name}.gz", None) for name in sizes])
    command = [sys.executable, "-u", "-m", "http.server", free_port()]
    server = Running([*command, "--bind=127.0.0.1"], tmp_path)
    wait_until(lambda: "Serving" in server.output, server)
    monkeypatch.setattr(mnist, "mirrors", [f"http://127.0.0.1:{command[-1]}/"])
    load_mnist(tmp_path / "root")
    server.kill_all()
    for part, expected in zip(load_mnist(tmp_path / "root"), pixels, strict=True):
        images, labels = part.tensors
        torch.testing.assert_close(images[:, 0], expected / 255)
        assert labels.tolist() == [*range(10)] * 10


@pytest.mark.parametrize("given", [[], ["--data-dir=data"]])
def test_without_mnist_on_one_node(given, tmp_path):
    """All ranks get an error that says why, if the folder is given, or the digits.

    Node 1 has no MNIST, and its torchvision is broken.
    """
    (raw := tmp_path / "0/data/MNIST/raw").mkdir(parents=True)
    for name, size in data.BYTES.items():
        (raw / name).touch()
        os.truncate(raw / name, size)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('broken')")
    script = ROOT / "03_ddp_multinode_spawn/train.py"
    command = ["python", script, *given, "-n2", "-g1", "--master-port", free_port()]
    nodes = [
        Running([*command, "-i", n], tmp_path / f"{n}", PYTHONPATH=tmp_path)
        for n in range(2)
    ]
    why = "torchvision does not work (RuntimeError('broken'))"
    for node in nodes:
        assert bool(node.finish().code) == bool(given), node
        assert why in node.errors if given else not node.errors.count("Error")
    assert given or f"{why}: training on the 1,797 bundled digits\n" in nodes[0].output
    assert len([*tmp_path.glob("*/mnist.pt")]) == (not given)
