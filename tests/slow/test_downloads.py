"""Downloads of MNIST under stress: one is killed, and in another the name lookup hangs."""

import socket
import sys
import time

import mnist_mirror
from helpers import ROOT, Running, wait_until
from test_common import check_fallback

import common.data
from common.data import load_mnist

DOWNLOAD = """
import pathlib, sys
import common.data as data
data.torchvision_mnist().mirrors = [sys.argv[1]]
data.load_mnist(pathlib.Path(sys.argv[2]))
"""


def test_a_killed_download_leaves_nothing_incomplete(tmp_path, monkeypatch):
    files, root = tmp_path / "files", tmp_path / "the data"
    mnist_mirror.make_files(files)

    def has_begun():
        return any(path.stat().st_size for path in root.glob(".download-*/MNIST/raw/*"))

    with mnist_mirror.serve(files, half=True) as (url, _):
        download = Running([sys.executable, "-c", DOWNLOAD, url, root], ROOT)
        wait_until(has_begun, download)
        download.kill_all()  # with half of the first file on the disk
    assert list((root / "MNIST/raw").iterdir()) == []
    with mnist_mirror.serve(files) as (url, _):
        mnist_mirror.use_files(monkeypatch, files, url)
        assert len(load_mnist(root)[0]) == 100


def test_a_name_lookup_that_hangs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(600))
    check_fallback(tmp_path / "the data", capsys, common.data.torchvision_mnist().mirrors[0])
