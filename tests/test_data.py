"""common/data.py: each machine downloads MNIST once, or all ranks get the digits."""

import functools
import gzip
import http.server
import importlib
import os
import shutil
import socket
import struct
import threading

import pytest
import torch
from helpers import ROOT, Running, copy_project, fewer_digits, free_port, module

from common import data
from common.data import load_mnist


def torchvision_mnist():
    """Its class, even if torchvision was built for another build of torch."""
    module(ROOT / "tests/small/sitecustomize.py")
    return importlib.import_module("torchvision.datasets").MNIST


def test_mnist_is_downloaded_and_loaded(tmp_path, monkeypatch):
    """Even if a file is incomplete, while another process is reading it."""
    files, root, mnist = tmp_path / "files", tmp_path / "root", torchvision_mnist()
    files.mkdir()
    labels = struct.pack(">II", 2049, 100) + bytes(n % 10 for n in range(100))
    pixels, sizes = [], {}
    for part in ("train", "t10k"):
        pixels.append(torch.randint(256, (100, 28, 28)).byte())
        images = struct.pack(">IIII", 2051, 100, 28, 28) + bytes(pixels[-1].flatten())
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            name = f"{part}-{kind}-ubyte"
            (files / name).write_bytes(content)
            (files / f"{name}.gz").write_bytes(gzip.compress(content))
            sizes[name] = len(content)
    monkeypatch.setattr(data, "BYTES", sizes)
    monkeypatch.setattr(mnist, "resources", [(f"{name}.gz", None) for name in sizes])
    shutil.copytree(files, root / "MNIST/raw", ignore=shutil.ignore_patterns("*.gz"))
    incomplete = root / "MNIST/raw/t10k-labels-idx1-ubyte"
    incomplete.write_bytes(b"1234")
    reader = incomplete.open("rb")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=files)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(mnist, "mirrors", [url])
        load_mnist(root)
        server.shutdown()
    assert reader.read() == b"1234"  # it was replaced, not overwritten
    assert [*root.iterdir()] == [root / "MNIST"]
    for part, expected in zip(load_mnist(root), pixels, strict=True):  # from the disk
        images, labels = part.tensors
        torch.testing.assert_close(images[:, 0], expected / 255)
        assert labels.tolist() == [*range(10)] * 10


@pytest.mark.parametrize("given", [[], ["--data-dir=data"]])
def test_without_mnist_on_one_node(given, tmp_path):
    """All ranks get an error that says why, if the folder is given, or the digits.

    Node 1 has no MNIST, and its torchvision is broken.
    """
    project = copy_project(tmp_path / "a project", "03_ddp_multinode_spawn/train.py")
    fewer_digits(project)
    (raw := tmp_path / "0/data/MNIST/raw").mkdir(parents=True)
    for name, size in data.BYTES.items():
        (raw / name).touch()
        os.truncate(raw / name, size)
    (broken := tmp_path / "torchvision.py").write_text("raise RuntimeError('broken')")
    command = ["python", project / "train.py", "-n2", "-g1", *given]
    command += ["--master-port", free_port(), "-i"]
    nodes = [
        Running([*command, node], tmp_path / f"{node}", PYTHONPATH=broken.parent)
        for node in range(2)
    ]
    results = [node.finish() for node in nodes]
    saved = [*tmp_path.glob("*/mnist.pt")]
    why = f"MNIST is not in data/MNIST/raw on {socket.gethostname()}"
    why += ", and torchvision does not work (RuntimeError('broken'))"
    if given:
        assert all(f"FileNotFoundError: {why}\n" in each.errors for each in results)
        assert not saved
    else:
        line = f"{why}: training on the 1,797 bundled digits\nstarting on 2 "
        assert results[0].output.startswith(line) and not results[1].output, results
        assert saved == [tmp_path / "0/mnist.pt"]


def test_the_digits_need_no_network_and_none_is_in_both_sets(capsys):
    sets = load_mnist(ROOT / "common")
    train, test = [
        {image.numpy().tobytes() for image in part.tensors[0]} for part in sets
    ]
    assert len(train) > 10_000 and len(test) == 359 and not test & train
    assert all(part.tensors[0].aminmax() == (0, 1) for part in sets)
    assert capsys.readouterr().out == ""
