"""With the patches of copies/, N processes compute what one does, and they resume."""

import json
import re

import pytest
import torch
from helpers import (
    COPIES,
    ROOT,
    SEED,
    distance,
    edit,
    equal,
    kill_after_a_save,
    lines,
    load,
    module,
    patched,
    run,
    torchrun,
    train,
    without_batch_norm,
)

# a single write, so that the lines of two ranks do not mix
SHOW = """optimizer.zero_grad()
            print(f"got {images[:, 0, 0, 0].tolist()}\\n", end="", flush=True)"""


@pytest.mark.parametrize("patches", [[], ["small_ddp.diff"]])
def test_small(patches, tmp_path):
    """On one process, and with the patch on two: the accuracy of the whole test set."""
    project = patched(tmp_path, "tests/copies/small.py", *patches)
    output = train("small.py", len(patches) + 1, cwd=project).output
    a, b, c, d = load(project / "model.pt").values()
    torch.manual_seed(0)
    points = torch.randn(1000, 2)[700:]
    found = ((points @ a.T + b).relu() @ c.T + d).argmax(1)
    accuracy = sum(found == (points.norm(dim=1) < 1)) / 300
    assert f"4  accuracy {accuracy:.4f}" in output


def test_small_resumes_bit_for_bit(tmp_path):
    """All processes are killed after the first checkpoint. Options as 07's run.sh."""
    patches = ["small_ddp.diff", "small_resume.diff"]
    script = patched(tmp_path, "tests/copies/small.py", *patches) / "small.py"
    edit(script, "range(first, 5)", "range(first, 20)")
    edit(script, "nn.ReLU()", "nn.ReLU(), nn.Dropout(0.1)")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = ["--checkpoint", "a run.ckpt", "--output", "new/a run.pt"]
    kill_after_a_save(torchrun(script, 2, *options), killed / "a run.ckpt")
    start, rest = train(script, 2, *options, cwd=killed).output.split("\n", 1)
    output = train(script, 2, *options, cwd=whole).output
    assert start != "starting at epoch 0 on 2 ranks" and rest and output.endswith(rest)
    for name in ("a run.ckpt", "new/a run.pt"):
        assert equal(killed / name, whole / name)
    (whole / "a run.ckpt").unlink()
    edit(script, "loss.backward()", "(loss * torch.nan).backward()")
    failed = train(script, 2, *options, cwd=whole, code=1)
    assert "a weight is NaN: nothing is saved" in failed.errors, failed
    assert equal(killed / "new/a run.pt", whole / "new/a run.pt")


def printed_and_drawn(result, folder):
    """The lines of own.py, and its picture."""
    found = re.findall("^(?:seed|step|epoch) .*", result.output, re.M)
    return [*found, (folder / "best.txt").read_text()]


def test_own_ddp_computes_what_one_process_does(tmp_path):
    """In float64 and without noise: all that is printed, drawn and saved."""
    project = patched(tmp_path, "tests/copies/own.py", "own_ddp.patch")
    script = project / "own.py"
    edit(script, "NOISE = 0.01", "NOISE = torch.set_default_dtype(torch.float64) or 0")
    edit(script, "EPOCHS = 30", "EPOCHS = 6")
    one, *others = [tmp_path / str(ranks) for ranks in (1, 3)]
    expected = printed_and_drawn(train(script, 1, "--seed", SEED, cwd=one), one)
    assert len(expected) == 9  # the seed, one step, six epochs, the picture
    for folder in others:
        result = train(script, folder.name, "--seed", SEED, cwd=folder)
        assert printed_and_drawn(result, folder) == expected
        assert distance(one / "best.pt", folder / "best.pt") < 1e-10


def test_own_resume_is_bit_for_bit_that_of_an_undisturbed_run(tmp_path):
    """All processes are killed after the first checkpoint; the seed was drawn."""
    patches = ["own_ddp.patch", "own_resume.diff"]
    script = patched(tmp_path, "tests/copies/own.py", *patches) / "own.py"
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_after_a_save(torchrun(script, 2), killed / "checkpoint.pt")
    seed, *rest = printed_and_drawn(train(script, 2, cwd=killed), killed)
    result = train(script, 2, f"--{seed}".replace(" ", "="), cwd=whole)
    expected = printed_and_drawn(result, whole)
    assert seed == expected[0] and rest == expected[-len(rest) :] != expected[1:]
    for name in ("best.pt", "checkpoint.pt"):
        assert equal(killed / name, whole / name)


def test_early_stopping(tmp_path, monkeypatch):
    """After three worse epochs in the last 60 %; the best weights are saved.

    They are chosen by a sixth of the training set.
    """
    project = patched(tmp_path, "04_ddp_torchrun/train.py", "add_early_stopping.patch")
    monkeypatch.setenv("FLOAT32", "1")
    result = train("train.py", 2, "--epochs=20", cwd=project)
    accuracies = [float(line["accuracy"]) for line in result.epochs()]
    best = accuracies.index(max(accuracies))
    assert len(accuracies) == max(best + 1, 8) + 3
    model = module(project / "common/model.py").ConvNet().eval()
    model.load_state_dict(load(project / "best-mnist.pt"))
    train_set, _ = module(ROOT / "tests/small/data.py").load_mnist()
    seeded = torch.Generator().manual_seed(0)
    chosen = torch.utils.data.random_split(train_set, [5 / 6, 1 / 6], seeded)[1].indices
    images, labels = train_set[chosen]
    right = model(images).argmax(1) == labels
    assert f"{right.double().mean():.4f}" == f"{max(accuracies):.4f}"


