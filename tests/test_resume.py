"""06, fsdp.py and 07: a run resumes exactly, and what is wrong is not saved.

Also on another number of processes; and a checkpoint that does not fit is rejected.
"""

import math
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    SEED,
    copy_project,
    distance,
    each_row,
    equal,
    load,
    module,
    run_ranks,
    without_batch_norm,
)

CHECKPOINTING, FSDP = "06_checkpointing/train.py", "05_model_parallel/fsdp.py"
IMAGES, TESTS = 181, 47  # of tests/small/data.py
ALL = {"06": "train", "fsdp": "fsdp", "07": "stops"}  # the scripts of the project


def scripts(*names):
    return pytest.mark.parametrize("script", [ALL[name] for name in names], ids=names)


def faulty(names):
    return {"CHANGES": "faults", "FAULT": names}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of 06, of 07 as stops.py and of fsdp.py, with the small data and model."""
    folder = tmp_path_factory.mktemp("resume") / "a project"
    copy_project(folder, CHECKPOINTING, FSDP, small=("data", "model"))
    shutil.copy(ROOT / "07_slurm/train.py", folder / "stops.py")
    return folder


@pytest.fixture
def train(project, tmp_path):
    """Train in forked ranks in a folder of its own; `read` is READ of the last rank."""

    def train(script, ranks, *options, read=None, **given):
        if script == "fsdp":
            options = ["--width", 16, "--depth", 1, *options]
        if read:
            given["READ"] = f"{ranks - 1} {read}"
        given = {"cwd": tmp_path, **given}
        given["cwd"].mkdir(exist_ok=True)
        path = project / f"{script}.py"
        return run_ranks(path, ranks, "--seed", SEED, *options, **given)

    return train


def files_of(folder):
    """The files of a run and when they were written."""
    files = [path for path in folder.glob("**/*.*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files}


def saved(result):
    """The lines about saves: epoch, part of it and loss."""
    return re.findall(r"^epoch .*%  loss \d\.\d{4}$", result.output, re.M)


def results(result):
    """What the lines of the epochs say, without their time."""
    names = ("epoch", "loss", "accuracy")
    return [[line[name] for name in names] for line in result.epochs()]


@scripts("06", "fsdp")
def test_killed_and_resumed_bit_for_bit(script, train, tmp_path):
    """In the second epoch, and twice in its evaluation, which is then all that is left.

    Augmentation and dropout draw what they do undisturbed, and the same is printed.
    """
    options = ["--batch-size", 16, "--epochs", 2, "--save-every", 3]
    train = partial(train, CHANGES="in_data own_progress")
    undisturbed = train(script, 2, *options, cwd=tmp_path / "whole")
    begin = "no checkpoint" + ".pt" * (script == "train") + ": starting on 2 ranks\n"
    assert begin in undisturbed.output and len(saved(undisturbed)) == 4
    in_epoch = math.ceil(IMAGES / 2) + math.ceil(TESTS / 2)  # images that a rank reads
    train(script, 2, *options, read=f"{in_epoch + 50} 9", code=9)
    options += ["--save-every", 1]
    read = (IMAGES - 96) // 2 + 2
    in_evaluation = train(script, 2, *options, read=f"{read} 9", code=9)
    place = "resuming from .*(epoch': 2, 'done': 96|2-done-0*96)"
    assert re.search(place, in_evaluation.output)
    # it saves after each of three steps: the undisturbed run does after the last one
    assert saved(in_evaluation)[2:] == saved(undisturbed)[-1:]
    drawn, again = [
        re.findall("^drew (.*)", each.output, re.M)
        for each in (undisturbed, in_evaluation)
    ]
    assert len(drawn) == len({*drawn}) and {*again} < {*drawn}
    before = files_of(tmp_path)
    train(script, 2, *options, read="2 9", code=9)
    assert files_of(tmp_path) == before
    rest = train(script, 2, *options)
    assert results(rest) == results(undisturbed)[-1:] and begin not in rest.output
    again = train(script, 2, *options).output
    assert "finished after epoch 2: mnist.pt\n" in again and "  loss " not in again
    assert script == "fsdp" or "'own': tensor([inf, inf]" in again
    for file in ("mnist.pt", "best.pt"):
        assert equal(tmp_path / file, tmp_path / "whole" / file)
    assert not list(tmp_path.glob("*.tmp"))


@scripts("07", "fsdp")
def test_stopped_and_resumed_bit_for_bit(script, train, tmp_path):
    """In the second epoch after the step of the signal, then in its evaluation."""
    options = ["--epochs", 2, "--batch-size", 16, "--save-every", 99]
    train = partial(train, CHANGES="in_data started")
    undisturbed = train(script, 2, *options, cwd=tmp_path / "whole")
    in_epoch = math.ceil(IMAGES / 2) + math.ceil(TESTS / 2)
    for read, done in ((in_epoch + 20, 64), (math.ceil((IMAGES - 64) / 2), IMAGES)):
        stopped = train(script, 2, *options, read=f"{read} 15", code=1)
        [text] = re.findall("^stopped at (.*); rerun the", stopped.output, re.M)
        end = eval(text, {"inf": math.inf})
        assert (end["epoch"], end["done"]) == (2, done), stopped
        assert script == "fsdp" or not stopped.errors, stopped  # DCP of 2.8 warns
    last = train(script, 2, *options)
    place = f"checkpoint.pt at {end}" if script == "stops" else f"2-done-{IMAGES:012}"
    assert re.search(f"resuming from .*{re.escape(place)} on 2 ranks\n", last.output)
    assert results(last) == results(undisturbed)[-1:]
    for file in ("mnist.pt", "best.pt"):
        assert equal(tmp_path / file, tmp_path / "whole" / file)


@scripts("06", "fsdp", "07")
def test_a_checkpoint_that_was_not_there_at_the_start_is_not_replaced(
    script, train, tmp_path
):
    """As when a disk is mounted late, or a run is started twice. Again, it resumes."""
    options = ["--batch-size", 50, "--epochs"]
    train(script, 2, *options, 1)
    name = "checkpoint" if script == "fsdp" else "checkpoint.pt"
    (tmp_path / name).rename(tmp_path / f"late {name}")
    before = sorted(files_of(tmp_path / f"late {name}").values())
    failed = train(script, 2, *options, 2, code=1, **faulty("late_disk"))
    assert re.search(f"FileExistsError: {name} .* at the start", failed.errors), failed
    assert sorted(files_of(tmp_path / name).values()) == before
    again = train(script, 2, *options, 2)
    assert "resuming from " in again.output and len(again.epochs()) == 1


@scripts("06", "fsdp", "07")
def test_fewer_epochs_than_a_checkpoint_has_begun_are_an_error(script, train, tmp_path):
    """Or weights from the middle of an epoch would be saved as finished."""
    options = ["--batch-size", 16, "--save-every", 1, "--epochs"]
    read = math.ceil(IMAGES / 2) + math.ceil(TESTS / 2) + 60
    train(script, 2, *options, 2, read=f"{read} 9", code=9)
    before = files_of(tmp_path)
    failed = train(script, 2, *options, 1, code=1)
    error = "ValueError: it is in epoch 2: give more --epochs"
    assert failed.errors.count(error) == 2 and files_of(tmp_path) == before, failed
    assert len(train(script, 2, *options, 2).epochs()) == 1


@pytest.mark.parametrize(
    ("path", "options", "more", "rounding"),
    [
        (CHECKPOINTING, [], {1: ["--accumulate", 2], 3: []}, 1e-10),
        (
            FSDP,
            ["--width", 16, "--depth", 1],
            {1: ["--accumulate", 2], 4: ["--shards", 2]},
            1e-5,  # it computes the loss in float32
        ),
    ],
    ids=["06", "fsdp"],
)
def test_resumes_on_any_number_of_processes(path, options, more, rounding, tmp_path):
    """As one process does; fsdp.py from the newest complete one, and it keeps two."""
    project = without_batch_norm(
        copy_project(tmp_path / "a project", path, small="data")
    )
    options = ["--seed", SEED, "--epochs", 2, "--save-every", 1, *options]

    def train(folder, ranks, size, *options, **given):
        # 180 images: with 181 some ranks repeat one
        given = {"cwd": tmp_path / folder, "TRAIN_IMAGES": 180, **given}
        given["cwd"].mkdir(exist_ok=True)
        script = project / Path(path).name
        return run_ranks(script, ranks, "--batch-size", size, *options, **given)

    whole = train("whole", 1, 36, *options)
    train("killed", 2, 18, *options, READ="1 60 9", code=9)
    newest = tmp_path / "killed/checkpoint.pt"
    if path == FSDP:
        kept = sorted((tmp_path / "killed/checkpoint").iterdir())
        assert [each.name[-3:] for each in kept] == ["072", "108"]
        (kept[1] / ".metadata").rename(tmp_path / "incomplete")
        shutil.copytree(kept[1], kept[1].with_name("epoch-00000001-done-000000000001"))
        newest = kept[0]
    # no checkpoint is saved twice
    assert "existing checkpoint" not in whole.errors, whole
    for ranks, others in more.items():
        shutil.copytree(tmp_path / "killed", tmp_path / f"on {ranks}")
        size = 36 // max(ranks, 2)
        resumed = train(f"on {ranks}", ranks, size, *options, *others)
        place = newest.relative_to(tmp_path / "killed")
        assert f"resuming from {place}" in resumed.output
        assert results(resumed) == results(whole)
        files = [tmp_path / folder / "mnist.pt" for folder in (f"on {ranks}", "whole")]
        assert distance(*files) < rounding
        if path == FSDP:
            assert len(list((tmp_path / f"on {ranks}/checkpoint").iterdir())) == 2


@scripts("06", "fsdp", "07")
def test_workers_of_all_ranks_and_starts_draw_other_random_numbers(script, train):
    """A resumed epoch would otherwise have the augmentation of the first one again."""
    options, drawn = ["--batch-size", 16, "--workers", 2, "--epochs"], []
    for epochs in (1, 2):
        result = train(script, 2, *options, epochs, CHANGES="in_data")
        drawn += re.findall("^drew (.*)", result.output, re.M)
    assert len(drawn) == len({*drawn}) == 2 * (182 + 48)


# scripts | fault | options | what differs, or is not finite
FAULTS = """
06 fsdp 07 | other_batches | | batches
fsdp 07 | other_test_sets | | test_length
06 07 | plain | | gradient_norm
06 | plain | --lr 0.001 | gradient_norm
06 | frozen plain | | gradient_norm
06 | anew | | weight_norm
06 fsdp 07 | other_seed | | seed
06 | other_batch_size | | batch_size
fsdp | other_save_every | | save_every
fsdp | other_order | | names
06 | overflow | | gradient_norm
06 fsdp 07 | nan_image | | gradient_norm
06 fsdp | nothing | --lr 1e30 | gradient_norm
06 fsdp | broken_step | --save-every 1 | weight_norm
"""


@each_row(FAULTS)
def test_06_07_fsdp_ranks_that_differ_or_are_not_finite_are_an_error(
    row, train, tmp_path
):
    """Before any file is written; it names what differs, and shows the values."""
    names, fault, options, error = row
    options = ["--batch-size", 16, "--epochs", 1, *options.split()]
    given = {"code": 1, **faulty(fault)}
    if fault == "nothing":  # the rate is too large in float32
        given["FLOAT32"] = 1
    for name in names.split():
        result = train(ALL[name], 2, *options, **given)
        text = f"ValueError: {error} differs between the ranks, or is not finite: .*"
        found = re.findall(text, result.errors)
        assert len(found) == 2 and found[0] == found[1], result
        if error in ("seed", "batch_size", "save_every"):
            assert re.search(r": \[(0, 1|1, 2)\]$", found[0])
        assert not files_of(tmp_path)


def test_06_frozen_infinities_and_zero_gradients_are_no_error(train):
    result = train("train", 3, "--batch-size", 31, **faulty("frozen zero_loss"))
    assert len(result.epochs()) == 1


def test_06_two_unlike_cpus_train_together(train):
    """Their weights differ in the last bits, which is no error."""
    options = ["--batch-size", 16, "--save-every", 3, "--epochs", 8]
    result = train("train", 2, *options, FLOAT32=1, **faulty("unlike_cpus"))
    kinds = {"DEFAULT", "AVX2"}
    assert len(result.epochs()) == 8 and kinds < {*result.output.split()}, result


def test_06_a_checkpoint_that_not_all_nodes_see_is_an_error_but_not_a_late_one(train):
    options = ["--batch-size", 60, "--epochs"]
    train("train", 2, *options, 1, **faulty("own_disks"))
    result = train("train", 2, *options, 2, code=1, **faulty("own_disks"))
    error = "ValueError: checkpoint.pt is not on a disk that all nodes"
    assert result.errors.count(error) == 2
    late = train("train", 2, *options, 2, **faulty("late_file"))
    assert "resuming from checkpoint.pt at {'epoch': 2, " in late.output
    old = train("train", 2, *options, 3, code=1, **faulty("own_disks"))  # rank 1's
    assert old.errors.count("ValueError: epoch differs between the ranks") == 2


@pytest.mark.parametrize("script", ["train", "fsdp"], ids=["06", "fsdp"])
def test_only_a_better_epoch_replaces_the_best_weights(script, train, tmp_path):
    """Not one that is not a number, also after a resume; and a symlink stays one."""
    (tmp_path / "disk").mkdir()
    for name in ("best.pt", "mnist.pt"):
        (tmp_path / name).symlink_to(f"disk/{name}")
    options, scores = ["--batch-size", 99], "nan 0.1 0.3 0.2"
    given = {"CHANGES": "scored", "SCORES": scores}
    train(script, 2, *options, "--epochs", 4, **given)
    assert equal(tmp_path / "disk/best.pt", tmp_path / "epoch-3.pt")
    assert equal(tmp_path / "disk/mnist.pt", tmp_path / "epoch-4.pt")
    train(script, 2, *options, "--epochs", 5, **given | {"SCORES": "0.25"})
    assert equal(tmp_path / "best.pt", tmp_path / "epoch-3.pt")
    assert (tmp_path / "best.pt").is_symlink()


# What is rejected


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in a tensor, where torch.load does not notice it
    path.write_bytes(data)


OTHER = f"checkpoint.pt has {{'length': 181, 'seed': {SEED}, 'lr': 0.5, 'names': ["


@pytest.mark.parametrize(
    ("options", "change", "error"),
    [
        (["--lr", 2], None, f"ValueError: {OTHER}"),
        (["--seed", 2], None, f"ValueError: {OTHER}"),
        (
            [],
            lambda path: path.write_bytes(path.read_bytes()[:-1000]),
            "checkpoint.pt is damaged",
        ),
        ([], flip_a_bit, "ValueError: checkpoint.pt is damaged"),
        (
            [],
            lambda path: torch.save([path], path),
            "UnpicklingError: Weights only load failed",
        ),
        (
            [],
            lambda path: torch.save({"weight": 1}, path),
            "checkpoint.pt has None, not {",
        ),
        ([], "swapped", f"ValueError: {OTHER}"),
    ],
    ids="lr seed truncated bit code weights order".split(),
)
def test_06_rejects_a_checkpoint_of_another_run(
    options, change, error, train, tmp_path
):
    """Or a damaged one; and it stays as it is."""
    given = ["--batch-size", 50, "--lr", 0.5, "--epochs"]
    train("train", 1, *given, 1)
    path = tmp_path / "checkpoint.pt"
    fault = "nothing"
    if isinstance(change, str):
        fault = change
    elif change:
        change(path)
    before = path.read_bytes()
    again = train("train", 1, *given, 2, *options, code=1, **faulty(fault))
    assert error in again.errors, again
    assert path.read_bytes() == before


def test_fsdp_rejects_a_checkpoint_of_another_run(train, tmp_path):
    """A smaller model would otherwise be loaded, in part."""
    options = ["--batch-size", 50, "--epochs", 1]
    train("fsdp", 2, *options)
    saved = sorted((tmp_path / "checkpoint").iterdir())
    for change in ("--lr=1", "--width=32"):
        again = train("fsdp", 2, *options, "--epochs", 2, change, code=1)
        error = "checkpoint has {.*}, not {|[Ss]ize mismatch"
        assert re.search(error, again.errors), again
        assert sorted((tmp_path / "checkpoint").iterdir()) == saved


def test_fsdp_fails_at_the_first_save_if_no_run_could_resume(project, train, tmp_path):
    """An unused weight; a folder that a rank does not see. Wrapped blocks resume."""
    options = ["--batch-size", 90, "--epochs"]
    train("fsdp", 2, *options, 1, cwd=tmp_path / "w")
    train("fsdp", 2, *options, 2, cwd=tmp_path / "w", **faulty("wrapped"))
    result = train("fsdp", 2, "--save-every", 1, code=1, **faulty("unused"))
    error = "ValueError: unused.weight has had no gradient: use it, or freeze it"
    assert error in result.errors, result
    own = {"cwd": tmp_path / "own", "code": 1, **faulty("own_disks")}
    for _ in range(2):  # the second start finds a checkpoint on rank 0's disk
        result = train("fsdp", 2, "--save-every", 1, **own)
        error = ".metadata is not on a disk that all nodes share"
        assert result.errors.count(error) == 2, result


@pytest.mark.parametrize("file", ["checkpoint.pt", "best.pt", "mnist.pt"])
def test_06_a_save_that_fails_ends_the_run_and_keeps_the_file_before(
    file, train, tmp_path
):
    """And the same command resumes the run when there is room again."""
    options, given = ["--batch-size", 50, "--epochs"], {"CHANGES": "scored"}
    train("train", 1, *options, 1, SCORES=0.1, **given)
    before = (tmp_path / file).read_bytes()
    (tmp_path / f"{file}.tmp").mkdir()  # nothing can be written to it
    failed = train("train", 1, *options, 2, code=1, SCORES=0.2, **given)
    assert "IsADirectoryError" in failed.errors
    assert (tmp_path / file).read_bytes() == before
    (tmp_path / f"{file}.tmp").rmdir()
    train("train", 1, *options, 2, SCORES="0.2 0.2", **given)
    assert (tmp_path / file).read_bytes() != before
    assert load(tmp_path / "checkpoint.pt")["progress"]["best"] == 0.2


def test_06_what_cannot_be_loaded_is_not_saved(project, tmp_path):
    save_file = module(project / "train.py").save_file
    save_file({"lr": 1}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: .* pathlib"):
        save_file({"output": Path("mnist.pt")}, tmp_path / "file.pt")
    assert load(tmp_path / "file.pt") == {"lr": 1}
