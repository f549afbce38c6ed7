"""06's language model computes on any ranks what one process does, and resumes."""

import copy
import re

import pytest
import torch
from helpers import (
    SEED,
    Running,
    copy_project,
    distance,
    edit,
    equal,
    load,
    module,
    order_of,
    torchrun,
    train,
    wait_for,
)
from torch.nn.functional import cross_entropy

OPTIONS = ["--text=text", "--context=8", "--save-every=1", "--epochs=2", "--lr=0.05"]
OPTIONS += ["--seed", SEED]


@pytest.fixture
def script(tmp_path):
    """In float64, with 37 sequences for training, of which the last has 3 tokens."""
    project = copy_project(tmp_path / "a project", "06_checkpointing/language_model.py")
    script = project / "language_model.py"
    edit(script, "as dist\n", "as dist\ntorch.set_default_dtype(torch.float64)\n")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        content = bytes(n * n % 251 for n in range(324))
        (tmp_path / name / "text").write_bytes(content)
    return script


def train_alone(script):
    """Train in one process with twelve sequences per step; returns what it prints."""
    text = torch.tensor([n * n % 251 for n in range(324)])
    parts = [
        [(part[n : n + 8], part[n + 1 : n + 9]) for n in range(0, len(part) - 1, 8)]
        for part in (text[:291], text[291:])
    ]
    torch.manual_seed(SEED)
    model = module(script).LanguageModel(8)
    optimizer = torch.optim.AdamW(model.parameters())
    average, perplexities = None, []

    def losses(model, sequences):
        """Of all their tokens. What follows the end has no influence."""
        found = []
        for tokens, labels in sequences:
            tokens = torch.nn.functional.pad(tokens, (0, 8 - len(tokens)))
            logits = model(tokens[None])[0, : len(labels)]
            found.append(cross_entropy(logits, labels, reduction="none"))
        return torch.cat(found)

    for epoch in range(2):
        order = order_of(epoch + 1, 37, 1)
        for first in range(0, 37, 12):
            step = [parts[0][n] for n in order[first : first + 12]]
            optimizer.zero_grad()
            losses(model, step).mean().backward()
            fraction = (epoch + (first + first + len(step)) / 2 / 37) / 2
            factor = min(fraction / 0.4, (1 - fraction) / 0.6)
            optimizer.param_groups[0]["lr"] = 0.05 * (12 / 256) ** 0.5 * factor
            optimizer.step()
            average = average or copy.deepcopy(model)
            for mean, weight in zip(
                average.parameters(), model.parameters(), strict=True
            ):
                mean.data = 0.98 * mean.data + 0.02 * weight.data
        perplexity = losses(average, parts[1]).mean().exp().item()
        perplexities.append(f"{perplexity:.4f}")
    return perplexities, average.state_dict()


def printed(*results):
    """The lines of all saves and epochs, without the time."""
    output = "".join(result.output for result in results)
    return re.findall(r"^epoch .*?(?=  \d+\.\d s|$)", output, re.M)


def kill_in_second_epoch(script, ranks, *options, cwd):
    """Start, and kill all processes after a save."""
    running = Running(torchrun(script, ranks, *OPTIONS, *options), cwd)
    wait_for("epoch 2/2  32%", running)
    running.kill_all()


def test_the_mean_over_all_tokens(script, tmp_path, float64):
    """Of a step, and of the evaluation; also if a run goes on with other ranks."""
    perplexities, weights = train_alone(script)
    one, other = tmp_path / "one", tmp_path / "other"
    whole = train(script, 1, *OPTIONS, "--batch-size=12", cwd=one)
    assert re.findall(r"perplexity (\S+)", whole.output) == perplexities
    options = ["--accumulate=2", "--batch-size"]
    kill_in_second_epoch(script, 2, *options, 3, cwd=other)
    resumed = printed(train(script, 3, *OPTIONS, *options, 2, cwd=other))
    assert resumed == printed(whole)[-len(resumed) :]
    for folder in (one, other):
        assert distance(weights, load(folder / "model.pt")) < 1e-9


def test_a_killed_run_resumes_bit_for_bit(script, tmp_path):
    """With dropout, accumulation and workers. Other texts are rejected."""
    edit(script, "dropout=0", "dropout=0.1")
    one, other = tmp_path / "one", tmp_path / "other"
    options = ["--accumulate=2", "--batch-size=3", "--workers=1", "--amp"]
    kill_in_second_epoch(script, 2, *options, cwd=one)
    for folder in (one, other):
        train(script, 2, *OPTIONS, *options, cwd=folder)
    for name in ("model.pt", "checkpoint.pt"):
        assert equal(one / name, other / name)
    for content, error in (("other" * 65, "has {'text': "), ("short", "text is too")):
        (one / "text").write_text(content)
        assert error in train(script, 1, *OPTIONS, cwd=one, code=1).errors
