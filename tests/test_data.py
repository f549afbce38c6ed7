"""common/data.py: each machine downloads MNIST once, or all ranks get the digits."""

import runpy
import shutil
import struct

import pytest
import torch
from helpers import ROOT, copy_repository, train

from common import data
from common.data import BYTES, load_mnist


def test_mnist_is_downloaded_once_and_loaded(tmp_path, monkeypatch):
    """An incomplete file is replaced. Without a download, the error says why."""
    runpy.run_path(f"{ROOT}/tests/small/sitecustomize.py")

    def download(url, download_root, filename, md5):
        shutil.copy(tmp_path / filename.removesuffix(".gz"), download_root)

    archive = "torchvision.datasets.mnist.download_and_extract_archive"
    monkeypatch.setattr(archive, download)
    monkeypatch.setattr(data, "BYTES", sizes := {})
    for number, name in enumerate(BYTES):
        content = struct.pack(">II", 2049, 10) + bytes(range(10))
        if "images" in name:  # all pixels are equal
            content = struct.pack(">IIII", 2051, 10, 28, 28) + bytes([number]) * 7840
        sizes[name] = (tmp_path / name).write_bytes(content)
    (raw := tmp_path / "MNIST/raw").mkdir(parents=True)
    (raw / name).write_bytes(b"1234")
    load_mnist(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match="the download failed"):
        load_mnist(tmp_path / "new")
    for number, part in zip((0, 2), load_mnist(tmp_path), strict=True):
        images, labels = part.tensors
        assert torch.equal(images, torch.full((10, 1, 28, 28), number / 255))
        assert labels.tolist() == [*range(10)]


def test_without_mnist_all_ranks_get_the_digits(tmp_path):
    """Only rank 0 knows at first that torchvision is broken."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('broken')")
    script = copy_repository(tmp_path / "a copy") / "04_ddp_torchrun/train.py"
    result = train(script, 2, cwd=tmp_path, PYTHONPATH=tmp_path)
    why = "torchvision does not work (RuntimeError('broken')): training on the 1,797"
    assert why in result.output, result
