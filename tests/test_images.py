"""06's image_folder.py: exact, and resumed in mid-epoch."""

import math
import os
import re
import shutil

import pytest
import torch
from helpers import (
    ROOT,
    SEED,
    distance,
    each_row,
    equal,
    lines,
    load,
    module,
    order_of,
    train,
)
from PIL import Image
from torch import nn

from common.model import warmup_then_decay

SCRIPT = ROOT / "06_checkpointing/image_folder.py"
# torchvision may be for another torch
WITH_TORCHVISION = {"PYTHONPATH": ROOT / "tests/small"}
OPTIONS = ["--data-dir=images", "--workers=0", "--save-every=1"]


class GroupNorm(nn.GroupNorm):
    """As tests/faults.py has it."""

    def __init__(self, channels):
        super().__init__(4, channels)


def write_images(folder, pixels, classes):
    """Write images, bytes, as train/CLASS/NUMBER.png, and the same ones as val."""
    for number, image in enumerate(pixels):
        path = folder / f"images/train/{number % classes}/{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = math.isqrt(len(image) // 3)
        Image.frombytes("RGB", (size, size), image).save(path)
    (folder / "images/val").symlink_to("train")


def train_alone(model, images, labels, ranks):
    """Two epochs with 24 images per step; returns what is printed."""
    head = [*model.fc.parameters()]
    rest = [*model.parameters()][:-2]
    optimizer = torch.optim.AdamW([{"params": head}, {"params": rest}])
    printed, length = [], len(images)
    for epoch in range(2):
        order = torch.tensor(order_of(epoch + 1, length, ranks))
        for done in range(0, length, 24):
            end = min(done + 24, length)
            fraction = (epoch + (done + end) / 2 / length) / 2
            peak = 1e-3 * (24 / 256) ** 0.5 * warmup_then_decay(fraction)
            for group, rate in zip(
                optimizer.param_groups, (peak, peak / 10), strict=True
            ):
                group["lr"] = rate
            step = order[done : done + 24]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(images[step]), labels[step], label_smoothing=0.1
            )
            loss.backward()
            optimizer.step()
            printed.append(f"{loss:.4f}")
        right = model(images).argmax(1) == labels
        printed.append(f"{right.double().mean():.4f}")
    return printed


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_compute_what_one_does(ranks, tmp_path, float64, monkeypatch):
    """On images of one colour, which no crop or flip changes, with new classes."""
    monkeypatch.setattr(nn, "BatchNorm2d", GroupNorm)
    colours = torch.randint(256, (41, 3), dtype=torch.uint8)
    write_images(tmp_path, [bytes(colour) * 64 for colour in colours.tolist()], 3)
    module(ROOT / "tests/small/sitecustomize.py")
    from torchvision.models import ResNet18_Weights, resnet18

    # as ImageFolder sorts them: by class, then by number
    order = torch.tensor(sorted(range(41), key=lambda n: (n % 3, n)))
    preset = ResNet18_Weights.DEFAULT.transforms()
    mean, std = torch.tensor([preset.mean, preset.std]).view(2, 3, 1, 1)
    images = colours[order].view(-1, 3, 1, 1).expand(-1, -1, 8, 8) / 255
    images = (images - mean) / std
    torch.manual_seed(SEED)
    head, model = resnet18(num_classes=3).fc, resnet18()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model.fc = head
    options = ["--size=8", "--weights=weights.pt", "--epochs=2", f"--seed={SEED}"]
    options += [*OPTIONS, f"--batch-size={24 // ranks}"]
    faults = "float64 float64_images group_norm"
    given = {"cwd": tmp_path, "fault": faults, **WITH_TORCHVISION}
    output = train(SCRIPT, ranks, *options, **given).output
    printed = re.findall(r"(?:loss|accuracy) (\S+)", output)
    assert printed == train_alone(model, images, order % 3, ranks)
    assert distance(tmp_path / "resnet18.pt", model.state_dict()) < 1e-9


def noise(bytes_per_pixel=3):
    return [os.urandom(32 * 32 * bytes_per_pixel) for _ in range(24)]


def test_resumed_bit_for_bit(tmp_path):
    """Killed in mid-epoch, with random crops and BatchNorm; and on other ranks.

    Other classes, or another number of images, are an error.
    """
    write_images(tmp_path, noise(), 2)
    options = ["--size=32", "--epochs=2", "--batch-size=4", *OPTIONS]
    given = {"cwd": tmp_path, **WITH_TORCHVISION}
    whole = train(SCRIPT, 2, *options, "--checkpoint=whole", "--output=a.pt", **given)
    kill = "signal_after:torch.optim.AdamW.step:5:9:1"
    first = train(SCRIPT, 2, *options, fault=kill, code=1, **given)
    shutil.copy(tmp_path / "checkpoint.pt", tmp_path / "other.pt")
    rest = train(SCRIPT, 2, *options, **given)
    assert "starting at {'epoch': 2, 'done': 8} on 2 ranks, cpu\n" in rest.output, rest
    assert lines(first, rest) == lines(whole)
    assert equal(tmp_path / "checkpoint.pt", tmp_path / "whole")
    assert equal(tmp_path / "resnet18.pt", tmp_path / "a.pt")
    saved = load(tmp_path / "checkpoint.pt")
    assert [group["lr"] for group in saved["optimizer"]["param_groups"]] != [0, 0]
    more = [*options, "--checkpoint=other.pt", "--output=b.pt"]
    other = train(SCRIPT, 3, *more, **given)
    assert "'done': 8} on 3 ranks" in other.output and "epoch 2/2  100%" in other.output
    (tmp_path / "images/train/1/001.png").unlink()
    failed = train(SCRIPT, 1, *more, code=1, **given)
    assert "'length': 24" in failed.errors and "'length': 23" in failed.errors, failed


# the mode of an image | val has | error
WRONG = """
RGB | another class | ValueError: train has the classes ['0', '1'], val ['0', 'x']
I;16 | the same | ValueError: images/train/1/003.png has more than 8 bits per channel
"""


@each_row(WRONG)
def test_wrong_images_are_an_error(row, tmp_path):
    mode, val, error = row
    write_images(tmp_path, noise(), 2)
    if mode != "RGB":
        image = Image.frombytes(mode, (32, 32), os.urandom(32 * 32 * 2))
        image.save(tmp_path / "images/train/1/003.png")
    if val == "another class":
        (tmp_path / "images/val").unlink()
        shutil.copytree(tmp_path / "images/train", tmp_path / "images/val")
        (tmp_path / "images/val/1").rename(tmp_path / "images/val/x")
    failed = train(SCRIPT, 1, *OPTIONS, cwd=tmp_path, code=1, **WITH_TORCHVISION)
    assert error in failed.errors, failed
    assert not [*tmp_path.glob("*.pt")]
