"""05's huggingface.py: exact, resumed after kills and stops, and for an own model."""

import re
import sys

import pytest
import torch
from helpers import (
    ROOT,
    check_close,
    copy_repository,
    each_row,
    edit,
    order_of,
    run,
    train,
)
from torch import nn

# transformers imports torchvision if it is there, and it may be for another torch
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "torchvision", None)
    pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models, processors
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        PreTrainedTokenizerFast,
    )

FILE = "model.safetensors"
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


# what is printed of each step and evaluation, without the time
STEPS = re.compile(r"^epoch .*loss \S+", re.M)
WAYS = """
llama | 3 | --batch-size=2
tied | 2 | --accumulate=3 --recompute
gemma | 2 | --accumulate=3 --compile
"""
MORE = "llama | 4 | --batch-size=1 --accumulate=2 --shards=2"


@each_row(WAYS, slow=MORE)
def test_any_number_of_ranks_computes_what_one_does(row, folder):
    """With six rows per step (on four ranks eight); a tied weight is saved once.

    Rank 0 reads the text for all, because two machines may have two texts.
    """
    name, ranks, options = row
    for rank in range(4):
        (folder / str(rank)).mkdir()
        text = "another text" * 20 if rank else TEXT
        (folder / str(rank) / "text.txt").write_text(text)
    printed, faults = [], "own_folders compiled_without_cpp"
    one = "--batch-size=8" if ranks == "4" else "--batch-size=6"
    for count, more in (ranks, options.split()), (1, [one]):
        files = [f"--checkpoint={folder}/{count}.ckpt", f"--output={folder}/{count}.pt"]
        more = [f"--model={folder}/{name}", *OPTIONS, *files, *more]
        result = train(SCRIPT, count, *more, cwd=folder, fault=faults)
        printed.append(STEPS.findall(result.output))
    assert printed[0] == printed[1]
    many, one = [load_file(folder / f"{count}.pt" / FILE) for count in (ranks, 1)]
    torch.testing.assert_close(many, one, rtol=0, atol=1e-5)
    assert one.keys() == load_file(folder / name / FILE).keys()


def test_the_first_loss_is_that_of_transformers(folder):
    """Each row of gemma begins with its first token, 1."""
    result = train(SCRIPT, 1, "--model=gemma", *OPTIONS, "--batch-size=6", cwd=folder)
    tokens = torch.tensor([*TEXT.encode()]).split(15)
    rows = torch.stack([tokens[n] for n in order_of(1, 10)[:6]])
    rows = nn.functional.pad(rows, (1, 0), value=1)
    model = AutoModelForCausalLM.from_pretrained(folder / "gemma")
    loss = model(rows, labels=rows).loss
    assert f"epoch 1/2  60%  loss {loss:.4f}" in result.output, result


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
    more = ["--output=whole", "--checkpoint=other", "--device=cpu"]
    command = ["bash", ROOT / "06_checkpointing/run.sh", *options, *more]
    whole = run(command, folder, SCRIPT=SCRIPT, NPROC=2, OMP_NUM_THREADS=1)
    printed = []
    for fault in [*INTERRUPTIONS, None]:
        given = {"cwd": folder, "fault": fault, "code": int(fault is not None)}
        result = train(SCRIPT, 2, *options, "--save-every=1", **given)
        assert ("\nstopped: " in result.output) == (":15:" in f"{fault}"), result
        # a killed run has printed steps that the next one repeats
        printed += STEPS.findall(result.output)
    assert "starting at {'epoch': 3, 'done': 9}" in result.output, result
    assert [*dict.fromkeys(printed)] == STEPS.findall(whole.output), whole
    one, other = [(folder / each / FILE).read_bytes() for each in ("tuned", "whole")]
    assert one == other and not (folder / "tuned.tmp").exists()


# options | error
ERRORS = """
--model=moe | ValueError: this script lacks the loss that balances the experts
--length=92 | ValueError: text.txt has fewer than two rows of --length tokens
--accumulate=0 | ValueError: batch_size should be a positive integer
--output=llama | ValueError: --output llama must be a new folder
--lr=1e30 | ValueError: the weight of .* differs between the ranks, or is NaN
--lr=1 | ValueError: checkpoint has .*'lr': 0.001,
--text=lower | ValueError: checkpoint has .*'text': \\d+
--model=./llama | ValueError: checkpoint has .*'model': 'llama'
"""


@pytest.mark.slow
@each_row(ERRORS)
def test_what_does_not_fit_is_an_error(row, folder):
    """The tokenizer and the settings for generate() are written before the training."""
    option, error = row
    (folder / "lower").write_text(TEXT.lower())
    options = ["--model=llama", *OPTIONS]
    if "checkpoint" in error:
        kill = {"fault": f"{STEP}:3:9:0", "code": 1}
        train(SCRIPT, 1, *options, "--save-every=1", cwd=folder, **kill)
    failed = train(SCRIPT, 1, *options, option, cwd=folder, code=1)
    assert re.search(error, failed.errors), failed
    if "lr" in option:
        written = {path.name for path in folder.glob("tuned.tmp/*")}
        assert written > {"generation_config.json", "tokenizer.json"}


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
            nn.TransformerEncoderLayer(16, 2, 32, 0, batch_first=True, bias=False)
            for _ in range(2)
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
    """With the functions of 05's page, without transformers.

    A model in which no layer is found is an error.
    """
    page = (ROOT / "05_model_parallel/README.md").read_text()
    blocks = re.findall(
        r"^```python\n(def (?:tokenize|loss).*?)^```$", page, re.M | re.S
    )
    project = copy_repository(folder / "a project")
    script = project / "05_model_parallel/huggingface.py"
    above, below = script.read_text().split("# The model and its tokens")
    above = re.sub(r"^from transformers.*\n", "", above, flags=re.M)
    end = below[below.index("if __name__") :]
    script.write_text(
        f"{above}from my_model import LanguageModel\n\n{blocks[0]}\n{blocks[1]}\n{end}"
    )
    (script.parent / "my_model.py").write_text(OWN)
    (folder / "sitecustomize.py").write_text(
        HIDE.replace("torchvision", "transformers")
    )
    options = ["--model=none", "--scratch", *OPTIONS]
    more = ["--batch-size=6", "--checkpoint=alone.ckpt", "--output=alone"]
    alone = train(script, 1, *options, *more, cwd=folder)
    options += ["--accumulate=3", "--recompute"]
    result = train(script, 2, *options, cwd=folder)
    assert STEPS.findall(result.output) == STEPS.findall(alone.output)
    check_close(folder / "tuned", folder / "alone", 1e-5)
    edit(script, "return list(model.layers)", "return []")
    failed = train(script, 1, *options, "--output=new", cwd=folder, code=1)
    assert "ValueError: none has no layers that layers_of() finds" in failed.errors
