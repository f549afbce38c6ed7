"""06, fsdp.py and 07: a run that is stopped resumes as if nothing had happened.

Also on another number of processes; and a checkpoint that does not fit is rejected.
"""

import math
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (SEED, bits, copy_project, distance, equal, exit_codes, free_port, load, module,
    run_rank, run_ranks, start, without_batch_norm)

CHECKPOINTING, FSDP = "06_checkpointing/train.py", "05_model_parallel/fsdp.py"
IMAGES, TESTS = 181, 47  # of tests/small/data.py


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of 06 and fsdp.py with the small data, and for 06 the small network with dropout."""
    folder = tmp_path_factory.mktemp("resume") / "a project"
    copy_project(folder, CHECKPOINTING, FSDP, small=("data", "model"))
    shutil.copy(Path(__file__).parent / "small/scored.py", folder)
    return folder


@pytest.fixture
def train(project, tmp_path):
    """Train in forked ranks and in a folder of its own; `stop` is for READ of the small data."""
    def train(script, ranks, *options, stop=None, cwd=tmp_path, **given):
        given |= {"READ": f"{ranks - 1} {stop} 15"} if stop else {}
        return run_ranks(project / script, ranks, "--seed", SEED, *options, cwd=cwd, **given)

    return train


def stopped_at(result):
    """The progress at which a run was stopped."""
    [text] = re.findall("^stopped at (.*); rerun the same command to resume$", result.output, re.M)
    return eval(text, {"inf": math.inf})


@pytest.mark.parametrize(("script", "options"), [
    ("train.py", ["--batch-size", 16]), ("fsdp.py", ["--batch-size", 16, "--depth", 1]),
], ids=["06", "fsdp"])
def test_stopped_and_resumed_bit_for_bit(script, options, train, tmp_path):
    """In the second epoch, then in its evaluation, which alone is left; then nothing is left.

    A signal is counted in the step after the one in which it came, or at the evaluation's start.
    """
    options += ["--epochs", 2, "--save-every", 3]
    (whole := tmp_path / "whole").mkdir()
    undisturbed = train(script, 2, *options, cwd=whole)
    in_epoch = math.ceil(IMAGES / 2) + math.ceil(TESTS / 2)  # images that a rank reads
    stopped = train(script, 2, *options, stop=in_epoch + 20)
    done = stopped_at(stopped)["done"]
    assert done in (96, 128) and stopped_at(stopped)["epoch"] == 2  # as a thread gets the signal
    in_evaluation = train(script, 2, *options, stop=math.ceil((IMAGES - done) / 2))
    assert "resuming from " in in_evaluation.output
    assert stopped_at(in_evaluation).items() >= {"epoch": 2, "done": IMAGES}.items()
    rest = train(script, 2, *options)
    [line], last = rest.epochs(), undisturbed.epochs()[-1]
    assert (line["loss"], line["accuracy"]) == ("-", last["accuracy"]), rest
    assert train(script, 2, *options).epochs() == []
    for file in ("mnist.pt", "best.pt"):
        assert equal(tmp_path / file, whole / file)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("path", "options", "more", "rounding"), [
    (CHECKPOINTING, [], {1: ["--accumulate", 2], 3: []}, 1e-10),
    (FSDP, ["--width", 16, "--depth", 1],
     {1: ["--accumulate", 2], 4: ["--shards", 2]}, 1e-5),  # it computes the loss in float32
], ids=["06", "fsdp"])
def test_resumes_on_any_number_of_processes(path, options, more, rounding, tmp_path):
    """With the accuracies and weights of one process that is never stopped.

    fsdp.py resumes from its newest complete checkpoint, of the two that it keeps; older ones are
    removed, also incomplete ones.
    """
    project = without_batch_norm(copy_project(tmp_path / "a project", path, small="data"))
    options = ["--seed", SEED, "--epochs", 2, "--save-every", 1, *options]

    def train(folder, ranks, size, *options, **given):  # 180 images: with 181 some ranks repeat one
        given = {"cwd": tmp_path / folder, "TRAIN_IMAGES": 180, **given}
        given["cwd"].mkdir(exist_ok=True)
        script = project / Path(path).name
        return run_ranks(script, ranks, "--batch-size", size, *options, **given)

    whole = train("whole", 1, 36, *options)
    train("stopped", 2, 18, *options, READ="1 40 15")
    newest = tmp_path / "stopped/checkpoint.pt"
    if path == FSDP:
        kept = sorted((tmp_path / "stopped/checkpoint").iterdir())
        assert [each.name[-3:] for each in kept] in (["108", "144"], ["144", "180"])  # as above
        (kept[1] / ".metadata").rename(tmp_path / "incomplete")
        shutil.copytree(kept[1], kept[1].with_name("epoch-00000001-done-000000000001"))
        newest = kept[0]
    assert "existing checkpoint" not in whole.errors, whole  # no checkpoint is saved twice
    for ranks, others in more.items():
        shutil.copytree(tmp_path / "stopped", tmp_path / f"on {ranks}")
        size = 36 // max(ranks, 2)
        resumed = train(f"on {ranks}", ranks, size, *options, *others)
        assert f"resuming from {newest.relative_to(tmp_path / 'stopped')}" in resumed.output
        assert [line["accuracy"] for line in resumed.epochs()] == [
            line["accuracy"] for line in whole.epochs()]
        assert resumed.epochs()[1]["loss"] == whole.epochs()[1]["loss"]
        assert distance(tmp_path / f"on {ranks}/mnist.pt", tmp_path / "whole/mnist.pt") < rounding
        assert path != FSDP or len([*(tmp_path / f"on {ranks}/checkpoint").iterdir()]) == 2


UNEQUAL = """
import importlib, os, sys
script, rank = importlib.import_module(os.environ["SCRIPT"]), int(os.environ["RANK"])
if os.environ["PART"] == "train":
    script.rest_of_epoch = lambda *given: range(16 + rank)
