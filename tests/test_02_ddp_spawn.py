"""02: processes spawned on one machine."""

import pytest


@pytest.mark.launch("02_ddp_spawn", "--epochs", 3)
def test_both_ranks_train_evaluate_and_save(launched):
    launched.check()
