"""01: one process; the base of all other scripts."""

import pytest
from helpers import DIGITS, FOLDERS, ROOT, bare_accuracy, load_script, run


def test_trains_evaluates_and_saves(tmp_path):
    weights = tmp_path / "weights.pt"
    command = ["bash", ROOT / "01_dataparallel/run.sh", "--epochs", 2, "--data-dir", DIGITS, "--output", weights]
    result = run(command, tmp_path, OMP_NUM_THREADS="1")  # more threads wait for each other if a core is taken
    assert result.code == 0, result
    epochs = result.epochs()
    assert [line["epoch"] for line in epochs] == ["1", "2"], result
    assert float(epochs[-1]["loss"]) < float(epochs[0]["loss"]), result
    assert float(epochs[-1]["accuracy"]) >= 0.9, result
    assert epochs[-1]["accuracy"] == f"{bare_accuracy(weights):.4f}", result


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--epochs", "0"], "--epochs must be above 0"),
        (["--epochs", "-1"], "--epochs must be above 0"),
        (["--epochs", "three"], "--epochs: invalid int value"),
        (["--batch-size", "0"], "--batch-size must be above 0"),
        (["--lr", "nan"], "--lr must be above 0"),
        (["--device", "cuda"], "torch finds 0"),
        (["--output", "no/such/folder/mnist.pt"], "--output no/such/folder/mnist.pt: cannot write"),
        (["--output", "."], "--output .: cannot write"),
        (["--output", __file__ + "/mnist.pt"], "test_01_dataparallel.py/mnist.pt: cannot write"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_bad_options_get_one_line(folder, options, complaint, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.syspath_prepend(ROOT / folder)
    monkeypatch.setattr("sys.argv", ["train.py", *options])
    with pytest.raises(SystemExit) as stop:
        load_script(ROOT / folder / "train.py").parse_args()
    assert stop.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: train.py [options]"
    assert error.startswith("train.py: error: ")
    assert complaint in error


@pytest.mark.parametrize("folder", FOLDERS[:-1])  # 08 refuses in its container
def test_run_sh_refuses_in_one_line(folder, tmp_path):
    result = run(["bash", ROOT / folder / "run.sh", "--epochs", 0], tmp_path)
    assert result.code == 2, result
    assert result.errors.splitlines() == ["usage: train.py [options]", "train.py: error: --epochs must be above 0"]
    assert result.output == ""
    assert not list(tmp_path.iterdir())