elif os.environ["PART"] == "test":
    script.DistributedSampler = lambda *given, shuffle: [0] * (250 + rank)
else:
    script.DDP = lambda net, **given: net  # as if the loop called the plain network
script.main()
"""


@pytest.mark.parametrize(("script", "parts"), [
    ("train", ["train", "test", "weights"]), ("fsdp", ["train", "test"])], ids=["06", "fsdp"])
def test_ranks_that_differ_are_an_error_of_all_ranks(script, parts, project, train, tmp_path):
    """By a sampler of one's own they would hang; with other weights they would train on."""
    (project / "unequal.py").write_text(UNEQUAL)
    for part in parts:
        options = ["--epochs", 2, "--batch-size", 250 if part == "test" else 16]
        result = train("unequal.py", 2, *options, code=1, SCRIPT=script, PART=part)
        one, other = re.findall("ValueError: ranks differ in .*: (.*)", result.errors)
        differ = [len({*column}) > 1 for column in zip(*eval(one), strict=True)]
        assert one == other and differ == [each == part for each in parts]


NOISE = """
import importlib, os, torch
from common import data
script, read = importlib.import_module(os.environ["SCRIPT"]), data.Images.__getitem__
data.Images.__getitem__ = lambda self, index: [
    print("drew", torch.rand(()).item(), flush=True), read(self, index)][1]
script.main()
"""


@pytest.mark.parametrize("script", ["train", "fsdp"], ids=["06", "fsdp"])
def test_workers_of_all_ranks_and_starts_draw_other_random_numbers(
        script, project, train, tmp_path):
    """A resumed epoch would otherwise have the augmentation of the first one again."""
    (project / "noise.py").write_text(NOISE)
    drawn = []
    for epochs in (1, 2):
        result = train("noise.py", 2, "--batch-size", 16, "--epochs", epochs, "--workers", 2,
                       SCRIPT=script)
        drawn += re.findall("^drew (.*)", result.output, re.M)
    assert len(drawn) == len({*drawn}) == 2 * (182 + 48)


@pytest.mark.parametrize("script", ["train", "fsdp"], ids=["06", "fsdp"])
def test_only_a_better_epoch_replaces_the_best_weights(script, train, tmp_path):
    """Not one that is not a number, also after a resume; and a path that is a symlink stays one."""
    (tmp_path / "disk").mkdir()
    for name in ("best.pt", "mnist.pt"):
        (tmp_path / name).symlink_to(f"disk/{name}")
    options, scores = ["--batch-size", 99], "nan 0.1 0.3 0.2"
    given = {"SCRIPT": script, "SCORES": scores}
    train("scored.py", 2, *options, "--epochs", 4, **given)
    assert equal(tmp_path / "disk/best.pt", tmp_path / "epoch-3.pt")
    assert equal(tmp_path / "disk/mnist.pt", tmp_path / "epoch-4.pt")
    train("scored.py", 2, *options, "--epochs", 5, **given | {"SCORES": "0.25"})
    assert equal(tmp_path / "best.pt", tmp_path / "epoch-3.pt")
    assert (tmp_path / "best.pt").is_symlink()


def send(rank, folder, script):
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", None, 2, rank)
    whole = torch.arange(24.0).reshape(1, 4, 2, 3)
    parts = {"slice": whole[..., :2], "last": whole.to(memory_format=torch.channels_last)}
    parts |= {"list": [{"lr": torch.tensor(0.5)}], "int16": whole.short(), "none": whole[:0]}
    torch.save(parts, folder / str(rank))
    given = torch.load(folder / str(rank), "meta" if rank else "cpu", weights_only=True)
    got = module(script).from_rank_0(given, None)
    assert bits(got["list"]) == bits(parts.pop("list")) and got["last"].stride() == (24, 1, 12, 4)
    assert all(got[name].equal(part) for name, part in parts.items())


def test_06_sends_tensors_of_any_strides_and_dtype(project, tmp_path):
    assert exit_codes(start(send, [(n, tmp_path, project / "train.py") for n in (0, 1)])) == [0, 0]


