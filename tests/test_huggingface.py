"""05's huggingface.py: exact, resumed after kills and stops, and for an own model."""

import re
import shutil
import sys

import pytest
import torch
from helpers import (
    ROOT,
    copy_project,
    each_row,
    edit,
    load,
    module,
    order_of,
    run,
    train,
)
from torch import nn

# transformers imports torchvision if it is there, and it may be for another torch
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "torchvision", None)
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, processors
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedTokenizerFast,
    )

HIDE = "import sys\nsys.modules['torchvision'] = None\n"
SCRIPT = ROOT / "05_model_parallel/huggingface.py"
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
# gemma's rows begin with a token of their own
KINDS = {"llama": "llama", "tied": "llama", "gemma": "gemma3_text", "moe": "mixtral"}
TEXT = "".join(map(chr, range(32, 123))) * 2  # 182 characters
OPTIONS = ["--text=text.txt", "--length=16", "--epochs=2", "--lr=0.001"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Has models with random weights, and a token for each character."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    (tmp_path / "text.txt").write_text(TEXT)
    characters = Tokenizer(models.BPE({chr(n): n for n in range(128)}, []))
    for name, kind in KINDS.items():
        config = AutoConfig.for_model(kind, vocab_size=128, **SIZES)
        config.tie_word_embeddings = name != "llama"
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        if name == "gemma":
            characters.post_processor = processors.TemplateProcessing(
                single="\1 $A", special_tokens=[("\1", 1)]
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def contents(folder):
    return (folder / "model.safetensors").read_bytes()


STEPS = re.compile(r"^epoch .*loss \S+", re.M)


def losses_of(result):
    return re.findall(r"loss (\S+)", result.output)


def train_alone(model, tokens, first):
    """In one process, with six rows per step; returns the losses that are printed."""
    size = 16 - len(first)
    rows = [torch.cat([first, part]) for part in tokens.split(size)]
    length = (len(tokens) // size) * 9 // 10
    optimizer, losses = torch.optim.AdamW(model.parameters()), []

    def loss_of(numbers):
        parts = []
        for number in numbers:
            row = rows[number]
            if len(row) > 1:
                logits = model(row[None])
                logits = getattr(logits, "logits", logits)[0, :-1]
                parts.append(
                    nn.functional.cross_entropy(logits, row[1:], reduction="none")
                )
        return torch.cat(parts).mean()

    for epoch in range(2):
        model.train()
        order = order_of(epoch + 1, length, 1, seed=0)
        for done in range(0, length, 6):
            loss = loss_of(order[done : done + 6])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            end = min(done + 6, length)
            fraction = (epoch + (done + end) / 2 / length) / 2
            factor = min(fraction / 0.4, (1 - fraction) / 0.6)
            optimizer.param_groups[0]["lr"] = 0.001 * factor
            optimizer.step()
            losses.append(f"{loss:.4f}")
        model.eval()
        with torch.no_grad():
            losses.append(f"{loss_of(range(length, len(rows))):.4f}")
    return losses


WAYS = """
llama | 3 | --batch-size=2
tied | 2 | --accumulate=3 --recompute
gemma | 1 | --accumulate=6 --compile
llama | 4 | --batch-size=1 --shards=2 --accumulate=2 --scratch
"""


@each_row(WAYS)
def test_the_exported_model_is_that_of_one_process(row, folder):
    """Its logits, and the losses of steps and evaluations; a tied weight is saved once.

    On four ranks a step has eight rows, and nothing is compared with one process.
    """
    name, ranks, options = row
    options = [f"--model={name}", *OPTIONS, *options.split()]
    fault = "compiled_without_cpp"
    result = train(SCRIPT, ranks, *options, cwd=folder, fault=fault)
    assert f"'done': 0}} on {ranks} ranks, cpu\n" in result.output
    tuned = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    assert len(contents(folder / "tuned")) == len(contents(folder / name))
    if ranks == "4":
        return
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tuned")
    tokens = torch.tensor(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    first = tokens.new_full([int(name == "gemma")], 1)
    assert losses_of(result) == train_alone(model, tokens, first)
    logits = [each(tokens[None]).logits for each in (tuned, model)]
    assert (logits[0] - logits[1]).abs().max() < 1e-5


# a signal to a rank when this call of a function returns
STEP = "signal_after:torch.optim.AdamW.step"
INTERRUPTIONS = [
    f"{STEP}:3:9:1",
    # a resume calls it once before the first step, which makes the optimizer's state
    f"{STEP}:2:15:1",  # in the epoch's last step, so it stops in the evaluation
    f"{STEP}:2:15:1",
    "signal_after:os.fsync:2:9:1",  # in a save
    "signal_after:transformers.PreTrainedModel.save_pretrained:1:9:0",  # in the export
]


@pytest.mark.slow
def test_interrupted_and_resumed_bit_for_bit(folder):
    """What is printed is what the undisturbed run prints; 06's run.sh starts this one.

    A step has four rows, an epoch three steps.
    """
    options = ["--model=tied", *OPTIONS, "--epochs=3", "--accumulate=2"]
    settings = {"SCRIPT": SCRIPT, "NPROC": 2, "OMP_NUM_THREADS": 1}
    more = ["--output=whole", "--checkpoint=other", "--device=cpu"]
    command = ["bash", ROOT / "06_checkpointing/run.sh", *options, *more]
    whole = run(command, folder, **settings)
    assert whole.code == 0, whole
    options += ["--save-every=1"]
    results = []
    for fault in INTERRUPTIONS:
        result = train(SCRIPT, 2, *options, cwd=folder, fault=fault, code=1)
        stopped = "\nstopped: the same command resumes\n" in result.output
        assert stopped == (":15:" in fault), result
        results.append(result)
    assert "held-out" not in results[1].output, results[1]
    assert (folder / "tuned.tmp/model.safetensors").exists()
    results.append(train(SCRIPT, 2, *options, cwd=folder))
    assert "starting at {'epoch': 3, 'done': 9}" in results[-1].output, results[-1]
    # a killed run has printed steps that the next one repeats
    printed = [line for each in results for line in STEPS.findall(each.output)]
    assert [*dict.fromkeys(printed)] == STEPS.findall(whole.output)
    assert contents(folder / "tuned") == contents(folder / "whole")
    assert not (folder / "tuned.tmp").exists()


# options | error
ERRORS = """
--model=moe | ValueError: this script lacks the loss that balances the experts
--model=other | ValueError: other has weights of another architecture: .*q_norm
--length=92 | ValueError: text.txt has fewer than two rows of --length tokens
--accumulate=0 | ValueError: batch_size should be a positive integer
--output=llama | ValueError: --output llama must be a new folder
--lr=1e30 | ValueError: the weight of .* differs between the ranks, or is NaN
--lr=1 | ValueError: checkpoint has .*'lr': 0.001,
--text=other/text | ValueError: checkpoint has .*'text': \\d+
--model=./llama | ValueError: checkpoint has .*'model': 'llama'
"""


@pytest.mark.slow
@each_row(ERRORS)
def test_what_does_not_fit_is_an_error(row, folder):
    """The tokenizer and the settings for generate() are written before the training."""
    option, error = row
    shutil.copytree(folder / "llama", folder / "other")
    shutil.copy(folder / "gemma/model.safetensors", folder / "other")
    (folder / "other/text").write_text(TEXT.lower())
    options = ["--model=llama", *OPTIONS]
    if "checkpoint" in error:
        kill = {"fault": f"{STEP}:3:9:0", "code": 1}
        train(SCRIPT, 1, *options, "--save-every=1", cwd=folder, **kill)
    failed = train(SCRIPT, 1, *options, option, cwd=folder, code=1)
    assert re.search(error, failed.errors), failed
    if "lr" in option:
        written = {path.name for path in folder.glob("tuned.tmp/*")}
        assert written > {"generation_config.json", "tokenizer.json"}


@pytest.mark.slow
def test_rank_0_reads_the_text_for_all(folder):
    """Two machines may have two texts, if the checkpoint is on a shared disk."""
    for rank, text in enumerate((TEXT, "another text" * 20)):
        (folder / str(rank)).mkdir()
        (folder / str(rank) / "text.txt").write_text(text)
    shared = [f"--{name}={folder / name}" for name in ("checkpoint", "output")]
    options = [f"--model={folder / 'llama'}", *OPTIONS, *shared, "--batch-size=3"]
    result = train(SCRIPT, 2, *options, cwd=folder, fault="own_folders")
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    tokens = torch.tensor([*TEXT.encode()])
    assert losses_of(result) == train_alone(model, tokens, tokens[:0])


OWN = '''
import torch
from torch import nn


class LanguageModel(nn.Module):
    """Tokens [N, length] to logits of the next ones [N, length, 128]."""

    def __init__(self, length):
        super().__init__()
        self.words = nn.Embedding(128, 16)
        self.positions = nn.Embedding(length, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0, batch_first=True) for _ in "ab"
        )
        self.head = nn.Linear(16, 128)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.words.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        hidden = self.words(tokens) + self.positions.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.head(hidden)
'''


def test_an_own_model(folder):
    """With the functions of 05's page, without transformers; killed and resumed.

    A model in which no layer is found is an error.
    """
    page = (ROOT / "05_model_parallel/README.md").read_text()
    blocks = re.findall(
        r"^```python\n(def (?:tokenize|loss).*?)^```$", page, re.M | re.S
    )
    project = copy_project(folder / "a project", SCRIPT)
    script = project / "huggingface.py"
    above, below = script.read_text().split("# The model and its tokens")
    above = re.sub(r"^from transformers.*\n", "", above, flags=re.M)
    end = below[below.index("if __name__") :]
    script.write_text(
        f"{above}from my_model import LanguageModel\n\n{blocks[0]}\n{blocks[1]}\n{end}"
    )
    (project / "my_model.py").write_text(OWN)
    (folder / "sitecustomize.py").write_text(
        HIDE.replace("torchvision", "transformers")
    )
    torch.manual_seed(0)
    model = module(project / "my_model.py").LanguageModel(16)
    options = ["--model=none", "--scratch", *OPTIONS, "--accumulate=3", "--recompute"]
    kill = {"fault": f"{STEP}:3:9:0", "code": 1}
    first = train(script, 2, *options, "--save-every=1", cwd=folder, **kill)
    rest = train(script, 2, *options, cwd=folder)
    tokens = torch.tensor([*TEXT.encode()])
    losses = train_alone(model, tokens, tokens[:0])
    printed = [STEPS.findall(each.output) for each in (first, rest)]
    assert [line.split()[-1] for line in dict.fromkeys(sum(printed, []))] == losses
    logits = [model(tokens[None, :16])]
    model.load_state_dict(load(folder / "tuned"))
    logits.append(model(tokens[None, :16]))
    assert (logits[0] - logits[1]).abs().max() < 1e-5
    edit(script, "return list(model.layers)", "return []")
    failed = train(script, 1, *options, "--output=new", cwd=folder, code=1)
    assert "ValueError: none has no layers that layers_of() finds" in failed.errors
