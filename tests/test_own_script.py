"""Add DDP to your own script: copies/own.py with own_ddp.patch is own.py on several processes."""

import shutil

import pytest
from helpers.checks import distance
from helpers.commands import WITNESS
from helpers.projects import COPIES, apply, edit
from helpers.ranks import run_ranks

SHORT = [("EPOCHS = 30", "EPOCHS = 8"), ("patience=2", "patience=0, threshold=0.4")]
EXACT = ("    torch.manual_seed(0)\n",
         "    torch.manual_seed(0)\n    torch.set_default_dtype(torch.float64)\n")
SAME_ORDER = [
    ("shuffle=True", "sampler=sampler"),
    ("    train_loader =", "    sampler = torch.utils.data.DistributedSampler(train_set, 1, 0)\n"
     "    train_loader ="),
    ("        model.train()\n", "        sampler.set_epoch(epoch)\n        model.train()\n"),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of own.py after a run as it is, except for the order of the samples."""
    folder = tmp_path_factory.mktemp("one")
    shutil.copy(COPIES / "own.py", folder)
    edit(folder, "own.py", *SHORT, EXACT, *SAME_ORDER)
    result = run_ranks("own.py", 1, cwd=folder)
    assert result.code == 0, result
    rates = {line.split()[-1] for line in result.output.splitlines()}
    assert len(result.output.splitlines()) == 8 and len(rates) > 1, result
    return folder, result.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_ddp_it_computes_what_one_process_does(ranks, one, tmp_path):
    """Validation losses, learning rates, and the weights of the best epoch."""
    shutil.copy(COPIES / "own.py", tmp_path)
    apply(tmp_path, "own_ddp.patch")
    edit(tmp_path, "own.py", *SHORT, EXACT)
    settings = {**WITNESS, "WITNESS": tmp_path / "witness"}
    result = run_ranks("own.py", ranks, cwd=tmp_path, **settings)
    assert (result.code, result.output) == (0, one[1]), result
    assert distance(tmp_path / "best.pt", one[0] / "best.pt") < 1e-12
    saves = [line for line in (tmp_path / "witness").read_text().splitlines() if "saves" in line]
    assert {line.split()[0] for line in saves} == {"0"}
