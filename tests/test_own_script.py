"""Add DDP to your own script: copies/own.py with own_ddp.patch is own.py on several processes."""

import shutil

import pytest
import torch
from helpers.checks import check_rank_0_saves, distance
from helpers.projects import COPIES, apply, edit
from helpers.ranks import run_ranks

SHORT = [("SEED = 30,", "SEED = 8,"), ("patience=2", "patience=0, threshold=0.4")]
EXACT = [("    torch.manual_seed(SEED)\n",
          "    torch.manual_seed(SEED)\n    torch.set_default_dtype(torch.float64)\n"),
         ("0.01 * torch.randn_like(points)", "0")]
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
    edit(folder, "own.py", *SHORT, *EXACT, *SAME_ORDER)
    result = run_ranks("own.py", 1, cwd=folder)
    rates = {line.split()[-1] for line in result.output.splitlines()}
    assert len(result.output.splitlines()) == 8 and len(rates) > 1, result
    return folder, result.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_ddp_it_computes_what_one_process_does(ranks, one, tmp_path):
    """Validation losses, learning rates, and the weights of the best epoch."""
    shutil.copy(COPIES / "own.py", tmp_path)
    apply(tmp_path, "own_ddp.patch")
    edit(tmp_path, "own.py", *SHORT, *EXACT)
    result = run_ranks("own.py", ranks, cwd=tmp_path, WITNESS=tmp_path / "witness")
    assert result.output == one[1], result
    assert distance(tmp_path / "best.pt", one[0] / "best.pt") < 1e-12
    check_rank_0_saves(tmp_path, ranks)


def test_noise_differs_between_ranks_but_not_the_data_and_the_seed_sets_the_order(tmp_path):
    shutil.copy(COPIES / "own.py", tmp_path)
    apply(tmp_path, "own_ddp.patch")
    seen = "[*train_set[:], *test_set[:], list(train_sampler), noise]"
    seen = f"torch.save({seen}, f'{{SEED}}-{{rank}}')\n            loss.backward()"
    edit(tmp_path, "own.py", ("SEED = 30, 0", 'SEED = 1, int(os.environ["SEED"])'),
         ("points = points + 0.01 * ", "noise = "), ("loss.backward()", seen))
    orders = []
    for seed in range(2):
        run_ranks("own.py", 2, cwd=tmp_path, SEED=seed)
        one, other = [torch.load(tmp_path / f"{seed}-{rank}") for rank in range(2)]
        assert all(map(torch.equal, one[:4], other[:4]))  # points and labels of both sets
        assert sorted(one[4] + other[4]) == [*range(1200)]
        assert one[5].shape == other[5].shape and not torch.equal(one[5], other[5])
        orders.append(one[4])
    assert orders[0] != orders[1]
