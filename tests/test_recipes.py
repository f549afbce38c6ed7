"""The recipes of 04 compute on several processes what one does with all images."""

import re
import shutil

import torch
from helpers import (
    ROOT,
    SEED,
    copy_project,
    distance,
    equal,
    kill_after_a_save,
    module,
    order_of,
    patched,
    run,
    torchrun,
    train,
)
from torch import nn

from common.model import warmup_then_decay

WITH_TORCHVISION = {"PYTHONPATH": ROOT / "tests/small"}
# float64, and a ResNet that normalises each image by itself: a batch may be split
SETTINGS = """
torch.set_default_dtype(torch.float64)


class GroupNorm(nn.GroupNorm):
    def __init__(self, channels):
        super().__init__(4, channels)


nn.BatchNorm2d = GroupNorm
"""


def train_alone(groups, ranks, compute, train_set, test_set):
    """Train in one process; returns the loss and the score of each epoch.

    compute: from the tensors of samples, their loss and which are right.
    """
    optimizer = torch.optim.AdamW(groups)
    lines, length = [], len(train_set[0])
    for epoch in range(2):
        steps = torch.tensor(order_of(epoch + 1, length, ranks)).split(24)
        total = 0
        for number, step in enumerate(steps):
            factor = warmup_then_decay((epoch + (number + 0.5) / len(steps)) / 2)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor * (24 / 256) ** 0.5
            optimizer.zero_grad()
            loss, _ = compute(*[each[step] for each in train_set])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(step)
        mean, (_, right) = total / sum(map(len, steps)), compute(*test_set)
        lines.append((f"{mean:.4f}", f"{right.double().mean():.4f}"))
    return lines


def printed(script, ranks, options="", **environment):
    """The losses and the scores of two epochs with 24 images per step."""
    options += f" --epochs 2 --batch-size {24 // ranks} --seed {SEED}"
    result = train(script, ranks, *options.split(), cwd=script.parent, **environment)
    return re.findall(r"loss (\S+)  (?:accuracy|recall@1) (\S+)", result.output)


def test_contrastive_computes_what_one_process_does(tmp_path, float64):
    """Its loss is that of one matrix of all pairs of a step."""
    path = "04_ddp_torchrun/contrastive.py"
    project = copy_project(tmp_path / "a project", path, small="data")
    lines = printed(project / "contrastive.py", ranks=3)
    train_set, test_set = module(project / "common/data.py").load_mnist()
    torch.manual_seed(SEED)
    model = module(ROOT / path).TwoEncoders()

    def compute(images, _):
        left, right = model(images).unbind(1)
        matrix, own = left @ right.T, torch.arange(len(images))
        losses = [nn.functional.cross_entropy(each, own) for each in (matrix, matrix.T)]
        return sum(losses) / 2, matrix.argmax(1) == own

    groups = [{"params": [*model.parameters()], "peak": 0.003}]
    data = train_set.tensors, test_set.tensors
    assert train_alone(groups, 3, compute, *data) == lines
    assert distance(project / "contrastive.pt", model.state_dict()) < 1e-9


def test_image_folder_computes_what_one_process_does(tmp_path, float64, monkeypatch):
    """On images of one colour, which no crop or flip changes, with new classes."""
    project = copy_project(tmp_path / "a project", "04_ddp_torchrun/image_folder.py")
    with (project / "common/model.py").open("a") as file:
        file.write(SETTINGS)
    monkeypatch.setattr(nn, "BatchNorm2d", None)  # undo them when the test ends
    for path in (project / "common/model.py", ROOT / "tests/small/sitecustomize.py"):
        module(path)
    from torchvision.models import ResNet18_Weights, resnet18
    from torchvision.utils import save_image

    labels = torch.arange(41) // 14
    colours = torch.randint(256, (41, 3, 1, 1)).expand(-1, -1, 8, 8) / 255
    for number, label in enumerate(labels):
        path = project / f"train/{label}/{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_image(colours[number], path)
    (project / "val").symlink_to("train")
    torch.manual_seed(SEED)
    head, model = resnet18(num_classes=3).fc, resnet18()
    torch.save(model.state_dict(), project / "weights.pt")
    model.fc = head
    script = project / "image_folder.py"
    options = "--data-dir . --size 8 --weights weights.pt"
    lines = printed(script, 2, options, **WITH_TORCHVISION)
    of_imagenet = ResNet18_Weights.DEFAULT.transforms()
    mean, std = torch.tensor([of_imagenet.mean, of_imagenet.std]).view(2, 3, 1, 1)
    images = (colours - mean) / std

    def compute(images, labels):
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        return loss, logits.argmax(1) == labels

    groups = [
        {"params": [*model.parameters()][:-2], "peak": 1e-4},
        {"params": [*head.parameters()], "peak": 1e-3},
    ]
    assert train_alone(groups, 2, compute, *[(images, labels)] * 2) == lines
    assert distance(project / "resnet18.pt", model.state_dict()) < 1e-9


def test_image_folder_resumes_bit_for_bit(tmp_path):
    """With random crops and BatchNorm; all processes are killed after an epoch.

    Another class in val is an error.
    """
    path, patch = "04_ddp_torchrun/image_folder.py", "image_folder_resume.diff"
    project = patched(tmp_path, path, patch)
    script = project / "image_folder.py"
    module(ROOT / "tests/small/sitecustomize.py")
    from torchvision.utils import save_image

    for number in range(24):
        path = project / f"data/train/{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_image(torch.rand(3, 32, 32), path)
    (project / "data/val").symlink_to("train")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = "--size 32 --epochs 2 --batch-size 4 --workers 0 --data-dir".split()
    start = torchrun(script, 2, *options, project / "data")
    kill_after_a_save(start, killed / "checkpoint.pt", **WITH_TORCHVISION)
    for folder in (killed, whole):
        result = run(start, folder, OMP_NUM_THREADS=1, **WITH_TORCHVISION)
        assert ("starting at epoch 1 on" in result.output) == (folder == whole), result
    assert "epoch 2/2" in result.output, result
    assert equal(killed / "checkpoint.pt", whole / "checkpoint.pt")
    (project / "data/val").unlink()
    (project / "data/val/x").mkdir(parents=True)
    shutil.copy(path, project / "data/val/x")
    start = torchrun(script, 1, *options, project / "data")
    result = run(start, killed, **WITH_TORCHVISION)
    assert result.code == 1 and "['0', '1'], val ['x']" in result.errors, result
