"""01: one process; and what the options of all scripts have in common."""

import pytest
from helpers import FOLDERS, ROOT, parse, rejected

SCRIPT = ROOT / "01_dataparallel/train.py"


# One thread: two are slow where a core is busy
@pytest.mark.launch("01_dataparallel", "--epochs", 3, OMP_NUM_THREADS="1")
def test_trains_evaluates_and_saves(launched):
    launched.check(ranks=1)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_script_rejects_a_wrong_option(folder, monkeypatch, capsys):
    for options, error in (
        ("--epochs 0", "argument --epochs: must be above 0, not 0"),
        ("--epochs three", "argument --epochs: invalid positive_int value: 'three'"),
        ("--lr nan", "argument --lr: must be above 0, not nan"),
        ("--output no/such/folder/m.pt", "cannot write no/such/folder/m.pt; name a file in a"),
        ("--output .", "argument --output: cannot write .; name a file in a writable folder"),
        ("--colour red", "unrecognized arguments: --colour red"),
    ):
        script = ROOT / folder / "train.py"
        assert error in rejected(monkeypatch, capsys, script, *options.split(), LOCAL_RANK=0)


@pytest.mark.parametrize("folder", FOLDERS[1:4] + FOLDERS[5:])
def test_sync_bn_needs_gpus(folder, monkeypatch, capsys):
    script = ROOT / folder / "train.py"
    error = rejected(monkeypatch, capsys, script, "--sync-bn", LOCAL_RANK=0)
    assert error == "--sync-bn needs GPUs"


@pytest.mark.parametrize("folder", FOLDERS[:5])  # from 06 on it looks at the checkpoint as well
def test_check_ends_after_the_options(folder, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, ROOT / folder / "train.py", "--check")
    assert stop.value.code == 0
    number_of_gpus = "0\n" if folder == "04_ddp_torchrun" else ""  # for its run.sh
    assert capsys.readouterr() == (number_of_gpus, "")


@pytest.mark.parametrize("option", ["--amp", "--compile"])
def test_several_gpus_reject_what_dataparallel_cannot_do(option, monkeypatch, capsys):
    error = rejected(monkeypatch, capsys, SCRIPT, option, gpus=2)
    assert error.startswith("DataParallel has no --amp, --compile: ")
    parse(monkeypatch, SCRIPT, option, gpus=1)


def test_cuda_needs_a_gpu(monkeypatch, capsys):
    error = rejected(monkeypatch, capsys, SCRIPT, "--device", "cuda")
    assert error == "--device cuda needs a GPU per process, and PyTorch finds 0"
