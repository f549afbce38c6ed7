"""MNIST for every script: the real one where it is or can be downloaded, else the digits bundled in this folder."""

import fcntl
import os
import tempfile
import zlib
from array import array
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.request import urlopen

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import TensorDataset

DIGITS = Path(__file__).resolve().with_name("digits.bin")  # 1,797 rows: 8 × 8 pixels from 0 to 16, then the label
CRC32 = {"train-images-idx3-ubyte": 0xE9F4D8B3, "train-labels-idx1-ubyte": 0xE0CB4AD2,
         "t10k-images-idx3-ubyte": 0x91373BDF, "t10k-labels-idx1-ubyte": 0x4AB9EFF9}


def torchvision_mnist():
    """Import torchvision's MNIST: not before it is needed, as that takes a second or two, and --help shall not."""
    try:
        from torchvision.datasets import MNIST
    except RuntimeError:  # its C++ extension does not load beside a CPU build of torch; MNIST needs no operator of it
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision.datasets import MNIST
    return MNIST


class ImageSet(TensorDataset):
    """Images (uint8 [N, 1, 28, 28], given out as float32 in [0, 1]) and labels (int64 [N]), both in memory."""

    def __getitem__(self, index):
        return self.tensors[0][index] / 255, self.tensors[1][index]

    def __getitems__(self, indices):
        """A whole batch, which a DataLoader asks for in one call: [B, 1, 28, 28] and [B], each by one tensor index."""
        indices = torch.frombuffer(array("q", indices), dtype=torch.int64)  # torch.tensor(indices) takes 4 times longer
        return self.tensors[0].index_select(0, indices).float().mul_(1 / 255), self.tensors[1].index_select(0, indices)


def load_mnist(root):
    """Return the train and the test ImageSet. In a process group all ranks call this together.

    Raises SystemExit, on all ranks with one line from rank 0, if a file is damaged or the nodes have different data.
    """
    found, rank = [(None, "")], 0
    if not dist.is_initialized() or os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a node looks for all
        data, line = prepare_mnist(root)
        found = [(data, f"{data} on {os.uname().nodename}")]
    if dist.is_initialized():
        found, rank = found * dist.get_world_size(), dist.get_rank()
        dist.all_gather_object(found, found[0])
    data, *others = {data for data, _ in found if data}
    if others:
        where = ", ".join(sorted({text for _, text in found if text}))
        line = f"the nodes have different data ({where}): put MNIST into {root} on all of them"
    if others or data == "a damaged MNIST":
        if dist.is_initialized():  # or the process aborts at its end
            dist.destroy_process_group()
        raise SystemExit(f"error: {line}" if rank == 0 else 1)
    if rank == 0 and line:
        print(line, flush=True)
    if data == "MNIST":
        parts = [torchvision_mnist()(root, train) for train in (True, False)]
        return [ImageSet(part.data.unsqueeze(1), part.targets) for part in parts]
    rows = torch.from_file(str(DIGITS), size=1797 * 65, dtype=torch.uint8).view(1797, 65)
    images = F.interpolate(rows[:, :64].view(-1, 1, 8, 8) * (255 / 16), size=24, mode="bilinear").round().byte()
    images, labels = F.pad(images, (4, 4, 4, 4)), rows[:, 64].long()
    shifted = [images[:1438, :, y : y + 28, x : x + 28] for y in (0, 2, 4) for x in (0, 2, 4)]
    return ImageSet(torch.cat(shifted), labels[:1438].repeat(9)), ImageSet(images[1438:, :, 2:30, 2:30], labels[1438:])


def prepare_mnist(root):
    """Make sure that MNIST is in root. Returns what there is to load and, if it is not MNIST, a line that says why."""
    if root.resolve() == DIGITS.parent:
        return "the bundled digits", ""
    raw = root / "MNIST" / "raw"
    try:
        if not all((raw / name).is_file() for name in CRC32):
            download_mnist(root, raw)
    except Exception as error:
        host, names = torchvision_mnist().mirrors[0], ", ".join(CRC32)
        line = f"MNIST is not in {root} and cannot be downloaded from {host} ({error!r}): training on the 1,797 bundled"
        return "the bundled digits", f"{line} digits instead. For MNIST, put its four files ({names}) into {raw}."
    for name, crc32 in CRC32.items():
        if zlib.crc32((raw / name).read_bytes()) != crc32:
            return "a damaged MNIST", f"{raw / name} is damaged: delete it and start again, or copy it anew"
    return "MNIST", ""


def download_mnist(root, raw):
    """Put whole files into place, in one process of a node while the others wait. Raises what stopped the download."""
    lock_name = f"{tempfile.gettempdir()}/mnist-{os.getuid()}-{zlib.crc32(bytes(raw.resolve()))}.lock"
    with open(lock_name, "w") as lock, ThreadPool(2) as pool:  # threads, as no time limit holds for the name lookup
        fcntl.flock(lock, fcntl.LOCK_EX)
        if all((raw / name).is_file() for name in CRC32):
            return
        MNIST = torchvision_mnist()
        pool.apply_async(urlopen, [MNIST.mirrors[0] + MNIST.resources[0][0]], {"timeout": 5}).get(8)  # seconds
        raw.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:  # a killed one leaves no half file
            pool.apply_async(MNIST, [folder], {"download": True}).get(240)
            for name in CRC32:
                os.replace(Path(folder, "MNIST", "raw", name), raw / name)
