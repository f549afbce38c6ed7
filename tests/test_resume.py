"""06, 07 and 07/fsdp.py resume exactly, and what is wrong is not saved."""

import pickle
import re
import runpy
import shutil
import sys
from functools import partial

import pytest
from helpers import (
    check_close,
    copy_repository,
    edit,
    equal,
    lines,
    load,
    run,
    train,
)

SCRIPTS = {
    "06": "06_checkpointing/train.py",
    "07": "07_slurm/train.py",
    "fsdp": "07_slurm/fsdp.py",
}
TINY = ["--width=16", "--depth=1"]  # of fsdp


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with the small data."""
    return copy_repository(tmp_path_factory.mktemp("resume") / "a project", small=True)


@pytest.fixture
def start(project, tmp_path):
    """Start a script of the project in a folder of its own."""

    def start(name, ranks, *options, cwd=tmp_path, **given):
        options = [*(TINY if name == "fsdp" else []), *options]
        return train(project / SCRIPTS[name], ranks, *options, cwd=cwd, **given)

    return start


# --save-every of a start, and READ: which rank gets a signal, at which image
KILL, STOP, STOP_IN_EVALUATION = "2 0 60 9", "99 1 5 15", "2 1 70 2"


@pytest.mark.parametrize(
    ("name", "options", "interruptions"),
    [
        ("06", ["--amp"], [KILL]),
        ("07", [], [STOP, STOP_IN_EVALUATION]),
        ("fsdp", ["--amp", "--recompute"], [KILL]),
    ],
)
def test_interrupted_and_resumed_bit_for_bit(
    name, options, interruptions, start, tmp_path
):
    """With random augmentation. It prints what the undisturbed run prints.

    A stop has saved its last step.
    """
    options = ["--epochs=2", "--batch-size=16", *options]
    begin = partial(start, name, 2, *options, AUGMENT=1)
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counts"), [("06", (1, 2, 3)), ("fsdp", (2, 1, 4))])
def test_resumes_on_another_number_of_ranks(name, counts, start, tmp_path):
    """It trains as one process does: each image is used once per epoch."""
    options = ["--epochs=2", "--save-every=1"]
    begin = partial(start, name, fault="group_norm", TRAIN_IMAGES=180)
    whole = begin(1, *options, "--batch-size=36", cwd=tmp_path / "whole")
    results = []
    for count in counts:
        more = [f"--batch-size={36 // count}", *["--shards=2"] * (count == 4)]
        code = int(count != counts[-1])
        results.append(begin(count, *options, *more, READ="0 100 9", code=code))
    assert [*dict.fromkeys(lines(*results))] == lines(whole)
    check_close(tmp_path / "mnist.pt", tmp_path / "whole/mnist.pt", 1e-12)
    if name == "fsdp":  # 07's page: the weights of a checkpoint in one file
        convert = "torch.distributed.checkpoint.format_utils", "dcp_to_torch"
        newest = max((tmp_path / "checkpoint").iterdir())
        run([sys.executable, "-m", *convert, newest, "all.pt"], tmp_path)
        check_close(tmp_path / "mnist.pt", load(tmp_path / "all.pt")["model"], 0)


def test_06_waits_for_a_late_file_but_rejects_another_or_a_damaged_one(start, tmp_path):
    """It stays as it is. If rank 1 never sees a file, the disk is not shared."""
    path = tmp_path / "checkpoint.pt"
    start("06", 1, "--epochs=2", "--save-every=1", READ="0 300 9", code=1)
    before = path.read_bytes()
    for rank, name in enumerate(("checkpoint.pt", "late.pt")):
        (tmp_path / f"{rank}").mkdir()
        shutil.copy(path, tmp_path / f"{rank}/{name}")
    result = start("06", 2, "--epochs=2", fault="own_folders")
    assert "starting at {'epoch': 2, 'done': 64} on 2 ranks" in result.output
    failed = start("06", 2, "--checkpoint=new.pt", fault="own_folders", code=1)
    assert "TimeoutError: 1 ranks do not see new.pt" in failed.errors, failed
    failed = start("06", 1, "--epochs=2", "--seed=2", "--lr=2", code=1)
    assert "'seed': 2, 'lr': 2.0}" in failed.errors and path.read_bytes() == before
    data = bytearray(before)
    data[len(data) // 2] ^= 1  # in a tensor, where torch.load does not notice it
    path.write_bytes(data)
    failed = start("06", 1, "--epochs=2", code=1)
    assert "ValueError: checkpoint.pt is damaged" in failed.errors, failed


def test_06_what_cannot_be_loaded_is_not_saved(project, tmp_path):
    save_file = runpy.run_path(f"{project / SCRIPTS['06']}")["save_file"]
    save_file({"lr": 1}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: .* pathlib"):
        save_file({"output": tmp_path}, tmp_path / "file.pt")
    assert load(tmp_path / "file.pt") == {"lr": 1}


@pytest.mark.slow
def test_fsdp_keeps_two_checkpoints_and_compares_own_values(tmp_path):
    """An older one first loses .metadata: here, a kill prevents the rest."""
    own = copy_repository(tmp_path / "own", small=True) / SCRIPTS["fsdp"]
    edit(own, '"lr": args.lr}', '"lr": args.lr, "own": {1: args.workers}}')
    edit(own, "shutil.rmtree(old, ignore_errors=True)", "pass")
    train(own, 1, *TINY, "--save-every=1", cwd=tmp_path)
    folders = sorted((tmp_path / "checkpoint").iterdir())
    complete = [path for path in folders if (path / ".metadata").exists()]
    assert len(folders) > 2 and complete == folders[-2:]
    failed = train(own, 1, *TINY, "--workers=1", cwd=tmp_path, code=1)
    assert "'own': {1: 0}, 'tensors'" in failed.errors, failed


@pytest.mark.parametrize(
    ("name", "fault", "option"),
    [("06", "loss_of_the_plain_model", "--amp"), ("fsdp", None, "--lr=1e30")],
)
def test_different_weights_or_nan_are_not_saved(name, fault, option, start, tmp_path):
    """Other differences: test_checks.py."""
    options = ["--batch-size=16", option]
    failed = start(name, 2, *options, fault=fault, AUGMENT=1, code=1)
    error = (
        r"ValueError: the [a-z]+ of [a-z0-9. ]+ differs between the ranks, or is NaN"
    )
    assert re.search(error, failed.errors), failed
    assert not [*tmp_path.iterdir()]