# What is rejected


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in a tensor, where torch.load does not notice it
    path.write_bytes(data)


OTHER = f"checkpoint.pt has {{'length': 181, 'seed': {SEED}, 'lr': 0.5}}, not "


@pytest.mark.parametrize(("options", "change", "error"), [
    (["--lr", 2], None, f"ValueError: {OTHER}"),
    (["--seed", 2], None, f"ValueError: {OTHER}"),
    ([], lambda path: path.write_bytes(path.read_bytes()[:-1000]), "checkpoint.pt is damaged"),
    ([], flip_a_bit, "ValueError: checkpoint.pt is damaged"),
    ([], lambda path: torch.save([path], path), "UnpicklingError: Weights only load failed"),
    ([], lambda path: torch.save({"weight": 1}, path), "checkpoint.pt has None, not {"),
    ([], "network", "Missing key(s) in state_dict"),
], ids="lr seed truncated bit code weights network".split())
def test_06_rejects_a_checkpoint_of_another_run(options, change, error, project, tmp_path):
    """Or a damaged one; and it stays as it is."""
    given = ["--batch-size", 50, "--lr", 0.5, "--seed", SEED, "--epochs"]
    run_ranks(project / "train.py", 1, *given, 1, cwd=tmp_path)
    path = tmp_path / "checkpoint.pt"
    if change == "network":
        project = copy_project(tmp_path / "other", CHECKPOINTING, small="data")
    elif change:
        change(path)
    before = path.read_bytes()
    again = run_ranks(project / "train.py", 1, *given, 2, *options, cwd=tmp_path, code=1)
    assert error in again.errors, again
    assert path.read_bytes() == before


def test_fsdp_rejects_a_checkpoint_of_another_run(train, tmp_path):
    """A smaller model would otherwise be loaded, in part."""
    options = ["--batch-size", 50, "--epochs", 1, "--width", 16]
    train("fsdp.py", 2, *options)
    saved = sorted((tmp_path / "checkpoint").iterdir())
    for change in ("--lr=1", "--width=32"):
        again = train("fsdp.py", 2, *options, "--epochs", 2, change, code=1)
        assert re.search("checkpoint has {.*}, not {|[Ss]ize mismatch", again.errors), again
        assert sorted((tmp_path / "checkpoint").iterdir()) == saved


UNUSED = """
import fsdp, torch
class WithUnused(fsdp.VisionTransformer):
    def __init__(self, *given):
        super().__init__(*given)
        self.unused = torch.nn.Linear(2, 2)
fsdp.VisionTransformer = WithUnused
fsdp.main()
"""


def test_fsdp_fails_at_the_first_save_if_no_run_could_resume(project, train, tmp_path):
    """A weight without a gradient; a folder that another rank does not see, also in a resume."""
    (project / "unused.py").write_text(UNUSED)
    result = train("unused.py", 2, "--save-every", 1, code=1)
    assert "ValueError: unused.weight has had no gradient: use or" in result.errors, result
    (tmp_path / "1").mkdir()
    given = [(project / "fsdp.py", ["--save-every", 1, "--width", 16], folder,
              {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port}, [tmp_path / "output", tmp_path / "errors"])
             for port in [free_port()] for rank, folder in enumerate((tmp_path, tmp_path / "1"))]
    for error in ("is not on a disk that all nodes share", "CheckpointException"):
        assert exit_codes(start(run_rank, given)) == [1, 1]
        assert error in (tmp_path / "errors").read_text()


@pytest.mark.parametrize("file", ["checkpoint.pt", "best.pt", "mnist.pt"])
def test_06_a_save_that_fails_ends_the_run_and_keeps_the_file_before(file, train, tmp_path):
    """And the same command resumes the run when there is room again."""
    given = {"SCRIPT": "train", "SCORES": "0.1 0.2"}
    train("scored.py", 1, "--batch-size", 50, **given)
    before = (tmp_path / file).read_bytes()
    (tmp_path / f"{file}.tmp").mkdir()  # nothing can be written to it
    failed = train("scored.py", 1, "--batch-size", 50, "--epochs", 2, code=1,
                   **given | {"SCORES": "0.2"})
    assert "IsADirectoryError" in failed.errors and (tmp_path / file).read_bytes() == before
    (tmp_path / f"{file}.tmp").rmdir()
    train("scored.py", 1, "--batch-size", 50, "--epochs", 2, **given | {"SCORES": "0.2 0.2"})
    assert (tmp_path / file).read_bytes() != before
    assert load(tmp_path / "checkpoint.pt")["progress"]["best"] == 0.2


def test_06_what_cannot_be_loaded_is_not_saved(project, tmp_path):
    save_file = module(project / "train.py").save_file
    save_file({"lr": 1}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: .* pathlib"):
        save_file({"output": Path("mnist.pt")}, tmp_path / "file.pt")
    assert load(tmp_path / "file.pt") == {"lr": 1}
