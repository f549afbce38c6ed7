"""06's language model computes on any ranks what one process does, and resumes.

So does 07's fsdp.py with the patch for this model.
"""

import copy
import re
import shutil

import pytest
import torch
from helpers import (
    ROOT,
    SEED,
    Running,
    copy_project,
    distance,
    edit,
    equal,
    lines,
    module,
    order_of,
    patched,
    torchrun,
    train,
    wait_for,
)
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters

TEXT = bytes(n * n % 251 for n in range(255))
OPTIONS = f"--text=text --context=8 --save-every=1 --epochs=2 --lr=0.05 --seed={SEED}"
OPTIONS = OPTIONS.split()


@pytest.fixture
def script(tmp_path):
    """In float64, with 29 sequences for training, of which the last has 4 tokens."""
    project = copy_project(tmp_path / "a project", "06_checkpointing/language_model.py")
    script = project / "language_model.py"
    edit(script, "as dist\n", "as dist\ntorch.set_default_dtype(torch.float64)\n")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_bytes(TEXT)
    return script


def train_alone(script, decay=0.98):
    """Train in one process, with 12 sequences per step; returns what is compared."""
    text = torch.tensor([*TEXT])
    train_set, test_set = [
        [(part[n : n + 8], part[n + 1 : n + 9]) for n in range(0, len(part) - 1, 8)]
        for part in (text[:229], text[229:])
    ]
    torch.manual_seed(SEED)
    model = module(script).LanguageModel(8)
    optimizer = torch.optim.AdamW(model.parameters())
    averaged, average, perplexities = copy.deepcopy(model), None, []

    def mean_loss(model, sequences):
        """Over all tokens. What is after the end of a sequence has no influence."""
        losses = []
        for tokens, labels in sequences:
            tokens = pad(tokens, (0, 8 - len(tokens)))
            logits = model(tokens[None])[0, : len(labels)]
            losses.append(cross_entropy(logits, labels, reduction="none"))
        return torch.cat(losses).mean()

    for epoch in range(2):
        order = order_of(epoch + 1, 29, 1)
        for first, end in ((0, 12), (12, 24), (24, 29)):
            optimizer.zero_grad()
            mean_loss(model, [train_set[n] for n in order[first:end]]).backward()
            fraction = (epoch + (first + end) / 2 / 29) / 2
            factor = min(fraction / 0.4, (1 - fraction) / 0.6)
            optimizer.param_groups[0]["lr"] = 0.05 * (12 / 256) ** 0.5 * factor
            optimizer.step()
            weights = parameters_to_vector(model.parameters()).detach()
            average = weights if average is None else average.lerp(weights, 1 - decay)
        vector_to_parameters(average, averaged.parameters())
        perplexities.append(f"{mean_loss(averaged, test_set).exp():.4f}")
    return perplexities, dict(averaged.state_dict())


def kill_in_the_second_epoch(script, *options, cwd):
    """Start on two ranks, and kill all processes after a save."""
    running = Running(torchrun(script, 2, *OPTIONS, *options), cwd, OMP_NUM_THREADS=1)
    wait_for("epoch 2/2  41%", running)
    running.kill_all()


def test_the_mean_over_all_tokens(script, tmp_path, float64):
    """Of a step, and of the evaluation; even if the number of ranks changes."""
    perplexities, weights = train_alone(script)
    one, other = tmp_path / "one", tmp_path / "other"
    whole = train(script, 1, *OPTIONS, "--batch-size=12", cwd=one)
    assert re.findall(r"perplexity (\S+)", whole.output) == perplexities
    options = ["--accumulate=2", "--batch-size"]
    kill_in_the_second_epoch(script, *options, 3, cwd=other)
    resumed = lines(train(script, 3, *OPTIONS, *options, 2, cwd=other))
    assert resumed == lines(whole)[-len(resumed) :]
    for folder in (one, other):
        assert distance(weights, folder / "model.pt") < 1e-9


def test_a_killed_run_resumes_bit_for_bit(script, tmp_path):
    """With dropout, accumulation and workers. Other texts are rejected."""
    edit(script, "dropout=0", "dropout=0.1")
    one, other = tmp_path / "one", tmp_path / "other"
    options = ["--accumulate=2", "--batch-size=3", "--workers=1", "--amp"]
    kill_in_the_second_epoch(script, *options, cwd=one)
    for folder in (one, other):
        train(script, 2, *OPTIONS, *options, cwd=folder)
    for name in ("model.pt", "checkpoint.pt"):
        assert equal(one / name, other / name)
    for content, error in (("other" * 51, "has {'text': "), ("short", "text is too")):
        (one / "text").write_text(content)
        assert error in train(script, 1, *OPTIONS, cwd=one, code=1).errors


def test_fsdp_does_the_same(tmp_path, float64):
    """Without clipping; killed on two ranks, and resumed on three."""
    project = patched(tmp_path, "07_slurm/fsdp.py", "fsdp_language_model.diff")
    shutil.copy(ROOT / "06_checkpointing/language_model.py", project)
    perplexities, weights = train_alone(project / "language_model.py", decay=0)
    script = project / "fsdp.py"
    double = "torch.set_default_dtype(torch.float64)"
    double = f"{double}\ntorch.Tensor.float = torch.Tensor.double\n"
    edit(script, "as dist\n", f"as dist\n{double}")
    edit(script, "model.parameters(), 1.0", "model.parameters(), torch.inf")
    (tmp_path / "text").write_bytes(TEXT)
    options = ["--width=128", "--depth=2", "--recompute", "--accumulate=2"]
    kill_in_the_second_epoch(script, *options, "--batch-size=3", cwd=tmp_path)
    whole = train(script, 3, *OPTIONS, *options, "--batch-size=2", cwd=tmp_path)
    assert re.findall(r"perplexity (\S+)", whole.output) == perplexities[1:]
    assert distance(weights, tmp_path / "model.pt") < 1e-9
