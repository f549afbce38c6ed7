"""MNIST for every script, or the bundled digits if it cannot be downloaded."""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from common.gather import all_gather_objects

# 1,797 digits, each of 64 pixels and a label
DIGITS = Path(__file__).resolve().with_name("digits.bin")
BYTES = {  # the size of each file of MNIST
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}


def load_mnist(folder=None, download=True):
    """Return the training and the test set.

    Each has images (float32 [1, 28, 28], from 0 to 1) and labels (int64). All ranks
    must call it, with download=True on one process per machine, which downloads missing
    files while the others wait. If that fails, all ranks raise FileNotFoundError, or,
    if no folder was given, get the bundled digits. The folder common/ means the digits.
    """
    if folder and folder.resolve() == DIGITS.parent:
        return load_digits()
    raw = Path(folder or "data", "MNIST", "raw")
    problem = download_mnist(raw) if download else None
    if dist.is_initialized():  # the first problem of any machine
        problem = next(filter(None, all_gather_objects(problem)), None)
    if problem and folder:
        raise FileNotFoundError(problem)
    if problem:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{problem}: training on the 1,797 bundled digits", flush=True)
        return load_digits()
    files = [bytearray((raw / name).read_bytes()) for name in BYTES]
    parts = [torch.frombuffer(file, dtype=torch.uint8) for file in files]
    return [
        # without the header of each file
        TensorDataset(images[16:].view(-1, 1, 28, 28) / 255, labels[8:].long())
        for images, labels in (parts[:2], parts[2:])
    ]


def download_mnist(raw):
    """Download MNIST if a file is missing. Return None, or why there is no MNIST."""
    files = {path.name: path.stat().st_size for path in raw.glob("*-ubyte")}
    if BYTES.items() <= files.items():
        return None
    missing = f"MNIST is not in {raw} on {socket.gethostname()}"
    try:
        from torchvision.datasets import MNIST  # not above: the import takes a second
    except (ImportError, RuntimeError) as error:  # missing, or built for another torch
        return f"{missing}, and torchvision does not work ({error!r})"
    socket.setdefaulttimeout(10)  # seconds: a firewall may drop packets
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=raw) as folder:  # nobody sees half a file
            MNIST(folder, download=True)
            for name in BYTES:
                os.replace(Path(folder, "MNIST", "raw", name), raw / name)
    except Exception as error:
        return f"{missing}, and the download failed ({error!r})"
    finally:
        socket.setdefaulttimeout(None)


def load_digits():
    """Return the bundled digits, enlarged to 28 x 28 pixels.

    1,438 are for training, each at nine positions, and 359 for testing.
    """
    rows = torch.from_file(str(DIGITS), size=1797 * 65, dtype=torch.uint8).view(-1, 65)
    images, labels = rows[:, :64].view(-1, 1, 8, 8) / 16, rows[:, 64].long()
    images = F.pad(F.interpolate(images, size=24, mode="bilinear"), (4, 4, 4, 4))
    shifted = [
        images[:1438, :, y : y + 28, x : x + 28] for y in (0, 2, 4) for x in (0, 2, 4)
    ]
    train_set = TensorDataset(torch.cat(shifted), labels[:1438].repeat(9))
    return train_set, TensorDataset(images[1438:, :, 2:30, 2:30], labels[1438:])
