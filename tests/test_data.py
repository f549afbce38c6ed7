"""common/data.py: each machine downloads MNIST once, or all ranks get the digits."""

import functools
import gzip
import hashlib
import http.server
import os
import shutil
import socket
import struct
import threading

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, exit_codes, start, torchvision_datasets
from torch.utils.data import DataLoader

from common import data
from common.data import load_mnist


@pytest.fixture
def files(tmp_path):
    """A folder with MNIST's files, plain and compressed: 100 and 23 images."""
    (tmp_path / "files").mkdir()
    numbers = torch.Generator().manual_seed(0)
    for part, count in (("train", 100), ("t10k", 23)):
        pixels = torch.randint(256, (count, 28, 28), generator=numbers).byte()
        images = struct.pack(">IIII", 2051, count, 28, 28) + pixels.numpy().tobytes()
        digits = bytes(index % 10 for index in range(count))
        labels = struct.pack(">II", 2049, count) + digits
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            path = tmp_path / f"files/{part}-{kind}-ubyte"
            path.write_bytes(content)
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    return tmp_path / "files"


def take_for_mnist(patch, folder, url="http://127.0.0.1:9/"):
    """Let common.data and torchvision take these files for MNIST, from this host."""
    sizes = {name: len((folder / name).read_bytes()) for name in data.BYTES}
    patch.setattr(data, "BYTES", sizes)
    compressed = []
    for name in sizes:
        file = folder / f"{name}.gz"
        compressed.append((file.name, hashlib.md5(file.read_bytes()).hexdigest()))
    patch.setattr(torchvision_datasets().MNIST, "resources", compressed)
    patch.setattr(torchvision_datasets().MNIST, "mirrors", [url])


def test_mnist_is_downloaded_and_loaded(files, tmp_path, monkeypatch):
    """Also where a file is there, but incomplete; another process may be reading it."""
    root = tmp_path / "the data"
    shutil.copytree(files, root / "MNIST/raw", ignore=shutil.ignore_patterns("*.gz"))
    incomplete = root / "MNIST/raw/t10k-labels-idx1-ubyte"
    incomplete.write_bytes(b"1234")
    reader = incomplete.open("rb")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=files)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        take_for_mnist(monkeypatch, files, url)
        load_mnist(root)
        server.shutdown()
    assert reader.read() == b"1234"  # it was replaced, not overwritten
    assert sorted(path.name for path in root.iterdir()) == ["MNIST"]
    take_for_mnist(monkeypatch, files)  # the second time there is no network
    train_set, test_set = load_mnist(root)
    names = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
    pixels = [torch.tensor(list((files / name).read_bytes()[16:])) for name in names]
    torch.testing.assert_close(train_set.tensors[0].flatten(), pixels[0] / 255)
    [(images, labels)] = DataLoader(test_set, 3, sampler=[7, 3, 22])
    torch.testing.assert_close(images, pixels[1].view(23, 1, 28, 28)[[7, 3, 22]] / 255)
    assert labels.tolist() == [7, 3, 2]


def load_on_two_nodes(rank, files, roots, output):
    """Two machines of two processes each; on the second there is no MNIST."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    with pytest.MonkeyPatch.context() as patch:
        take_for_mnist(patch, files)
        dist.init_process_group("gloo", f"file://{files}/store", None, 4, rank)
        sets = load_mnist(roots[rank // 2], download=rank % 2 == 0)
        dist.destroy_process_group()
    assert [len(part) for part in sets] == [1438 * 9, 359]


def test_without_mnist_on_one_node_all_ranks_train_on_the_digits(files, tmp_path):
    """And rank 0 says why, in one line."""
    shutil.copytree(files, tmp_path / "MNIST/raw")
    roots, output = (tmp_path, tmp_path / "elsewhere"), tmp_path / "output"
    given = [(rank, files, roots, output) for rank in range(4)]
    assert exit_codes(start(load_on_two_nodes, given)) == [0] * 4
    [line] = output.read_text().splitlines()
    where = f"MNIST is not in {roots[1]} on {socket.gethostname()}"
    assert line.startswith(f"{where}, and the download failed (")
    assert "RuntimeError(" in line
    assert line.endswith("): training on the 1,797 bundled digits")


def test_the_digits_need_no_network_and_none_is_in_both_sets(capsys):
    sets = load_mnist(ROOT / "common")
    train, test = [
        {image.numpy().tobytes() for image in part.tensors[0]} for part in sets
    ]
    assert len(train) > 10_000 and len(test) == 359 and not test & train
    assert all(part.tensors[0].aminmax() == (0, 1) for part in sets)
    assert capsys.readouterr().out == ""
