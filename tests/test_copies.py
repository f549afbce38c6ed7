"""With the patches of copies/, N processes compute what one does, and they resume."""

import re

import pytest
from helpers import (
    COPIES,
    ROOT,
    SEED,
    Running,
    copy_project,
    distance,
    edit,
    equal,
    load,
    module,
    run,
    torchrun,
    train,
    wait_until,
)


def patched(folder, script, *patches):
    """A project with a script to which patches were applied as its page says."""
    project = copy_project(folder / "a project", script, small="data")
    for name in patches:
        [file] = project.glob("*.py")
        fits = run(["patch", "-F0", file, COPIES / name], project)
        assert fits.code == 0, fits  # it names the hunk that does not fit
    return project


def printed_and_drawn(result, folder):
    """The lines of own.py, and its picture."""
    lines = re.findall("^(?:seed|step|epoch) .*", result.output, re.M)
    return [*lines, (folder / "best.txt").read_text()]


def test_own_ddp_computes_what_one_process_does(tmp_path):
    """In float64 and without noise: all that is printed, drawn and saved."""
    project = patched(tmp_path, "tests/copies/own.py", "own_ddp.patch")
    script = project / "own.py"
    edit(script, "NOISE = 0.01", "NOISE = torch.set_default_dtype(torch.float64) or 0")
    edit(script, "EPOCHS = 30", "EPOCHS = 6")
    one, *others = [tmp_path / str(ranks) for ranks in (1, 2, 3)]
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
    running = Running(torchrun(script, 2), killed, OMP_NUM_THREADS=1)
    wait_until((killed / "checkpoint.pt").exists, running)
    running.kill_all()
    seed, *rest = printed_and_drawn(train(script, 2, cwd=killed), killed)
    result = train(script, 2, f"--{seed}".replace(" ", "="), cwd=whole)
    expected = printed_and_drawn(result, whole)
    assert seed == expected[0] and rest == expected[-len(rest) :] != expected[1:]
    for name in ("best.pt", "checkpoint.pt"):
        assert equal(killed / name, whole / name)


def test_early_stopping(tmp_path, monkeypatch):
    """After three worse epochs in the last 60 %; the best weights are saved."""
    project = patched(tmp_path, "04_ddp_torchrun/train.py", "add_early_stopping.patch")
    monkeypatch.setenv("FLOAT32", "1")
    result = train("train.py", 2, "--epochs=20", cwd=project)
    accuracies = [float(line["accuracy"]) for line in result.epochs()]
    best = accuracies.index(max(accuracies))
    assert len(accuracies) == max(best + 1, 8) + 3
    model = module(project / "common/model.py").ConvNet().eval()
    model.load_state_dict(load(project / "best-mnist.pt"))
    images, labels = module(ROOT / "tests/small/data.py").load_mnist()[1].tensors
    right = model(images).argmax(1) == labels
    assert f"{right.double().mean():.4f}" == f"{max(accuracies):.4f}"


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
