"""fsdp.py with a Llama-shaped model, by copies/05_fsdp_llama.patch: what one device computes."""

import json
import math
import re
import shutil
import signal
from collections import Counter

import pytest
import torch
from helpers.checks import distance, equal, rate_factor
from helpers.paths import ROOT
from helpers.projects import apply, copy_project, edit, write_lines
from helpers.ranks import run_ranks
from helpers.readmes import blocks, sections
from helpers.scripts import load_script

LINES, STEP = 144, 32  # to train: four steps and a half on two and on four ranks
OPTIONS = ["--data-dir", ".", "--width", 32, "--depth", 2, "--lr", 1, "--save-every", 2]
NOTE = """            with open("notes", "a") as file:
                lines = [bytes(row[row > 0].tolist()).decode().strip()
                         for each in micro_batches for row in each["tokens"]]
                print(json.dumps([epoch, lines]), file=file)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy in float64, without what would hide a wrong divisor, and a text of lines that differ.

    That is AdamW and the clipping of gradients.
    """
    folder = tmp_path_factory.mktemp("llama") / "project"
    project = copy_project(folder, ROOT / "05_model_parallel/fsdp.py")
    apply(project, "05_fsdp_llama.patch")
    clip = "            nn.utils.clip_grad_norm_("
    edit(project, "fsdp.py", ('(batch["tokens"]).float()', '(batch["tokens"])'), ("AdamW(", "SGD("),
         ("EMA_DECAY = 1.0, 0.99", "EMA_DECAY = 1e9, 0.8"), (clip, NOTE + clip),
         ("    train(", "    torch.set_default_dtype(torch.float64)\n    train("))
    write_lines(project, LINES)
    return project


