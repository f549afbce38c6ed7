"""06, fsdp.py and 07: a run resumes as if nothing had happened, and what is wrong is not saved.

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
from helpers import (ROOT, SCORED, SEED, copy_project, distance, equal, exit_codes, free_port, load,
    module, rate_factor, run_rank, run_ranks, start, without_batch_norm)

CHECKPOINTING, FSDP = "06_checkpointing/train.py", "05_model_parallel/fsdp.py"
IMAGES, TESTS = 181, 47  # of tests/small/data.py
IN_DATA = """
from common import data
read = data.Images.__getitem__
data.Images.__getitem__ = lambda self, index: [
    print("drew", drawn := torch.rand(()).item(), flush=True),
    (lambda image, label: (image + drawn, label))(*read(self, index))][1]
"""


OWN = """
load = getattr(script, "load_checkpoint", None)
script.load_checkpoint = lambda *given: [load(*given), given[2].update(own=torch.ones(2) / 0)]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of 06, of 07 as stops.py and of fsdp.py, with the small data and network."""
    folder = tmp_path_factory.mktemp("resume") / "a project"
    copy_project(folder, CHECKPOINTING, FSDP, small=("data", "model"))
    shutil.copy(ROOT / "07_slurm/train.py", folder / "stops.py")
    return folder


@pytest.fixture
def train(project, tmp_path):
    """Train in forked ranks and in a folder of its own; `read` is for READ of the small data."""
    def train(script, ranks, *options, read=None, **given):
        options = [*["--width", 16, "--depth", 1] * (script == "fsdp"), *options]
        given = {"cwd": tmp_path, **given} | ({"READ": f"{ranks - 1} {read}"} if read else {})
        return run_ranks(project / f"{script}.py", ranks, "--seed", SEED, *options, **given)

    return train


def files_of(folder):
    """The files of a run and when they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("**/*.*") if path.is_file()}


@pytest.mark.parametrize(("script", "peak"), [
    ("train", 0.6), ("fsdp", 0.006)], ids=["06", "fsdp"])
def test_killed_and_resumed_bit_for_bit(script, peak, train, tmp_path):
    """In the second epoch, and twice in its evaluation: a start that only evaluates saves last.

    Augmentation and dropout draw what they do undisturbed, with fewer saves; tensors in progress.
    """
    options = ["--batch-size", 16, "--epochs", 2, "--save-every", 3]
    train = partial(train, CHANGE=IN_DATA + OWN)
    (whole := tmp_path / "whole").mkdir()
    undisturbed = train(script, 2, *options, cwd=whole)
    in_epoch = math.ceil(IMAGES / 2) + math.ceil(TESTS / 2)  # images that a rank reads
    train(script, 2, *options, read=f"{in_epoch + 50} 9", code=9)
    options += ["--save-every", 1]
    in_evaluation = train(script, 2, *options, read=f"{(IMAGES - 96) // 2 + 2} 9", code=9)
    assert re.search("resuming from .*(epoch': 2, 'done': 96|2-done-0*96)", in_evaluation.output)
    drawn, again = [re.findall("^drew (.*)", each.output, re.M)
                    for each in (undisturbed, in_evaluation)]
    assert len(drawn) == len({*drawn}) and {*again} < {*drawn}
    before = files_of(tmp_path)
    train(script, 2, *options, read="2 9", code=9)
    assert files_of(tmp_path) == before
    rest = train(script, 2, *options)
    [line], last = rest.epochs(), undisturbed.epochs()[-1]
    assert (line["loss"], line["accuracy"]) == ("-", last["accuracy"]), rest
    assert line["since"] == "  since 100%" and not last["since"]
    again = train(script, 2, *options).output
    assert "finished after epoch 2: mnist.pt\n" in again and "  loss " not in again
    assert script == "fsdp" or "'own': tensor([inf, inf]" in again
    assert all(equal(tmp_path / file, whole / file) for file in ("mnist.pt", "best.pt"))
    assert not list(tmp_path.glob("*.tmp"))
    line = r"^epoch (\d)/2  (\d+%)  loss \d\.\d{4}  rate (\S+)$"
    assert re.findall(line, undisturbed.output, re.M) == [
        (f"{epoch}", f"{done / IMAGES:.0%}", f"{rate:.3g}") for epoch in (1, 2)
        for before, done in ((64, 96), (160, IMAGES))
        for rate in [peak / 8**0.5 * rate_factor(6 * (epoch - 1 + before / IMAGES), 12)]]


