"""02: processes spawned on one machine."""

from helpers.checks import EXACT, check_as_one_process, launch


def test_both_ranks_train_evaluate_and_save(exact, tmp_path):
    result = launch(exact, "02_ddp_spawn", *EXACT, "--epochs", 2, cwd=tmp_path)
    check_as_one_process(result, tmp_path, ranks=2)