def on_one_and_two(folder, script, one, two, change=("", "")):
    """Two epochs on one process and on two, each with its patches and its --batch-size.

    They print and save the same. Returns the images that each step of the two has got,
    by their first pixels. In the folder `2` is what they have written.
    """
    printed = []
    for ranks, (patches, *options) in enumerate((one, two), start=1):
        project = patched(folder / f"{ranks}", script, *patches)
        without_batch_norm(project)
        edit(project / "common/data.py", *change)
        edit(project / "train.py", "optimizer.zero_grad()", SHOW)
        options = ["--epochs=2", "--seed", SEED, "--batch-size", *options]
        result = train(project / "train.py", ranks, *options, cwd=folder / f"{ranks}")
        printed.append(lines(result))
    assert len(printed[0]) >= 2 and printed[0] == printed[1]
    assert distance(folder / "1/mnist.pt", folder / "2/mnist.pt") < 1e-10
    found = re.findall("^got (.*)", result.output, re.M)
    return [pixel for pixels in found for pixel in json.loads(pixels)]


def data(folder):
    """The training set and the test set of the two processes."""
    return module(folder / "2/a project/common/data.py").load_mnist()


def test_accumulation(tmp_path, monkeypatch):
    """The step of one process with a large batch, also if it has fewer batches."""
    monkeypatch.setenv("TRAIN_IMAGES", "182")
    two = ["add_accumulation.patch"], 6, "--accumulate=2"
    on_one_and_two(tmp_path, "06_checkpointing/train.py", ([], 24), two)


def test_one_global_batch_and_predictions(tmp_path, monkeypatch, float64):
    """--batch-size is that of all processes; predictions are in the right order."""
    monkeypatch.setenv("TRAIN_IMAGES", "180")
    two = ["add_global_batch.patch", "add_predictions.patch"], 12
    on_one_and_two(tmp_path, "04_ddp_torchrun/train.py", ([], 12), two)
    model = module(tmp_path / "2/a project/common/model.py").ConvNet().eval()
    model.load_state_dict(load(tmp_path / "2/mnist.pt"))
    predicted = model(data(tmp_path)[1].tensors[0]).argmax(1)
    written = (tmp_path / "2/predictions.txt").read_text().splitlines()
    assert written == [f"{each}" for each in predicted.tolist()]


def test_weighted_sampling(tmp_path, monkeypatch, float64):
    """A tenth of the images has label 0, and half of those that are drawn."""
    monkeypatch.setenv("TRAIN_IMAGES", "180")
    patches = ["add_weighted_sampling.patch"]
    got = on_one_and_two(
        tmp_path,
        "04_ddp_torchrun/train.py",
        (patches, 12),
        (patches, 6),
        ("numbers)\n    noise", "numbers).clamp(max=1)\n    noise"),
    )
    images, labels = data(tmp_path)[0].tensors
    assert 10 < sum(labels == 0) < 30
    rare = images[labels == 0, 0, 0, 0].tolist()
    epochs = sorted(got[:180]), sorted(got[180:])
    assert epochs[0] != epochs[1]
    assert 150 < sum(pixel in rare for pixel in got) < 210


def test_a_stream(tmp_path, monkeypatch, float64):
    """Each image once per epoch, also where the last batch of a rank is smaller."""
    monkeypatch.setenv("TRAIN_IMAGES", "179")
    one, two = [(["add_stream.patch"], batch, "--workers=2") for batch in (12, 6)]
    got = on_one_and_two(tmp_path, "04_ddp_torchrun/train.py", one, two)
    images = data(tmp_path)[0].tensors[0]
    assert sorted(got) == sorted(2 * images[:, 0, 0, 0].tolist())


def test_a_profile(tmp_path):
    """One file for each rank, which shows three steps and their communication."""
    project = patched(tmp_path, "04_ddp_torchrun/train.py", "add_profiler.patch")
    train("train.py", 2, "--batch-size=10", cwd=project)
    for rank in (0, 1):
        trace = (project / f"trace-{rank}.json").read_text()
        found = {*re.findall(r"ProfilerStep#\d+|gloo:all_reduce", trace)}
        assert found == {"gloo:all_reduce", *[f"ProfilerStep#{n}" for n in (4, 5, 6)]}


@pytest.mark.slow
def test_the_memory_of_one_rank(tmp_path):
    """05's page shows what memory.py prints."""
    page = (ROOT / "05_model_parallel/README.md").read_text()
    rows = re.findall(r"^\| `((?:ddp|fsdp) .*)` \| (\d+\.\d\d) \|$", page, re.M)
    assert rows
    for options, peak in rows:
        command = ["python", COPIES / "memory.py", *options.split()]
        assert run(command, tmp_path).output == f"peak {peak} GB\n"
