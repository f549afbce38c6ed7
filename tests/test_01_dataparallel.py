"""01: one process, and DataParallel where it has several GPUs."""


import pytest
import torch
from helpers.checks import EXACT, check_as_one_process, launch
from helpers.paths import DIGITS, ROOT
from helpers.scripts import load_script, parse

SCRIPT = ROOT / "01_dataparallel/train.py"


def test_trains_evaluates_and_saves(exact, tmp_path):
    options = [*EXACT, "--epochs", 2]
    result = launch(exact, "01_dataparallel", *options, cwd=tmp_path, OMP_NUM_THREADS="1")
    check_as_one_process(result, tmp_path, ranks=1, shuffle=True)


class Split(torch.nn.Module):
    """In place of DataParallel, which needs GPUs."""

    def __init__(self, net):
        super().__init__()
        self.net = net


@pytest.mark.parametrize(("gpus", "options"), [
    (1, []), (2, []), (2, ["--amp"]), (2, ["--compile"]),
])
def test_several_gpus_share_a_batch_but_not_with_amp_or_compile(gpus, options, monkeypatch):
    """The threads of DataParallel would compute in float16."""
    args = parse(monkeypatch, SCRIPT, *options, "--data-dir", DIGITS, gpus=gpus)
    script = load_script(SCRIPT)
    assert args.device == "cuda"
    monkeypatch.setattr("torch.nn.Module.to", lambda self, *args, **kwargs: self)  # there is no GPU
    monkeypatch.setattr("torch.nn.DataParallel", Split)
    with pytest.raises(ValueError if options else (AssertionError, RuntimeError)) as stop:
        script.train(args)
    if options:
        assert str(stop.value).startswith("--amp and --compile need one GPU")
    else:  # it stops at the first tensor on a GPU
        (train,) = [entry for entry in stop.traceback if entry.name == "train"]
        assert isinstance(train.locals["model"], Split) == (gpus > 1)
