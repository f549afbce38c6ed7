"""06, 07 and 07/fsdp.py resume exactly, and wrong weights are not saved."""

import pickle
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    copy_project,
    distance,
    each_row,
    edit,
    equal,
    lines,
    load,
    module,
    run,
    train,
    without_batch_norm,
)

SCRIPTS = {
    "04": "04_ddp_torchrun/train.py",
    "06": "06_checkpointing/train.py",
    "07": "07_slurm/train.py",
    "fsdp": "07_slurm/fsdp.py",
}
TINY = ["--width=16", "--depth=1"]  # of fsdp


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the scripts, as 04.py, 06.py, ..., with the small data and model."""
    folder = copy_project(
        tmp_path_factory.mktemp("resume") / "a project", small=("data", "model")
    )
    for name, script in SCRIPTS.items():
        shutil.copy(ROOT / script, folder / f"{name}.py")
    return folder


@pytest.fixture(scope="module")
def killed(project, tmp_path_factory):
    """The folder of a run of 06 that was killed in its second epoch."""
    folder = tmp_path_factory.mktemp("killed")
    options = ["--epochs=2", "--save-every=1"]
    train(project / "06.py", 1, *options, cwd=folder, READ="0 300 9", code=1)
    return folder


@pytest.fixture
def begun(killed, tmp_path):
    return shutil.copytree(killed, tmp_path / "begun")


@pytest.fixture
def start(project, tmp_path):
    """Start a script of the project in a folder of its own."""

    def start(name, ranks, *options, cwd=tmp_path, **given):
        options = [*(TINY if name == "fsdp" else []), *options]
        return train(project / f"{name}.py", ranks, *options, cwd=cwd, **given)

    return start


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --save-every of each start, and READ: which rank gets a signal, at which image
STOPS = ["99 1 5 15", "2 0 60 9", "2 1 70 2"]


@pytest.mark.parametrize(
    ("name", "options", "interruptions"),
    [
        ("06", ["--amp"], STOPS[1:2]),
        ("07", [], STOPS[::2]),
        ("fsdp", ["--amp", "--recompute"], STOPS[1:]),
    ],
)
def test_interrupted_and_resumed_bit_for_bit(
    name, options, interruptions, start, tmp_path
):
    """Killed and stopped, in an epoch and in an evaluation, with random augmentation.

    What is printed is what the undisturbed run prints: a stop has saved its last step.
    """
    options = ["--epochs=2", "--batch-size=16", *options]
    begin = partial(start, name, 2, *options, fault="augmentation", FLOAT32=1)
    whole = begin("--save-every=2", cwd=tmp_path / "whole")
    results = []
    for interruption in interruptions:
        every, event = interruption.split(" ", 1)
        results.append(begin("--save-every", every, READ=event, code=1))
        stopped = "\nstopped: the same command resumes\n" in results[-1].output
        assert stopped != event.endswith(" 9"), results
    results.append(begin("--save-every=2"))
    assert lines(*results) == lines(whole)
    assert equal(tmp_path / "mnist.pt", tmp_path / "whole/mnist.pt")


@pytest.mark.parametrize(("name", "ranks"), [("06", (1, 2, 3)), ("fsdp", (2, 1, 4))])
def test_resumes_on_another_number_of_ranks(name, ranks, tmp_path):
    """It trains as one process does: each image is used once per epoch.

    fsdp keeps the newest two complete checkpoints, and resumes from the newest one.
    """
    project = copy_project(tmp_path / "a project", SCRIPTS[name], small="data")
    without_batch_norm(project)
    options = ["--epochs=2", "--save-every=1", *(TINY if name == "fsdp" else [])]
    script = project / Path(SCRIPTS[name]).name

    def start(count, folder, *more, **given):
        more = [*options, f"--batch-size={36 // count}", *more]
        given = {"cwd": tmp_path / folder, "TRAIN_IMAGES": 180, **given}
        return train(script, count, *more, **given)

    whole = start(1, "whole")
    results = []
    for count in ranks:
        more = ["--shards=2"] if count == 4 else []
        code = int(count < 3)
        results.append(start(count, "run", *more, READ="0 100 9", code=code))
        if name == "fsdp":
            kept = sorted((tmp_path / "run/checkpoint").iterdir())
            assert len(kept) == 2
            if count == 1:
                (kept[1] / ".metadata").unlink()
    assert [*dict.fromkeys(lines(*results))] == lines(whole)
    assert distance(tmp_path / "run/mnist.pt", tmp_path / "whole/mnist.pt") < 1e-12
    if name == "fsdp":  # 07's page: the weights of a checkpoint in one file
        convert = "torch.distributed.checkpoint.format_utils", "dcp_to_torch"
        newest = max((tmp_path / "run/checkpoint").iterdir())
        run([sys.executable, "-m", *convert, newest, "all.pt"], tmp_path)
        weights = load(tmp_path / "all.pt")["model"]
        assert distance(weights, tmp_path / "run/mnist.pt") == 0


# What is rejected


def flip(data):
    """Change one bit in the largest tensor, where torch.load does not notice it."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("options", "images", "change", "error"),
    [
        ("--seed=2 --lr=2", 180, bytes, "'length': 180, 'seed': 2, 'lr': 2.0}"),
        ("--epochs=1", 181, bytes, "checkpoint.pt has .* give more --epochs"),
        ("", 181, flip, "ValueError: checkpoint.pt is damaged"),
    ],
)
def test_06_rejects_another_or_a_damaged_checkpoint(
    options, images, change, error, start, begun
):
    """It stays as it is, and so do the weights of the last epoch."""
    path = begun / "checkpoint.pt"
    path.write_bytes(change(path.read_bytes()))
    before = contents(begun)
    options = ["--epochs=2", *options.split()]
    failed = start("06", 1, *options, cwd=begun, TRAIN_IMAGES=images, code=1)
    assert re.search(error, failed.errors), failed
    assert contents(begun) == before


