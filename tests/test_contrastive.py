"""04 adapted to a contrastive model of two encoders: the batch of all ranks is one batch."""

import re

import pytest
import torch
from helpers.checks import check_warnings, rate_factor
from helpers.paths import ROOT
from helpers.projects import apply, copy_project, edit
from helpers.ranks import run_ranks
from helpers.scripts import load_script

OLD = "images, labels = [part.to(device, non_blocking=True) for part in batch]"
NEW = "batch = {name: part.to(device, non_blocking=True) for name, part in batch.items()}"


@pytest.fixture
def project(tmp_path):
    """A copy of 04 with the patch, and pairs: an image is the sum of patterns, one per token.

    It computes in float64, without clipping and AdamW: both would hide a wrong factor.
    """
    project = copy_project(tmp_path / "project", ROOT / "04_ddp_torchrun/train.py")
    apply(project, "04_contrastive.patch")
    random = torch.Generator().manual_seed(0)
    patterns = torch.randn(40, 1, 28, 28, generator=random)
    patterns[0] = 0  # of the padding
    for name, number in (("train", 84), ("test", 41)):  # to train: two batches of 32, one of 20
        tokens = torch.randint(1, 40, (number, 5), generator=random)
        tokens[torch.arange(5) >= torch.randint(2, 6, (number, 1), generator=random)] = 0
        images = patterns[tokens].sum(1) + torch.randn(number, 1, 28, 28, generator=random)
        torch.save({"images": images, "tokens": tokens}, project / f"{name}.pt")
    edit(project, "train.py", ("MAX_GRAD_NORM = 1.0", "MAX_GRAD_NORM = 1e9"),
         ("torch.optim.AdamW(", "torch.optim.SGD("),
         ('"images": image,', '"images": image.double(),'),
         ("net = TwoEncoders()", "net = TwoEncoders().double()"))
    return project


def alone(project, peak, epochs):
    """The weights, and the loss and recall@1 of each epoch; each batch in one piece."""
    pairs, test_pairs = [torch.load(project / f"{name}.pt") for name in ("train", "test")]
    torch.manual_seed(0)
    net = load_script(project / "train.py").TwoEncoders().double()
    lines, step, steps = [], 0, 3 * epochs
    for epoch in range(1, epochs + 1):
        total = 0
        order = torch.randperm(84, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(32):
            images, texts, scale = net(pairs["images"][rows].double(), pairs["tokens"][rows])
            scores = scale * images @ texts.T
            loss = -(scores.log_softmax(0) + scores.log_softmax(1)).diag().mean() / 2
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.data -= rate_factor(step, steps) * peak * gradient
            total += loss.item() * len(rows) / 84
            step += 1
        with torch.no_grad():  # pair by pair, without the padding
            found = [net(image[None].double(), tokens[tokens > 0][None])[:2]
                     for image, tokens in zip(*test_pairs.values(), strict=True)]
        right = [torch.stack([(image * text).sum() for _, text in found]).argmax() == number
                 for number, (image, _) in enumerate(found)]
        lines.append((f"{total:.4f}", f"{sum(right) / 41:.4f}"))
    assert sum(right) > 4 and float(lines[-1][0]) < float(lines[0][0])  # it has learned something
    return net.state_dict(), lines


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_ranks_take_the_steps_of_one_with_the_whole_batch(nproc, project):
    """And the recall is that of the saved weights, although no number divides the 41 pairs."""
    options = ["--data-dir", ".", "--epochs", 6, "--batch-size", 32 // nproc]
    result = run_ranks("train.py", nproc, *options, "--lr", 2 * (256 / 32) ** 0.5, cwd=project)
    check_warnings(result, project)
    line = r"^epoch .* loss (\S+)  recall@1 (\S+)  \S+ s  \d+ pairs/s$"
    expected, lines = alone(project, peak=2, epochs=6)
    assert re.findall(line, result.output, re.M) == lines, result
    weights = torch.load(project / "last.pt")
    assert weights.keys() == expected.keys() and "log_scale" in weights
    for name in weights:
        assert (weights[name] - expected[name]).abs().max() < 1e-12, name


def test_the_line_of_04_ends_at_a_dictionary(project):
    assert OLD in (ROOT / "04_ddp_torchrun/train.py").read_text()
    edit(project, "train.py", (NEW, OLD))
    result = run_ranks("train.py", 1, "--data-dir", ".", cwd=project, code=1)
    assert "AttributeError: 'str' object has no" in result.errors, result
