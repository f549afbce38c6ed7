"""Replaces common/data.py: few images, and events.

READ="1 57 15": the process of rank 1 gets signal 15 when it reads its 57th image, but
not after Slurm has requeued the job. Signal 0 is an error. A file `slow` has the
seconds that each image takes. AUGMENT=1: float32, and each image gets random noise.
"""

import contextlib
import os
import time

import torch
from torch.utils.data import TensorDataset

if "AUGMENT" not in os.environ:
    torch.set_default_dtype(torch.float64)  # rounding is far from any mistake
    torch.Tensor.float = torch.Tensor.double
TRAIN, TEST = int(os.environ.get("TRAIN_IMAGES", 181)), 47  # no multiples of 2 or 3


class Images(TensorDataset):
    """What TensorDataset is, and an event at one of its images."""

    read = 0  # by this process

    def __getitem__(self, index):
        Images.read += 1
        place, number = os.environ.get("READ", " 0").rsplit(" ", 1)
        here = f"{os.environ.get('RANK')} {Images.read}"
        if place == here and "SLURM_RESTART_COUNT" not in os.environ:
            if number == "0":
                raise OSError("this image cannot be read")
            os.kill(os.getpid(), int(number))
        with contextlib.suppress(FileNotFoundError), open("slow") as file:
            time.sleep(float(file.read() or 0))  # empty: it is being written
        image, label = super().__getitem__(index)
        if "AUGMENT" in os.environ:
            image = image + torch.rand_like(image)
        return image, label


def load_mnist(folder=None, download=True):
    """Return the training and the test set: a pattern per class, and noise."""
    numbers = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 4, 4, generator=numbers).repeat_interleave(7, 2)
    labels = torch.randint(10, (TRAIN + TEST,), generator=numbers)
    noise = torch.randn(TRAIN + TEST, 1, 28, 28, generator=numbers)
    images = patterns.repeat_interleave(7, 3)[labels] + noise / 2
    # with different contrast, so that BatchNorm's statistics differ between the ranks
    images *= torch.randn(TRAIN + TEST, 1, 1, 1, generator=numbers).exp()
    train_set = Images(images[:TRAIN], labels[:TRAIN])
    return train_set, Images(images[TRAIN:], labels[TRAIN:])
