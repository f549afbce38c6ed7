"""Downloads of MNIST under stress: many processes at once, a kill, and hosts that do not answer."""

import multiprocessing
import signal
import socket
import subprocess
import sys
import time

import mnist_mirror
import pytest
from helpers import ROOT
from test_common import check_fallback

import common.data
from common.data import load_mnist


@pytest.fixture
def files(tmp_path):
    mnist_mirror.make_files(tmp_path / "files")
    return tmp_path / "files"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "the data"


def load_often(files, root, url, barrier, answers, times):
    """Load from a new, empty folder at the same moment as all other processes."""
    mnist_mirror.use_files(pytest.MonkeyPatch(), files, url)
    for number in range(times):
        barrier.wait(timeout=200)
        answers.put(tuple(map(len, load_mnist(root / str(number)))))


def test_8_processes_at_once_on_an_empty_folder_20_times(files, root):
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(8), context.Queue()
    with mnist_mirror.serve(files) as (url, requested):
        given = (files, root, url, barrier, answers, 20)
        loaders = [context.Process(target=load_often, args=given, daemon=True) for _ in range(8)]
        for process in loaders:
            process.start()
        sizes = [answers.get(timeout=200) for _ in range(8 * 20)]
        for process in loaders:
            process.join(timeout=60)
            assert process.exitcode == 0
    assert sizes == [(100, 23)] * 160
    one_download = 2  # torchvision asks for redirections first, and then for the file
    assert requested.count("/t10k-labels-idx1-ubyte.gz") == 20 * one_download
    for number in range(20):
        assert [path.name for path in (root / str(number)).iterdir()] == ["MNIST"]


def test_a_killed_download_leaves_nothing_incomplete(files, root, monkeypatch):
    code = (
        "import sys, pathlib, common.data as data;"
        "data.torchvision_mnist().mirrors = [sys.argv[1]];"
        "data.load_mnist(pathlib.Path(sys.argv[2]))"
    )
    with mnist_mirror.serve(files, half=True) as (url, _):
        process = subprocess.Popen([sys.executable, "-c", code, url, root], cwd=ROOT)
        end = time.monotonic() + 120
        while not any(path.stat().st_size for path in root.glob(".download-*/MNIST/raw/*")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)  # with half of the first file on the disk
        process.wait(timeout=60)
    assert list((root / "MNIST/raw").iterdir()) == []
    with mnist_mirror.serve(files) as (url, _):
        mnist_mirror.use_files(monkeypatch, files, url)
        assert len(load_mnist(root)[0]) == 100


def test_a_host_that_never_answers(root, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        monkeypatch.setattr(common.data.torchvision_mnist(), "mirrors", [url])
        check_fallback(root, capsys, url)


def test_a_name_lookup_that_hangs(root, monkeypatch, capsys):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(600))
    check_fallback(root, capsys, common.data.torchvision_mnist().mirrors[0])
