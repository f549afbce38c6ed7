"""huggingface.py exports what one process computes, without FSDP and a network."""

import re
import shutil
import sys

import pytest
import torch
from helpers import (
    COPIES,
    ROOT,
    Running,
    copy_project,
    each_row,
    order_of,
    run,
    torchrun,
    train,
    wait_for,
)
from torch import nn

# transformers imports torchvision if it is there, and it may be for another torch
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "torchvision", None)
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedTokenizerFast,
    )

HIDE = "import sys\nsys.modules['torchvision'] = None"
SCRIPT = ROOT / "05_model_parallel/huggingface.py"
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
KINDS = {"llama": "llama", "tied": "llama", "gemma": "gemma3_text"}
TEXT = "".join(map(chr, range(32, 123))) * 2  # twelve sequences; the last is shorter
OPTIONS = ["--text=text.txt", "--length=16", "--epochs=2", "--lr=0.001"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Has models with random weights, and a token for each character."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    (tmp_path / "text.txt").write_text(TEXT)
    characters = Tokenizer(models.BPE({chr(n): n for n in range(128)}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
    for name, kind in KINDS.items():
        config = AutoConfig.for_model(kind, vocab_size=128, **SIZES)
        config.tie_word_embeddings = name != "llama"
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def contents(folder):
    return (folder / "model.safetensors").read_bytes()


def losses_of(result):
    return re.findall(r"  loss (\S+)", result.output)


def train_alone(folder):
    """In one process; returns the loss of each step, and the logits of the text."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])
    rows, losses = tokens.split(16), []
    optimizer = torch.optim.AdamW(model.parameters())
    order = order_of(1, 12, 1, seed=0) + order_of(2, 12, 1, seed=0)
    # at 1/8, 3/8, ... of the run; the peak is at 2/5
    for factor in (0.3125, 0.9375, 0.625, 0.625 / 3):
        step, order = order[:6], order[6:]
        logits = torch.cat([model(rows[n][None]).logits[0, :-1] for n in step])
        labels = torch.cat([rows[n][1:] for n in step])
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.param_groups[0]["lr"] = 0.001 * factor
        optimizer.step()
        losses.append(f"{loss:.4f}")
    return losses, model(tokens[None]).logits


WAYS = """
llama | 3 | --batch-size=2
tied | 2 | --accumulate=3 --recompute
gemma | 1 | --accumulate=6
"""


@each_row(WAYS)
def test_the_exported_model_is_that_of_one_process(row, folder):
    """Its logits, and the loss of each step; a tied weight is saved once."""
    name, ranks, options = row
    options = [f"--model={name}", *OPTIONS, *options.split()]
    result = train(SCRIPT, ranks, *options, cwd=folder)
    losses, expected = train_alone(folder / name)
    assert losses_of(result) == losses
    tokenizer = AutoTokenizer.from_pretrained(folder / "tuned")
    tuned = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    logits = tuned(tokenizer(TEXT, return_tensors="pt")["input_ids"]).logits
    assert (logits - expected).abs().max() < 1e-5
    assert len(contents(folder / "tuned")) == len(contents(folder / name))


@pytest.mark.slow
def test_with_checkpoints_it_resumes_bit_for_bit(folder):
    """All processes are killed after the first checkpoint."""
    project = copy_project(folder / "a project", SCRIPT)
    shutil.copy(ROOT / "07_slurm/fsdp.py", project / "checkpoints.py")
    script = project / "huggingface.py"
    run(["patch", "-F0", script, COPIES / "huggingface_resume.diff"], project)
    options = ["--model=tied", *OPTIONS, "--epochs=4", "--save-every=1"]
    running = Running(torchrun(script, 2, *options), folder)
    wait_for("  loss ", running, times=2)
    running.kill_all()
    resumed = losses_of(train(script, 2, *options, cwd=folder))
    more = ["--output=whole", "--checkpoint=other"]
    losses = losses_of(train(script, 2, *options, *more, cwd=folder))
    assert len(resumed) < 24
    assert resumed == losses[-len(resumed) :]
    assert contents(folder / "tuned") == contents(folder / "whole")


ERRORS = """
--model=no/folder | no/folder is neither a folder with a config.json
--seed=1 | llama has weights of another architecture: .*q_norm
"""


@each_row(ERRORS)
def test_what_does_not_fit_is_an_error(row, folder):
    shutil.copy(folder / "gemma/model.safetensors", folder / "llama")
    option, error = row
    failed = train(SCRIPT, 1, "--model=llama", *OPTIONS, option, cwd=folder, code=1)
    assert re.search(f"Error: {error}", failed.errors), failed
