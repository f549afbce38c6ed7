"""A download of MNIST that is killed."""

import sys

import mnist_mirror
from helpers.commands import WITNESS, Running, wait_until
from helpers.paths import ROOT

from common.data import load_mnist

DOWNLOAD = """
import pathlib, sys
from torchvision.datasets import MNIST
from common.data import load_mnist
MNIST.mirrors = [sys.argv[1]]
load_mnist(pathlib.Path(sys.argv[2]))
"""


def test_a_killed_download_leaves_nothing_incomplete(tmp_path, monkeypatch):
    files, root = tmp_path / "files", tmp_path / "the data"
    mnist_mirror.make_files(files)

    def has_begun():
        return any(path.stat().st_size for path in root.glob("tmp*/MNIST/raw/*"))

    with mnist_mirror.serve(files, half=True) as url:
        command = [sys.executable, "-c", DOWNLOAD, url, root]
        download = Running(command, ROOT, TORCHVISION_OPERATORS="1", **WITNESS)
        wait_until(has_begun, download)
        download.kill_all()  # with half of the first file on the disk
    assert list((root / "MNIST/raw").iterdir()) == []
    with mnist_mirror.serve(files) as url:
        mnist_mirror.use_files(monkeypatch, files, url)
        assert len(load_mnist(root)[0]) == 100
