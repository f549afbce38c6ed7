"""02: processes spawned on one machine."""

import math
import sys

import pytest
from helpers import DIGITS, ROOT, WITNESS, bare_accuracy, copy_project, fewer_digits, load_script, run

RUN = ROOT / "02_ddp_spawn/run.sh"


def test_both_ranks_train_evaluate_and_save(tmp_path):
    check_two_ranks(RUN, tmp_path, "--epochs", 2, epochs=2)


def check_two_ranks(script, tmp_path, *options, epochs, at_least=0.9):
    """Train with a launch file's own two ranks: both take part, and the saved weights have the accuracy it prints."""
    weights, witness = tmp_path / "weights.pt", tmp_path / "witness"
    result = run(
        ["bash", script, *options, "--data-dir", DIGITS, "--output", weights],
        tmp_path,
        **WITNESS,
        WITNESS=str(witness),
    )
    assert result.code == 0, result
    lines = result.epochs()
    assert [line["epoch"] for line in lines] == [str(epoch) for epoch in range(1, epochs + 1)], result
    assert float(lines[-1]["accuracy"]) >= at_least, result
    assert lines[-1]["accuracy"] == f"{bare_accuracy(weights):.4f}", result
    check_witness(witness, lines)
    return result


def check_witness(witness, epochs, world_size=2, images=1438 * 9):
    """Each rank brought its share to each epoch's loss, and the printed loss is the mean over all images."""
    rows = [line.split() for line in witness.read_text().splitlines()]
    assert {int(world) for _, world, _ in rows} == {world_size}
    shares = [[float(loss) for rank, _, loss in rows if int(rank) == each] for each in range(world_size)]
    images = math.ceil(images / world_size) * world_size
    for number, line in enumerate(epochs):
        assert all(rank[number] > 0 for rank in shares)
        assert float(line["loss"]) == pytest.approx(sum(rank[number] for rank in shares) / images, abs=6e-5)


def test_a_failing_process_shows_its_traceback_and_ends_the_others(tmp_path):
    script = copy_project(tmp_path / "my project", ROOT / "02_ddp_spawn/train.py")
    fewer_digits(script.parent)
    result = run(
        [sys.executable, script, "--epochs", 1, "--data-dir", script.parent / "common"],
        tmp_path,
        limit=60,
        **WITNESS,
        WITNESS=str(tmp_path / "witness"),
        FAULTY_RANK="1",
    )
    assert result.code == 1, result
    assert "RuntimeError: planted by the test" in result.errors
    assert "-- Process 1 terminated with the following error" in result.errors
    assert not (tmp_path / "mnist.pt").exists()


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("sys.argv", ["train.py", "--nprocs", "3"])
    with pytest.raises(SystemExit):
        load_script(ROOT / "02_ddp_spawn/train.py").parse_args()
    assert "error: each process needs a GPU, torch finds 2: start fewer, or --device cpu" in capsys.readouterr().err