def test_07_stopped_and_resumed_bit_for_bit(train, tmp_path):
    """In the second epoch, after the step of the signal, then in its evaluation; with code 1."""
    options = ["--epochs", 2, "--batch-size", 16, "--save-every", 99]
    train = partial(train, CHANGE=IN_DATA)
    (whole := tmp_path / "whole").mkdir()
    train("stops", 2, *options, cwd=whole)
    in_epoch, ends = math.ceil(IMAGES / 2) + math.ceil(TESTS / 2), []
    for read in (in_epoch + 20, None):
        read = read or math.ceil((IMAGES - ends[0]["done"]) / 2)
        stopped = train("stops", 2, *options, read=f"{read} 15", code=1)
        [text] = re.findall("^stopped at (.*); rerun the same comm", stopped.output, re.M)
        ends.append(eval(text, {"inf": math.inf}))
        assert not stopped.errors, stopped
    assert ends[0]["done"] == 64 and ends[1]["done"] == IMAGES
    assert [end["epoch"] for end in ends] == [2, 2]
    last = train("stops", 2, *options).output
    assert f"resuming from checkpoint.pt at {ends[1]} on 2 ranks\n" in last
    assert equal(tmp_path / "mnist.pt", whole / "mnist.pt")


@pytest.mark.parametrize(("path", "options", "more", "rounding"), [
    (CHECKPOINTING, [], {1: ["--accumulate", 2], 3: []}, 1e-10),
    (FSDP, ["--width", 16, "--depth", 1],
     {1: ["--accumulate", 2], 4: ["--shards", 2]}, 1e-5),  # it computes the loss in float32
], ids=["06", "fsdp"])
def test_resumes_on_any_number_of_processes(path, options, more, rounding, tmp_path):
    """As one process does; fsdp.py from its newest complete checkpoint; older ones are removed."""
    project = without_batch_norm(copy_project(tmp_path / "a project", path, small="data"))
    options = ["--seed", SEED, "--epochs", 2, "--save-every", 1, *options]

    def train(folder, ranks, size, *options, **given):  # 180 images: with 181 some ranks repeat one
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
    assert "existing checkpoint" not in whole.errors, whole  # no checkpoint is saved twice
    for ranks, others in more.items():
        shutil.copytree(tmp_path / "killed", tmp_path / f"on {ranks}")
        size = 36 // max(ranks, 2)
        resumed = train(f"on {ranks}", ranks, size, *options, *others)
        assert f"resuming from {newest.relative_to(tmp_path / 'killed')}" in resumed.output
        assert [line["accuracy"] for line in resumed.epochs()] == [
            line["accuracy"] for line in whole.epochs()]
        assert resumed.epochs()[1]["loss"] == whole.epochs()[1]["loss"]
        assert distance(tmp_path / f"on {ranks}/mnist.pt", tmp_path / "whole/mnist.pt") < rounding
        assert path != FSDP or len([*(tmp_path / f"on {ranks}/checkpoint").iterdir()]) == 2


@pytest.mark.parametrize("script", ["train", "fsdp", "stops"], ids=["06", "fsdp", "07"])
def test_workers_of_all_ranks_and_starts_draw_other_random_numbers(script, train):
    """A resumed epoch would otherwise have the augmentation of the first one again."""
    drawn = []
    for epochs in (1, 2):
        result = train(script, 2, "--batch-size", 16, "--epochs", epochs, "--workers", 2,
                       CHANGE=IN_DATA)
        drawn += re.findall("^drew (.*)", result.output, re.M)
    assert len(drawn) == len({*drawn}) == 2 * (182 + 48)


ANEW = """
wrap = script.DDP
script.DDP = lambda net, **given: (
    wrap(net, **given), torch.manual_seed(rank), net.layers[1].reset_parameters())[0]
"""
PLAIN = "script.DDP = lambda net, **given: net"  # as if the loop called the plain network
FROZEN = """
build, mask = script.ConvNet, torch.full((10**6,), -torch.inf)
script.ConvNet = lambda: [net := build(), net.register_parameter(
    "mask", torch.nn.Parameter(mask, requires_grad=False))][0]
"""
HERE = "os.path.exists(str(rank)) or os.mkdir(str(rank)); os.chdir(str(rank))"
WAITS = "from common import gather; gather.time.sleep = lambda _: "
LATE = f"{HERE}; {WAITS}rank == 0 or os.link('../0/checkpoint.pt', 'checkpoint.pt')"
OVERFLOW = "script.nn.CrossEntropyLoss = lambda **_: lambda out, _: (out * 1e300).square().mean()"
NAN = ("load = script.load_mnist; script.load_mnist = lambda *given: "
       "[sets := load(*given), sets[0].tensors[0][150].fill_(torch.nan)][0]")
OTHER_ORDER = ("build = script.Block; script.Block = lambda width: [net := build(width), parts := "
               "net._modules, rank and parts.update(up=parts.pop('up'))][0]")