def trained(project, nproc, *options, **settings):
    """Train in this copy with steps of 32 lines; the result must be a success."""
    batch = ["--batch-size", STEP // 2 // nproc, "--accumulate", 2]
    return run_ranks("fsdp.py", nproc, *OPTIONS, *batch, *options, cwd=project, **settings)


@pytest.fixture(scope="module")
def alone(project):
    """The perplexities of two epochs; its last and best weights are files. Without FSDP."""
    torch.set_default_dtype(torch.float64)
    script = load_script(project / "fsdp.py")
    model = script.Llama(32, 2)
    torch.manual_seed(0)
    model.apply(lambda module: [*module.parameters(False), *module.buffers(False)]
                and module.reset_parameters())
    groups = [{"params": [each for each in model.parameters() if each.ndim == ndim],
               "weight_decay": decay} for ndim, decay in ((2, 0.1), (1, 0.0))]
    peak, total_steps = (STEP / 256) ** 0.5, 2 * math.ceil(LINES / STEP)
    optimizer = torch.optim.SGD(groups, peak)
    average = {name: part.clone() for name, part in model.state_dict().items()}
    train_set, test_set = [(project / name).read_text().splitlines()
                           for name in ("train.txt", "test.txt")]

    def mean_loss(lines):  # line by line, without padding
        losses = []
        for line in lines:
            tokens = torch.tensor([10, *line.encode(), 10])
            scores = model(tokens[None, :-1])[0]
            losses.append(torch.nn.functional.cross_entropy(scores, tokens[1:], reduction="none"))
        return torch.cat(losses).mean()

    perplexities = []
    for epoch in (1, 2):
        order = torch.randperm(LINES, generator=torch.Generator().manual_seed(epoch)).tolist()
        for first in range(0, LINES, STEP):
            progress = (epoch - 1 + first / LINES) / 2
            for group in optimizer.param_groups:
                group["lr"] = peak * rate_factor(progress * total_steps, total_steps)
            mean_loss([train_set[n] for n in order[first : first + STEP]]).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, part in model.state_dict().items():
                average[name] = 0.8 * average[name] + 0.2 * part
        last = {name: part.clone() for name, part in model.state_dict().items()}
        model.load_state_dict(average)
        with torch.no_grad():
            perplexities.append(math.exp(mean_loss(test_set)))
        model.load_state_dict(last)
        if perplexities[-1] == min(perplexities):
            torch.save(average, project / "alone-best.pt")
    torch.save(last, project / "alone-last.pt")
    torch.set_default_dtype(torch.float32)
    return perplexities


def test_it_takes_the_steps_of_one_device(project, alone, tmp_path):
    """The mean is over the tokens of all ranks and micro-batches, also in the shorter last step."""
    project = shutil.copytree(project, tmp_path / "project")
    result = trained(project, 2, "--epochs", 2, "--recompute")
    shown = re.findall(r"^epoch .*  perplexity (\S+) ", result.output, re.M)
    assert shown == [f"{perplexity:.4f}" for perplexity in alone]
    for name in ("last", "best"):  # with the names and shapes of the whole model
        assert distance(project / f"{name}.pt", project / f"alone-{name}.pt") < 1e-12
    # Also after an epoch that is not better: here the second, as the score is the epoch
    score = "score = evaluate(model, test_loader, device)"
    edit(project, "fsdp.py", (score, f"{score} and epoch"))
    shutil.rmtree(project / "checkpoint")
    trained(project, 2, "--epochs", 2)
    assert distance(project / "last.pt", project / "alone-last.pt") < 1e-12
    assert distance(project / "best.pt", project / "alone-best.pt") > 0


def test_it_resumes_on_any_number_of_ranks_with_each_line_once(project, alone, tmp_path):
    """On two ranks bit by bit; stopped after three steps of the second epoch."""
    project = shutil.copytree(project, tmp_path / "project")
    stopped = trained(project, 2, "--epochs", 2, stop=(1, signal.SIGTERM, 19))
    assert "stopped at {'epoch': 2, 'images': 96, " in stopped.output, stopped
    for nproc, options in ((1, []), (2, []), (4, ["--shards", 2])):
        copy = shutil.copytree(project, tmp_path / str(nproc))
        resumed = trained(copy, nproc, "--epochs", 2, *options)
        assert resumed.output.splitlines()[1].startswith("resuming from checkpoint/epoch-0002-")
        notes = [json.loads(line) for line in (copy / "notes").read_text().splitlines()]
        for epoch in (1, 2):
            lines = Counter(line for n, of_step in notes if n == epoch for line in of_step)
            assert len(lines) == LINES and {*lines.values()} == {1}
        for name in ("last", "best"):
            assert distance(copy / f"{name}.pt", copy / f"alone-{name}.pt") < 1e-12
    undisturbed = shutil.copytree(project, tmp_path / "undisturbed")
    shutil.rmtree(undisturbed / "checkpoint")
    trained(undisturbed, 2, "--epochs", 2)
    assert all(equal(undisturbed / name, tmp_path / "2" / name) for name in ("last.pt", "best.pt"))


def test_in_bfloat16_the_angles_stay_float32(project, tmp_path):
    project = shutil.copytree(project, tmp_path / "project")
    edit(project, "fsdp.py", ("torch.set_default_dtype(torch.float64)", "pass"),
         ("        inputs = self.norm1(hidden)\n", "        inputs = self.norm1(hidden)\n"
          "        DTYPES.add((hidden.dtype, angles.dtype, self.out.weight.dtype))\n"),
         ("\nfaulthandler.", "\nDTYPES = set()\nfaulthandler."),
         ("    ignore_stop", "    print('dtypes', *DTYPES, flush=True)\n    ignore_stop"))
    result = trained(project, 2, "--amp", "--recompute")
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    assert f"dtypes {dtypes}\n" in result.output, result
    weights = torch.load(project / "last.pt", weights_only=True)
    assert {part.dtype for part in weights.values()} == {torch.float32}


BEFORE = """
    def kilobytes(field):
        return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the highest VmRSS from now on
    before = kilobytes("VmRSS")
"""
AFTER = """
    print("grown by", kilobytes("VmHWM") - before, flush=True)
    save_whole(model, args.output)
    sys.exit()
"""


@pytest.mark.slow
def test_a_folder_of_safetensors_is_read_into_the_shards(tmp_path):
    """By the lines on 05's page; each rank reads about half: 201 MB are never on one rank."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    project = copy_project(tmp_path / "project", ROOT / "05_model_parallel/fsdp.py")
    apply(project, "05_fsdp_llama.patch")
    for name in ("train.txt", "test.txt"):
        (project / name).write_text("a line\n" * 4)
    model = load_script(project / "fsdp.py").Llama(1024, 4)
    weights = dict(model.named_parameters())
    folder = tmp_path / "FOLDER"
    folder.mkdir()
    for number in (0, 1):
        part = {name: weights[name].detach() for name in sorted(weights)[number::2]}
        safetensors.save_file(part, folder / f"model-0000{number + 1}-of-00002.safetensors")
    [lines, _] = blocks(sections(ROOT / "05_model_parallel/README.md")["Pretrained weights"],
                        "python")
    lines = "".join(f"    {line}\n" for line in lines.replace("FOLDER", str(folder)).splitlines())
    shard = "    model.apply(shard)  # children first\n"
    edit(project, "fsdp.py", (shard, shard + BEFORE + lines + AFTER),
         ("import os\n", "import os\nimport re\n"))
    options = ["--width", 1024, "--depth", 4, "--data-dir", "."]
    result = run_ranks("fsdp.py", 2, *options, cwd=project)
    loaded = torch.load(project / "last.pt", weights_only=True)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    size = sum(part.nbytes for part in weights.values())
    for grown in re.findall(r"^grown by (\d+)", result.output, re.M):
        assert int(grown) * 1024 < 0.8 * size, result
