"""04: processes started by torchrun."""

import shutil
import sys

import pytest
from helpers import DIGITS, ROOT, bare_accuracy, copy_project, distance, load_script, run, without_batch_norm
from test_02_ddp_spawn import check_witness

FOLDER = ROOT / "04_ddp_torchrun"
RUN = FOLDER / "run.sh"
WITNESS = {"PYTHONPATH": str(ROOT / "tests/witness")}


def test_both_ranks_train_evaluate_and_save(tmp_path):
    weights, witness = tmp_path / "weights.pt", tmp_path / "witness"
    command = ["bash", RUN, "--data-dir", DIGITS, "--output", weights]
    result = run(command, tmp_path, WITNESS=str(witness), **WITNESS)
    assert result.code == 0, result
    epochs = result.epochs()
    assert [line["epoch"] for line in epochs] == ["1", "2", "3"], result
    assert float(epochs[-1]["accuracy"]) >= 0.95, result
    assert epochs[-1]["accuracy"] == f"{bare_accuracy(weights):.4f}", result
    check_witness(witness, epochs)


def test_three_ranks_with_a_remainder(tmp_path):
    # neither 359 test images nor the last batches are divisible by 3 ranks
    weights, witness = tmp_path / "weights.pt", tmp_path / "witness"
    command = ["bash", RUN, "--epochs", 1, "--data-dir", DIGITS, "--output", weights, "--batch-size", 50]
    result = run(command, tmp_path, NPROC="3", WITNESS=str(witness), **WITNESS)
    assert result.code == 0, result
    epochs = result.epochs()
    assert epochs[0]["accuracy"] == f"{bare_accuracy(weights):.4f}", result
    check_witness(witness, epochs, world_size=3)


class TestSameStep:
    """A batch may be cut into ranks and accumulated parts: the weights after an epoch are those of the whole batch.

    BatchNorm's statistics of a part differ from those of the whole, so the copied network has GroupNorm instead.
    """

    @pytest.fixture(scope="class")
    def project(self, tmp_path_factory):
        project = tmp_path_factory.mktemp("project")
        copy_project(project, FOLDER / "train.py")
        shutil.copy(RUN, project)
        without_batch_norm(project)
        return project

    @pytest.fixture(scope="class")
    def whole(self, project):
        return self.train(project, "whole.pt", 1, "--batch-size", 192)

    @staticmethod
    def train(project, name, nproc, *options):
        command = ["bash", "run.sh", "--epochs", 1, "--data-dir", "common", "--output", name, *options]
        result = run(command, project, NPROC=str(nproc))
        assert result.code == 0, result
        return project / name

    def test_two_ranks(self, project, whole):
        assert distance(whole, self.train(project, "two.pt", 2, "--batch-size", 96)) < 1e-4

    def test_two_ranks_that_accumulate(self, project, whole):
        # a rank's last window has two of four batches, and the second is short
        options = ["--batch-size", 24, "--accumulate", 4]
        assert distance(whole, self.train(project, "accumulated.pt", 2, *options)) < 1e-4

    def test_a_full_divisor_for_the_short_window_would_be_seen(self, project, whole):
        script = project / "train.py"
        right = "window = min(args.accumulate * args.batch_size, len(train_sampler) - first * args.batch_size)"
        text = script.read_text()
        assert right in text
        script.write_text(text.replace(right, "window = args.accumulate * args.batch_size"))
        try:
            options = ["--batch-size", 24, "--accumulate", 4]
            assert distance(whole, self.train(project, "wrong.pt", 2, *options)) > 1e-3
        finally:
            script.write_text(text)


def test_a_copy_runs_in_another_project(tmp_path):
    # a stray package of the same name one level up must not win over the copied one
    stray = tmp_path / "common"
    stray.mkdir()
    (stray / "__init__.py").write_text("raise ImportError('the wrong common')")
    script = copy_project(tmp_path / "my project", FOLDER / "train.py")
    command = ["torchrun", "--standalone", "--nproc-per-node=2", script, "--epochs", 1, "--data-dir", DIGITS]
    result = run(command, tmp_path, OMP_NUM_THREADS="1")
    assert result.code == 0, result
    assert result.epochs()[0]["accuracy"] == f"{bare_accuracy(tmp_path / 'mnist.pt'):.4f}", result


def test_exits_cleanly_every_time(tmp_path):
    for _ in range(6):
        result = run(["bash", RUN, "--epochs", 1, "--data-dir", DIGITS, "--batch-size", 512], tmp_path, limit=60)
        assert result.code == 0, result
        assert result.errors == "", result


def test_a_failing_rank_ends_the_job(tmp_path):
    command = ["bash", RUN, "--epochs", 1, "--data-dir", DIGITS]
    result = run(command, tmp_path, limit=60, WITNESS=str(tmp_path / "witness"), FAULTY_RANK="1", **WITNESS)
    assert result.code == 1, result
    assert "RuntimeError: planted by the test" in result.errors
    assert not (tmp_path / "mnist.pt").exists()


def test_without_torchrun_it_says_the_command(tmp_path):
    result = run([sys.executable, FOLDER / "train.py"], tmp_path)
    assert result.code == 2, result
    assert f"start it with torchrun: torchrun --standalone --nproc-per-node=2 {FOLDER / 'train.py'}" in result.errors
    assert len(result.errors.splitlines()) == 2, result


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr("sys.argv", ["train.py"])
    for script in ("train.py", "selftest.py"):
        with pytest.raises(SystemExit):
            load_script(FOLDER / script).parse_args()
        assert "error: more processes than GPUs (2): start fewer, or use --device cpu" in capsys.readouterr().err


def test_selftest_passes(tmp_path):
    result = run(["bash", RUN, "selftest.py"], tmp_path, NPROC="3")
    assert result.code == 0, result
    lines = result.output.splitlines()
    for rank in range(3):
        assert sum(line.startswith(f"rank {rank} on ") and "gloo" in line for line in lines) == 1, result
    assert sum(line.startswith("all_reduce ") and line.endswith(" GB/s") for line in lines) == 3, result
    assert lines[-1] == "OK: all checks passed on 3 ranks"


def test_selftest_names_the_rank_and_the_check(tmp_path):
    command = ["bash", RUN, "selftest.py", "--timeout", 3]
    result = run(command, tmp_path, WITNESS="/dev/null", FAULTY_RANK="1", **WITNESS)
    assert result.code == 1, result
    last = result.output.splitlines()[-1]
    assert last.startswith("FAILED: all_reduce sum: ") and "rank 1 on " in last, result
    assert "planted by the test" in last