BROKEN = """
from torch.optim.optimizer import register_optimizer_step_post_hook as after_a_step
after_a_step(lambda optimizer, *given: optimizer.param_groups[0]["params"][0].data.div_(0))
"""


@pytest.mark.parametrize(("scripts", "change", "options", "error"), [
    ("train fsdp stops", "script.rest_of_epoch = lambda *given: range(16 + rank)", [], "batches"),
    ("fsdp stops", "script.DistributedSampler = lambda *_, shuffle: [0] * (250 + rank)",
     ["--batch-size", 250], "batches"),
    ("train stops", PLAIN, [], "gradients"), ("train", PLAIN, ["--lr", 0.001], "gradients"),
    ("train", FROZEN + PLAIN, [], "gradients"), ("train", ANEW, [], "weights"),
    ("train fsdp stops", "sys.argv += ['--seed', str(rank)]", [], "options"),
    ("train", "sys.argv += ['--batch-size', str(rank + 1)]", [], "options"),
    ("fsdp", "sys.argv += ['--save-every', str(rank + 1)]", [], "options"),
    ("fsdp", OTHER_ORDER, [], "names"),
    ("train", OVERFLOW, [], "gradients"), ("train fsdp stops", NAN, [], "gradients"),
    ("train fsdp", "0", ["--lr", 1e30], "gradients"),
    ("train fsdp", BROKEN, ["--save-every", 1], "weights"),
], ids="train test plain rate frozen anew seed batch save order inf nan lr optimizer".split())
def test_06_07_fsdp_ranks_that_differ_or_are_not_finite_are_an_error(
        scripts, change, options, error, train, tmp_path):
    """Before any file is written; it names what differs, and an option with the ranks' values."""
    for script in scripts.split():
        result = train(script, 2, "--batch-size", 16, "--epochs", 1, *options, code=1,
                       CHANGE=change, **{"FLOAT32": 1} if change == "0" else {})
        found = re.findall(f"ValueError: {error} of the ranks differ, or are n.*", result.errors)
        assert len(found) == 2 and found[0] == found[1], result
        values = re.search(r": \[{'([a-z-]+)': [01]}, {'\1': [12]}\]$", found[0])
        assert bool(values) == (error == "options") and (not values or values[1] in change), result
        assert not files_of(tmp_path)


def test_06_frozen_infinities_and_zero_gradients_are_no_error(train):
    change = FROZEN + "script.nn.CrossEntropyLoss = lambda **_: lambda out, _: 0 * out.sum()"
    assert len(train("train", 3, "--batch-size", 31, CHANGE=change).epochs()) == 1


UNLIKE = ("os.environ['ATEN_CPU_CAPABILITY'] = ['default', 'avx2'][rank]; "  # read when first used
          "print(torch.backends.cpu.get_cpu_capability(), flush=True)")


def test_06_two_unlike_cpus_train_together(train):
    """Their weights differ in the last bits, which is no error."""
    options = ["--batch-size", 16, "--save-every", 3, "--epochs", 8]
    result = train("train", 2, *options, CHANGE=UNLIKE, FLOAT32=1)
    assert len(result.epochs()) == 8 and {"DEFAULT", "AVX2"} < {*result.output.split()}, result


def test_06_a_checkpoint_that_not_all_nodes_see_is_an_error_but_not_a_late_one(train):
    train("train", 2, "--batch-size", 60, CHANGE=HERE)
    result = train("train", 2, "--batch-size", 60, "--epochs", 2, CHANGE=f"{HERE};{WAITS}0", code=1)
    assert result.errors.count("ValueError: checkpoint.pt is not on a disk that all nodes") == 2
    late = train("train", 2, "--batch-size", 60, "--epochs", 2, CHANGE=LATE)
    assert "resuming from checkpoint.pt at {'epoch': 2, " in late.output
    result = train("train", 2, "--batch-size", 60, "--epochs", 3, CHANGE=HERE, code=1)  # 1's is old
    assert result.errors.count("ValueError: progress in --checkpoint of the ranks differ") == 2


@pytest.mark.parametrize("script", ["train", "fsdp"], ids=["06", "fsdp"])
def test_only_a_better_epoch_replaces_the_best_weights(script, train, tmp_path):
    """Not one that is not a number, also after a resume; and a path that is a symlink stays one."""
    (tmp_path / "disk").mkdir()
    for name in ("best.pt", "mnist.pt"):
        (tmp_path / name).symlink_to(f"disk/{name}")
    options, scores = ["--batch-size", 99], "nan 0.1 0.3 0.2"
    given = {"CHANGE": SCORED, "SCORES": scores}
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
SWAPPED = ("build = script.ConvNet; script.ConvNet = lambda: [net := build(), parts := "
           "net.layers._modules, parts.update({name: parts.pop(name) for name in '01'})][0]")


