"""MNIST for every script: a local copy, a download, or else the bundled digits."""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import TensorDataset

# 1,797 digits, each of 64 pixels and a label
DIGITS = Path(__file__).resolve().with_name("digits.bin")
BYTES = {  # of each file
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}


def load_mnist(root, download=True):
    """Return the training and the test set.

    Each has images (float32 [1, 28, 28], from 0 to 1) and labels (int64). All ranks of
    a process group must call it, with download=True on one process per node, which
    downloads what is missing in root/MNIST/raw while the others wait. If that fails on
    any node, rank 0 logs why and all ranks get the bundled digits, as they do if root
    is this folder.
    """
    problem = None
    if download and root.resolve() != DIGITS.parent:
        problem = download_mnist(root)
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        problem = next(filter(None, problems), None)
    if problem and (not dist.is_initialized() or dist.get_rank() == 0):
        print(f"{problem}: training on the 1,797 bundled digits", flush=True)
    if problem or root.resolve() == DIGITS.parent:
        return load_digits()
    files = [(root / "MNIST" / "raw" / name).read_bytes() for name in BYTES]
    parts = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    return [
        # without the header of each file
        TensorDataset(images[16:].view(-1, 1, 28, 28) * (1 / 255), labels[8:].long())
        for images, labels in (parts[:2], parts[2:])
    ]


def download_mnist(root):
    """Download what is missing. Return None, or why this machine has no MNIST."""
    raw = root / "MNIST" / "raw"

    def is_complete():
        for name, size in BYTES.items():
            path = raw / name
            if not path.is_file() or path.stat().st_size != size:
                return False
        return True

    if is_complete():
        return None
    socket.setdefaulttimeout(10)  # seconds, for a network that drops packets
    try:
        from torchvision.datasets import MNIST  # here, as the import takes a second

        raw.mkdir(parents=True, exist_ok=True)
        # files appear when they are complete
        with tempfile.TemporaryDirectory(dir=root) as folder:
            MNIST(folder, download=True)
            for name in BYTES:
                os.replace(Path(folder, "MNIST", "raw", name), raw / name)
    except Exception as error:
        host = socket.gethostname()
        return f"MNIST is not in {root} on {host}, and the download failed ({error!r})"
    finally:
        socket.setdefaulttimeout(None)
    return None


def load_digits():
    """Return the bundled digits, enlarged to 28 x 28 pixels.

    1,438 are for training, each at nine positions, and 359 for testing.
    """
    rows = torch.from_file(str(DIGITS), size=1797 * 65, dtype=torch.uint8)
    rows = rows.view(1797, 65)
    images = rows[:, :64].view(-1, 1, 8, 8) / 16
    images = F.pad(F.interpolate(images, size=24, mode="bilinear"), (4, 4, 4, 4))
    labels = rows[:, 64].long()
    shifted = [
        images[:1438, :, y : y + 28, x : x + 28] for y in (0, 2, 4) for x in (0, 2, 4)
    ]
    train_set = TensorDataset(torch.cat(shifted), labels[:1438].repeat(9))
    return train_set, TensorDataset(images[1438:, :, 2:30, 2:30], labels[1438:])
