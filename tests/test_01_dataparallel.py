"""01: one process; the base of all other scripts."""

import pytest
from helpers import DIGITS, FOLDERS, ROOT, bare_accuracy, parse, rejected, run

FOLDER = ROOT / "01_dataparallel"


def test_trains_evaluates_and_saves(tmp_path):
    weights = tmp_path / "weights.pt"
    command = ["bash", FOLDER / "run.sh", "--epochs", 1, "--data-dir", DIGITS, "--output", weights]
    result = run(command, tmp_path, OMP_NUM_THREADS="1")  # threads that share a busy core are slow
    assert result.code == 0, result
    (epoch,) = result.epochs()
    assert float(epoch["accuracy"]) >= 0.9, result
    assert epoch["accuracy"] == f"{bare_accuracy(weights):.4f}", result


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--epochs 0", "argument --epochs: must be above 0, not 0"),
        ("--epochs three", "argument --epochs: invalid positive_int value: 'three'"),
        ("--lr nan", "argument --lr: must be above 0, not nan"),
        ("--output no/such/folder/m.pt", "cannot write no/such/folder/m.pt; name a file in a"),
        ("--output .", "argument --output: cannot write .; name a file in a writable folder"),
        ("--colour red", "unrecognized arguments: --colour red"),
    ],
)
def test_every_script_rejects_a_wrong_option(folder, options, error, monkeypatch, capsys):
    script = ROOT / folder / "train.py"
    message = rejected(monkeypatch, capsys, script, *options.split(), LOCAL_RANK=0)
    assert error in message


@pytest.mark.parametrize("folder", FOLDERS[:5])  # from 06 on it looks at the checkpoint as well
def test_check_ends_after_the_options(folder, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, ROOT / folder / "train.py", "--check")
    assert stop.value.code == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("option", ["--amp", "--compile"])
def test_several_gpus_reject_what_dataparallel_cannot_do(option, monkeypatch, capsys):
    error = rejected(monkeypatch, capsys, FOLDER / "train.py", option, gpus=2)
    assert error.startswith("DataParallel has no --amp, --compile: ")
    parse(monkeypatch, FOLDER / "train.py", option, gpus=1)


def test_cuda_needs_a_gpu(monkeypatch, capsys):
    error = rejected(monkeypatch, capsys, FOLDER / "train.py", "--device", "cuda")
    assert error == "--device cuda needs a GPU per process, and PyTorch finds 0"