@pytest.mark.parametrize(("options", "change", "error"), [
    (["--lr", 2], None, f"ValueError: {OTHER}"),
    (["--seed", 2], None, f"ValueError: {OTHER}"),
    ([], lambda path: path.write_bytes(path.read_bytes()[:-1000]), "checkpoint.pt is damaged"),
    ([], flip_a_bit, "ValueError: checkpoint.pt is damaged"),
    ([], lambda path: torch.save([path], path), "UnpicklingError: Weights only load failed"),
    ([], lambda path: torch.save({"weight": 1}, path), "checkpoint.pt has None, not {"),
    ([], SWAPPED, f"ValueError: {OTHER}"),
], ids="lr seed truncated bit code weights order".split())
def test_06_rejects_a_checkpoint_of_another_run(options, change, error, project, tmp_path):
    """Or a damaged one; and it stays as it is."""
    given = ["--batch-size", 50, "--lr", 0.5, "--seed", SEED, "--epochs"]
    run_ranks(project / "train.py", 1, *given, 1, cwd=tmp_path)
    path = tmp_path / "checkpoint.pt"
    if callable(change):
        change(path)
    before = path.read_bytes()
    given += [2, *options]
    again = run_ranks(project / "train.py", 1, *given, cwd=tmp_path, code=1,
                      **{"CHANGE": change} if isinstance(change, str) else {})
    assert error in again.errors, again
    assert path.read_bytes() == before


def test_fsdp_rejects_a_checkpoint_of_another_run(train, tmp_path):
    """A smaller model would otherwise be loaded, in part."""
    options = ["--batch-size", 50, "--epochs", 1]
    train("fsdp", 2, *options)
    saved = sorted((tmp_path / "checkpoint").iterdir())
    for change in ("--lr=1", "--width=32"):
        again = train("fsdp", 2, *options, "--epochs", 2, change, code=1)
        assert re.search("checkpoint has {.*}, not {|[Ss]ize mismatch", again.errors), again
        assert sorted((tmp_path / "checkpoint").iterdir()) == saved


UNUSED = ("build = script.VisionTransformer; script.VisionTransformer = lambda *given: "
          "[net := build(*given), setattr(net, 'unused', torch.nn.Linear(2, 2))][0]")
WRAPPED = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
Block, wrap = script.Block, lambda block: torch.compile(checkpoint_wrapper(block), backend="eager")
script.Block = lambda width: (block := Block(width), wrap(block))[block.up.weight.is_meta]
"""


def test_fsdp_fails_at_the_first_save_if_no_run_could_resume(project, train, tmp_path):
    """A weight without a gradient; a folder that a rank does not see; but wrapped blocks resume."""
    for epochs, change in enumerate(("0", WRAPPED), start=1):
        train("fsdp", 2, "--batch-size", 90, "--epochs", epochs, cwd=tmp_path / "w", CHANGE=change)
    result = train("fsdp", 2, "--save-every", 1, code=1, CHANGE=UNUSED)
    assert "ValueError: unused.weight has had no gradient: use or" in result.errors, result
    (tmp_path / "1").mkdir()
    given = [(project / "fsdp.py", ["--save-every", 1, "--depth", 1], folder,
              {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR":
               "127.0.0.1", "MASTER_PORT": port, "CHANGE": f"{WAITS}0"},
              [tmp_path / "output", tmp_path / "errors"])
             for port in [free_port()] for rank, folder in enumerate((tmp_path, tmp_path / "1"))]
    for starts in (1, 2):  # the second one finds a checkpoint on rank 0's disk
        assert exit_codes(start(run_rank, given)) == [1, 1]
        errors = (tmp_path / "errors").read_text()
        assert errors.count(".metadata is not on a disk that all nodes share") == 2 * starts
    assert "bytes on rank 0, shards span nodes\n" in (tmp_path / "output").read_text()


@pytest.mark.parametrize("file", ["checkpoint.pt", "best.pt", "mnist.pt"])
def test_06_a_save_that_fails_ends_the_run_and_keeps_the_file_before(file, train, tmp_path):
    """And the same command resumes the run when there is room again."""
    options, given = ["--batch-size", 50, "--epochs"], {"CHANGE": SCORED}
    train("train", 1, *options, 1, SCORES=0.1, **given)
    before = (tmp_path / file).read_bytes()
    (tmp_path / f"{file}.tmp").mkdir()  # nothing can be written to it
    failed = train("train", 1, *options, 2, code=1, SCORES=0.2, **given)
    assert "IsADirectoryError" in failed.errors and (tmp_path / file).read_bytes() == before
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
