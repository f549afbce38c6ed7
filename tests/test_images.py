"""06's image_folder.py: exact, and resumed in mid-epoch."""

import os
import runpy
import shutil

import pytest
import torch
from faults import GroupNorm
from helpers import ROOT, check_close, equal, lines, load, train
from PIL import Image

SCRIPT = ROOT / "06_checkpointing/image_folder.py"


@pytest.fixture
def start(tmp_path):
    def start(ranks, *options, **given):
        options = [*options, "--epochs=2", "--save-every=1", "--size=32"]
        options += ["--data-dir=images", "--workers=0"]
        # torchvision may be for another torch
        given |= {"cwd": tmp_path, "PYTHONPATH": ROOT / "tests/small"}
        return train(SCRIPT, ranks, *options, **given)

    return start


def write_images(folder, images):
    """Write images, bytes, as train/CLASS/NUMBER.png, and the same ones as val."""
    for number, image in enumerate(images):
        path = folder / f"images/train/{number % 3}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (32, 32), image).save(path)
    (folder / "images/val").symlink_to("train")


@pytest.mark.slow
def test_three_ranks_compute_what_one_process_does(start, tmp_path):
    """On images of one colour, which no crop or flip changes; with two peak rates.

    An image of 16 bits is an error, and so are other classes for the evaluation.
    """
    write_images(tmp_path, [os.urandom(3) * 32 * 32 for _ in range(42)])
    runpy.run_path(f"{ROOT}/tests/small/sitecustomize.py")
    from torchvision.models import resnet18

    torch.save(resnet18(norm_layer=GroupNorm).state_dict(), tmp_path / "weights.pt")
    results = []
    for ranks in (1, 3):
        options = ["--weights=weights.pt", f"--batch-size={24 // ranks}"]
        options += [f"--checkpoint={ranks}", f"--output={ranks}.pt"]
        faults = "float64 float64_images group_norm"
        results.append(start(ranks, *options, fault=faults))
    assert lines(results[0]) == lines(results[1])
    check_close(tmp_path / "1.pt", tmp_path / "3.pt")
    head, rest = load(tmp_path / "1")["optimizer"]["param_groups"]
    assert head["lr"] == pytest.approx(10 * rest["lr"])
    assert len(head["params"]) == 2 and len(rest["params"]) == 60
    image = tmp_path / "images/train/1/1.png"
    Image.frombytes("I;16", (32, 32), bytes(2048)).save(image)
    failed = start(1, "--batch-size=42", code=1)
    assert "1/1.png has more than 8 bits" in failed.errors, failed
    (tmp_path / "images/val").unlink()
    shutil.copytree(tmp_path / "images/train/1", tmp_path / "images/val/x")
    failed = start(1, code=1)
    assert "train has the classes ['0', '1', '2'], val ['x']" in failed.errors


def test_resumed_bit_for_bit(start, tmp_path):
    """Killed in mid-epoch, with random crops and BatchNorm."""
    write_images(tmp_path, [os.urandom(32 * 32 * 3) for _ in range(16)])
    whole = start(2, "--batch-size=4", "--checkpoint=whole", "--output=whole.pt")
    kill = "signal_after:torch.optim.AdamW.step:4:9:1"
    first = start(2, "--batch-size=4", fault=kill, code=1)
    rest = start(2, "--batch-size=4")
    assert "starting at {'epoch': 2, 'done': 8} on 2 ranks, cpu\n" in rest.output, rest
    assert lines(first, rest) == lines(whole)
    assert equal(tmp_path / "checkpoint.pt", tmp_path / "whole")
    assert equal(tmp_path / "resnet18.pt", tmp_path / "whole.pt")
