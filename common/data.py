"""MNIST for every script: a local copy, a download, or else the digits bundled in this folder."""

import fcntl
import os
import sys
import tempfile
import zlib
from array import array
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.request import urlopen

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import TensorDataset

DIGITS = Path(__file__).resolve().with_name("digits.bin")  # 1,797 × (64 pixels, label)
CRC32 = {"train-images-idx3-ubyte": 0xE9F4D8B3, "train-labels-idx1-ubyte": 0xE0CB4AD2,
         "t10k-images-idx3-ubyte": 0x91373BDF, "t10k-labels-idx1-ubyte": 0x4AB9EFF9}


class ImageSet(TensorDataset):
    """Images (uint8 [N, 1, 28, 28], returned as float32 from 0 to 1) and labels (int64 [N])."""

    def __getitem__(self, index):
        return self.tensors[0][index] / 255, self.tensors[1][index]

    def __getitems__(self, indices):
        indices = torch.frombuffer(array("q", indices), dtype=torch.int64)  # a fast torch.tensor
        images = self.tensors[0].index_select(0, indices).float().mul_(1 / 255)
        return images, self.tensors[1].index_select(0, indices)


def already_batched(batch):
    """The collate_fn for ImageSet, whose __getitems__ returns whole batches: [B, ...] and [B]."""
    return batch


def load_mnist(root):
    """Return the training and the test ImageSet. All ranks of a process group must call it.

    Raises SystemExit on all ranks, with one line from rank 0, if a file is damaged or if the nodes
    have different data.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not dist.is_initialized():
        found = [prepare_mnist(root)]
    else:
        timeout = timedelta(seconds=600)  # a download may take longer than the job's --timeout
        group = dist.new_group(backend="gloo", timeout=timeout)
        mine = prepare_mnist(root) if os.environ.get("LOCAL_RANK", "0") == "0" else None
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=group)
        dist.destroy_process_group(group)
        found = [entry for entry in found if entry]  # one per node
    data, _, message = found[0]
    differ = any(entry[0] != data for entry in found)
    if differ:
        where = ", ".join(sorted({f"{entry[0]} on {entry[1]}" for entry in found}))
        message = f"the nodes have different data ({where}): copy MNIST to {root} on every node"
    if differ or data == "a damaged MNIST":
        if dist.is_initialized():
            dist.destroy_process_group()  # or the exit may abort
        sys.exit(f"error: {message}" if rank == 0 else 1)
    if rank == 0 and message:
        print(message, flush=True)
    if data == "the bundled digits":
        return load_digits()
    paths = [root / "MNIST" / "raw" / name for name in CRC32]  # each file has a header
    parts = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in paths]
    return [ImageSet(x[16:].view(-1, 1, 28, 28), y[8:].long()) for x, y in (parts[:2], parts[2:])]


def load_digits():
    """The bundled digits, 28 × 28 pixels: 1,438 at nine positions for training, 359 for testing."""
    rows = torch.from_file(str(DIGITS), size=1797 * 65, dtype=torch.uint8).view(1797, 65)
    images = rows[:, :64].view(-1, 1, 8, 8) * (255 / 16)
    images = F.pad(F.interpolate(images, size=24, mode="bilinear").round().byte(), (4, 4, 4, 4))
    labels = rows[:, 64].long()
    shifted = [images[:1438, :, y : y + 28, x : x + 28] for y in (0, 2, 4) for x in (0, 2, 4)]
    train_set = ImageSet(torch.cat(shifted), labels[:1438].repeat(9))
    return train_set, ImageSet(images[1438:, :, 2:30, 2:30], labels[1438:])


def prepare_mnist(root):
    """Download MNIST to root if needed. Return what can be loaded, the host name and a message."""
    host = os.uname().nodename
    if root.resolve() == DIGITS.parent:
        return "the bundled digits", host, ""
    raw = root / "MNIST" / "raw"
    try:
        if not all((raw / name).is_file() for name in CRC32):
            download_mnist(root, raw)
    except Exception as error:
        host_url, files = torchvision_mnist().mirrors[0], ", ".join(CRC32)
        message = f"MNIST is not in {root} and cannot be downloaded from {host_url} ({error!r}): "
        message += f"training on the 1,797 bundled digits. To use MNIST, copy {files} to {raw}."
        return "the bundled digits", host, message
    for name, crc32 in CRC32.items():
        if zlib.crc32((raw / name).read_bytes()) != crc32:
            message = f"{raw / name} is damaged: delete it and run again, or copy it again"
            return "a damaged MNIST", host, message
    return "MNIST", host, ""


def download_mnist(root, raw):
    """Download to a temporary folder, then move the files into place. Raises what stopped it."""
    lock = f"{tempfile.gettempdir()}/mnist-{os.getuid()}-{zlib.crc32(bytes(raw.resolve()))}.lock"
    with open(lock, "w") as file, ThreadPool(2) as pool:  # threads: lookups have no time limit
        fcntl.flock(file, fcntl.LOCK_EX)
        if all((raw / name).is_file() for name in CRC32):  # another job was faster
            return
        MNIST = torchvision_mnist()
        url = MNIST.mirrors[0] + MNIST.resources[0][0]
        pool.apply_async(urlopen, [url], {"timeout": 5}).get(8)  # seconds; does the server answer?
        raw.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
            pool.apply_async(MNIST, [folder], {"download": True}).get(240)
            for name in CRC32:
                os.replace(Path(folder, "MNIST", "raw", name), raw / name)


def torchvision_mnist():
    """Import torchvision's MNIST class for a download only: the import takes a second or two."""
    try:
        from torchvision.datasets import MNIST
    except RuntimeError:  # torchvision's C++ extension does not load with a CPU build of torch
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):  # operators that its import expects and MNIST does not use
            torch.library.define(f"torchvision::{name}", schema)
        from torchvision.datasets import MNIST
    return MNIST