@pytest.mark.slow
def test_fsdp_compares_own_values_even_in_a_dictionary(tmp_path):
    project = copy_project(tmp_path, SCRIPTS["fsdp"], small="data")
    own = '"lr": args.lr, "own": {1: args.workers}}'
    edit(project / "fsdp.py", '"lr": args.lr}', own)
    train("fsdp.py", 1, *TINY, cwd=project)
    failed = train("fsdp.py", 1, *TINY, "--workers=1", cwd=project, code=1)
    assert "'own': {1: 0}, 'tensors'" in failed.errors, failed


@pytest.mark.slow
def test_fsdp_rejects_another_checkpoint_and_a_disk_that_is_not_shared(start, tmp_path):
    start("fsdp", 1, "--epochs=1")
    before = contents(tmp_path)
    for change, error in (("--lr=2", "'lr': 0.006,"), ("--width=32", "ismatch")):
        failed = start("fsdp", 1, "--epochs=2", change, code=1)
        assert error in failed.errors, failed
        assert contents(tmp_path) == before
    for rank in range(2):
        (tmp_path / f"own/{rank}").mkdir(parents=True)
    own = start("fsdp", 2, cwd=tmp_path / "own", fault="own_folders", code=1)
    assert "TimeoutError: 1 ranks do not see checkpoint/epoch-" in own.errors, own


def test_06_a_checkpoint_that_a_rank_sees_late(start, begun):
    for rank, file in enumerate(("checkpoint.pt", "late.pt")):
        (begun / str(rank)).mkdir()
        shutil.copy(begun / "checkpoint.pt", begun / str(rank) / file)
    result = start("06", 2, "--epochs=2", cwd=begun, fault="own_folders")
    assert "starting at {'epoch': 2, 'done': 64} on 2 ranks" in result.output


def test_06_a_disk_that_is_not_shared_is_noticed_at_the_first_save(start, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    failed = start("06", 2, fault="own_folders", code=1)
    assert "TimeoutError: 1 ranks do not see checkpoint.pt" in failed.errors, failed


def test_fsdp_first_marks_a_folder_that_it_deletes_as_incomplete(start, tmp_path):
    """Nothing is deleted here, as if a kill came first."""
    start("fsdp", 1, "--epochs=1", "--save-every=1", fault="nothing_is_deleted")
    folders = sorted((tmp_path / "checkpoint").iterdir())
    complete = [path for path in folders if (path / ".metadata").exists()]
    assert len(folders) == 3 and complete == folders[1:]


def test_06_a_save_that_fails_keeps_the_checkpoint(start, begun):
    before = (begun / "checkpoint.pt").read_bytes()
    (begun / "checkpoint.pt.tmp").mkdir()  # nothing can be written to it
    failed = start("06", 1, "--epochs=2", cwd=begun, code=1)
    assert "IsADirectoryError" in failed.errors, failed
    assert (begun / "checkpoint.pt").read_bytes() == before


def test_06_what_cannot_be_loaded_is_not_saved(project, tmp_path):
    save_file = module(project / "06.py").save_file
    save_file({"lr": 1}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: .* pathlib"):
        save_file({"output": Path("mnist.pt")}, tmp_path / "file.pt")
    assert load(tmp_path / "file.pt") == {"lr": 1}


# What check_same_model rejects, and what it accepts

# fault | script | options
DIFFERENT = """
loss_of_the_plain_model | 06 |
bfloat16_after_ddp | 04 | --amp
set_by_the_forward | 06 |
edit_on_one_rank | 04 |
another_order_on_rank_1 | 06 |
another_order_on_rank_1 | fsdp |
another_layer_on_rank_1 | fsdp |
nan_in_one_row | 06 |
nothing | 06 | --lr=1e30
nothing | fsdp | --lr=1e30
"""
HEALTHY = """
unlike_cpus | 04 | --epochs=3
zero_gradients | 06 |
bfloat16_and_frozen | 06 |
skipped_steps | 04 |
"""


@each_row(DIFFERENT)
def test_different_weights_or_nan_are_an_error(row, start, tmp_path):
    """It names a tensor, and nothing is saved.

    One NaN is found, and layers that differ, although FSDP would train them.
    """
    fault, name, options = row
    options = ["--batch-size=16", *options.split()]
    result = start(name, 2, *options, fault=fault, FLOAT32=1, code=1)
    error = r"ValueError: the [a-z0-9. ]+ differs between the ranks(, or is NaN|: )"
    assert re.search(error, result.errors), result
    assert not contents(tmp_path)


@each_row(HEALTHY)
def test_no_healthy_run_is_ended(row, start):
    fault, name, options = row
    options = ["--batch-size=16", *options.split()]
    result = start(name, 2, *options, fault=fault, FLOAT32=1)
    assert "accuracy" in result.output
