"""04 adapted to a contrastive model of two encoders: the batch of all ranks is one batch."""

import re

import pytest
import torch
from helpers.checks import check_warnings, equal, rate_factor
from helpers.paths import ROOT
from helpers.projects import apply, copy_project, edit
from helpers.ranks import run_ranks
from helpers.scripts import load_script

PAIRS = {"train": 84, "test": 41}  # to train: two batches of 32 and one of 20


@pytest.fixture
def project(tmp_path):
    """A copy of 04 with the patch, and pairs: an image is the sum of patterns, one per token."""
    project = copy_project(tmp_path / "project", ROOT / "04_ddp_torchrun/train.py")
    apply(project, "04_contrastive.patch")
    random = torch.Generator().manual_seed(0)
    patterns = torch.randn(40, 1, 28, 28, generator=random)
    patterns[0] = 0  # of the padding
    for name, number in PAIRS.items():
        tokens = torch.randint(1, 40, (number, 5), generator=random)
        tokens[torch.arange(5) >= torch.randint(2, 6, (number, 1), generator=random)] = 0
        images = patterns[tokens].sum(1) + torch.randn(number, 1, 28, 28, generator=random)
        torch.save({"images": images, "tokens": tokens}, project / f"{name}.pt")
    return project


def train(project, nproc, epochs, batch_size, *options):
    """The losses and scores of the epochs, as printed."""
    options = ["--data-dir", ".", "--epochs", epochs, "--batch-size", batch_size, *options]
    result = run_ranks("train.py", nproc, *options, cwd=project)
    assert result.code == 0, result
    check_warnings(result, project)
    line = r"^epoch .* loss (\S+)  recall@1 (\S+)  \S+ s  \d+ pairs/s$"
    lines = re.findall(line, result.output, re.M)
    assert len(lines) == epochs, result
    return zip(*lines, strict=True)


def alone(project, peak):
    """Train two epochs in this process, each batch in one piece; the weights and the losses."""
    pairs = torch.load(project / "train.pt")
    torch.manual_seed(0)
    net = load_script(project / "train.py").TwoEncoders().double()
    losses, step, steps = [], 0, 6
    for epoch in (1, 2):
        losses.append(0)
        order = torch.randperm(84, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(32):
            images, texts, scale = net(pairs["images"][rows].double(), pairs["tokens"][rows])
            scores = scale * images @ texts.T
            loss = -(scores.log_softmax(0) + scores.log_softmax(1)).diag().mean() / 2
            factor = rate_factor(step, steps)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.data -= factor * peak * gradient
            losses[-1] += loss.item() * len(rows) / 84
            step += 1
    return net.state_dict(), losses


def test_two_ranks_take_the_steps_of_one_with_the_whole_batch(project):
    """The gradients are neither clipped nor given to AdamW: both would hide a wrong factor."""
    edit(project, "train.py",
         ("MAX_GRAD_NORM = 1.0", "MAX_GRAD_NORM = 1e9"), ("torch.optim.AdamW(", "torch.optim.SGD("),
         ("net = TwoEncoders()", "net = TwoEncoders().double()"),
         ('"images": image,', '"images": image.double(),'))
    losses, _ = train(project, 2, 2, 16, "--lr", 2 * (256 / 32) ** 0.5)
    expected, expected_losses = alone(project, peak=2)
    weights = torch.load(project / "last.pt")
    assert weights.keys() == expected.keys() and "log_scale" in weights
    for name in weights:
        assert (weights[name] - expected[name]).abs().max() < 1e-12, name
    assert losses == tuple(f"{loss:.4f}" for loss in expected_losses)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_the_recall_is_that_of_the_saved_weights_on_any_number_of_ranks(project, nproc):
    save = "torch.save(net.state_dict(), f'rank-{rank}.pt')"
    edit(project, "train.py", ("    # 6. Save\n", f"    # 6. Save\n    {save}\n"))
    losses, scores = train(project, nproc, 3, 8, "--lr", 0.005)
    assert float(losses[0]) > float(losses[1]) > float(losses[2])
    assert all(equal(project / f"rank-{rank}.pt", project / "last.pt") for rank in range(nproc))
    net = load_script(project / "train.py").TwoEncoders()
    initial = net.log_scale.item()
    net.load_state_dict(torch.load(project / "last.pt"))
    assert abs(net.log_scale.item() - initial) > 1e-5
    pairs = torch.load(project / "test.pt")
    right, pairs = 0, list(zip(pairs["images"], pairs["tokens"], strict=True))
    with torch.no_grad():  # pair by pair, without the padding
        pairs = [net(image[None], tokens[tokens > 0][None]) for image, tokens in pairs]
    for number, (image, _, _) in enumerate(pairs):
        similarities = [(image * text).sum().item() for _, text, _ in pairs]
        right += similarities.index(max(similarities)) == number
    assert scores[-1] == f"{right / 41:.4f}"
    assert right > 4  # of 41: it has learned something


def test_the_line_of_04_ends_at_a_dictionary(project):
    new = "batch = {name: part.to(device, non_blocking=True) for name, part in batch.items()}"
    old = "images, labels = [part.to(device, non_blocking=True) for part in batch]"
    assert old in (ROOT / "04_ddp_torchrun/train.py").read_text()
    edit(project, "train.py", (new, old))
    result = run_ranks("train.py", 1, "--data-dir", ".", cwd=project)
    assert result.code != 0 and "AttributeError: 'str' object has no" in result.errors, result
