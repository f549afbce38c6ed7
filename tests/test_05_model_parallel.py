"""05: four ways to split a model, each against the same training on one device."""

import ast
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers.checks import bare_accuracy, check_trained, distance, equal
from helpers.commands import WITNESS, run
from helpers.paths import DIGITS, ROOT
from helpers.projects import clip_at, copy_project, edit, fewer_digits, without_batch_norm
from helpers.ranks import run_ranks
from helpers.scripts import load_script, parse, rejected

FOLDER = ROOT / "05_model_parallel"
SCRIPTS = ("train.py", "pipeline.py", "tensor_parallel.py", "fsdp.py")


def launch(script, *options):
    """Both ranks have batches of 30 images, or one of 60, and so 21 steps per epoch."""
    settings = {"SCRIPT": script, "NPROC": "2"}
    mark = pytest.mark.launch("05_model_parallel", "--epochs", 2, *options, **settings)
    return pytest.param(script, marks=mark, id=script)


@pytest.mark.parametrize("script", [
    launch("train.py", "--batch-size", 30, "--chunks", 3),
    launch("fsdp.py", "--batch-size", 30),
])
def test_trains_evaluates_and_saves(script, launched):
    if script == "train.py":
        result = launched.check(epochs=2, at_least=0.5)
    else:  # a transformer needs more steps
        result = launched.check(epochs=2, at_least=0.2, accuracy_of=transformer_accuracy)
        block = 2 * 2 * 64 + 3 * 64**2 + 64 * 65 + 256 * 65 + 64 * 257
        parameters = 64 * 50 + 16 * 64 + 3 * block + 2 * 64 + 10 * 65
        shards = f"{parameters} parameters, bytes per rank: {[parameters * 4 // 2] * 2}"
        assert result.output.splitlines()[0] == shards
        best = max(line["accuracy"] for line in result.epochs())
        assert best == f"{transformer_accuracy(launched.place / 'best.pt'):.4f}"
    assert result.errors == "", result


@pytest.mark.parametrize("script", ["pipeline.py", "tensor_parallel.py"])
def test_trains_evaluates_and_saves_where_all_ranks_share_a_batch(script, repository, tmp_path):
    options = ["--epochs", 2, "--batch-size", 60, "--data-dir", repository / "common"]
    options += ["--chunks", 3] if script == "pipeline.py" else []
    result = run_ranks(repository / "05_model_parallel" / script, 2, *options, cwd=tmp_path)
    accuracy_of = bare_accuracy if script == "pipeline.py" else mlp_accuracy
    check_trained(result, tmp_path, epochs=2, ranks=1, at_least=0.5, accuracy_of=accuracy_of)
    assert result.errors == "", result
    if script == "pipeline.py":  # no trial run counts in BatchNorm's statistics
        state = torch.load(tmp_path / "mnist.pt", weights_only=True)
        counts = [state[f"layer{n}.1.num_batches_tracked"] for n in (1, 2)]
        assert counts == [2 * 21 * 3] * 2  # micro-batches


def mlp_accuracy(weights):
    return accuracy_of(load_script(FOLDER / "tensor_parallel.py").Mlp(), weights)


def transformer_accuracy(weights):
    return accuracy_of(load_script(FOLDER / "fsdp.py").VisionTransformer(64, 3), weights)


def accuracy_of(model, weights):
    from common.data import load_mnist

    model.load_state_dict(torch.load(weights, weights_only=True))
    images, labels = load_mnist(DIGITS)[1].tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


# The same steps as on one device: in float64, and without BatchNorm, so that a batch may be split


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A copy whose batches may be split, and in which only the larger gradients are clipped."""
    exact = copy_project(tmp_path_factory.mktemp("exact") / "0", FOLDER / "train.py", *SCRIPTS[1:])
    shutil.copy(ROOT / "04_ddp_torchrun/train.py", exact / "one_device.py")
    fewer_digits(exact, now=140, digits=60)
    without_batch_norm(exact)
    clip_at(exact, 10.0, "one_device.py", *SCRIPTS[:3])
    order = "shuffle=True, generator=generator"
    same_order = "sampler=torch.utils.data.DistributedSampler(train_set, 1, 0, seed=args.seed + 1)"
    for script in ("pipeline.py", "tensor_parallel.py"):
        edit(exact, script, (order, same_order))
    return exact


def trained(project, script, nproc, *options, epochs=1):
    """The losses and the weights of a run."""
    options = ["--epochs", epochs, "--lr", 0.05, "--data-dir", "common", *options]
    options = [*options, "--output", f"{script}.pt"]
    result = run_ranks(script, nproc, *options, cwd=project)
    assert result.code == 0, result
    return [line["loss"] for line in result.epochs()], project / f"{script}.pt"


@pytest.fixture(scope="module")
def one_device(exact):
    """The losses and weights of 04 in one process: 6 steps with batches of 90."""
    return trained(exact, "one_device.py", 1, "--batch-size", 90)


@pytest.mark.parametrize(("script", "nproc", "options"), [
    ("train.py", 1, ["--batch-size", 90, "--chunks", 3]),
    ("train.py", 2, ["--batch-size", 45, "--chunks", 5]),
    ("pipeline.py", 2, ["--batch-size", 90, "--chunks", 3]),
    ("pipeline.py", 2, ["--batch-size", 90, "--chunks", 6, "--schedule", "1f1b"]),
])
def test_takes_the_steps_of_one_device(script, nproc, options, exact, one_device):
    losses, weights = trained(exact, script, nproc, *options)
    assert losses == one_device[0]
    assert distance(weights, one_device[1]) < 1e-12


def test_split_linear_layers_take_the_steps_of_whole_ones(exact):
    one = shutil.copytree(exact, exact.parent / "one")
    mlp = (one / "tensor_parallel.py").read_text()
    mlp = mlp[mlp.index("class Mlp") : mlp.index("def train")].replace("Mlp", "ConvNet")
    (one / "common/model.py").write_text(f"from torch import nn\n\n\n{mlp}")
    losses, weights = trained(one, "one_device.py", 1, "--batch-size", 90)
    split_losses, split_weights = trained(exact, "tensor_parallel.py", 2, "--batch-size", 90)
    assert split_losses == losses
    assert distance(split_weights, weights) < 1e-12


def test_tensor_parallel_fails_if_the_hidden_features_cannot_be_split(exact):
    options = ["--hidden", 511, "--data-dir", "common"]
    result = run_ranks("tensor_parallel.py", 2, *options, cwd=exact)
    assert result.code == 1 and "a and b must have same reduction dim" in result.errors, result


# fsdp.py, on a small transformer, in float64: as 04 on one device, and as 06 when it is stopped

SMALL = ["--width", 16, "--depth", 2]


@pytest.fixture(scope="module")
def transformer(exact):
    """fsdp.py in float64, and 04 with its model and optimizer."""
    edit(exact, "fsdp.py", ("model(images).float()", "model(images)"), (" = 1.0", " = 10.0"))
    shutil.copy(exact / "one_device.py", exact / "one_transformer.py")
    old, new = [re.search(r"    optimizer = .*\n", (exact / name).read_text())[0]
                for name in ("one_device.py", "fsdp.py")]
    model = "ConvNet().to(device, memory_format=torch.channels_last)"
    edit(exact, "one_transformer.py", (model, "VisionTransformer(16, 2).to(device)"), (old, new),
         ("common.model import ConvNet", "fsdp import VisionTransformer"))
    return exact


@pytest.fixture(scope="module")
def whole(transformer):
    """The losses and weights of 04 in one process: two epochs of 9 steps with batches of 60."""
    return trained(transformer, "one_transformer.py", 1, "--batch-size", 60, epochs=2)


@pytest.mark.parametrize(("nproc", "options"), [
    (2, ["--batch-size", 30]),
    (2, ["--batch-size", 10, "--accumulate", 3, "--recompute"]),
    (4, ["--batch-size", 5, "--accumulate", 3, "--shards", 2]),
])
def test_shards_take_the_steps_of_one_device(nproc, options, transformer, whole, tmp_path):
    """Also from the same initial weights, which each rank draws a block at a time."""
    options = [*SMALL, *options, "--checkpoint", tmp_path / "run"]
    losses, weights = trained(transformer, "fsdp.py", nproc, *options, epochs=2)
    assert losses == whole[0]
    assert distance(weights, whole[1]) < 1e-12


def interrupted(project, folder, batch, *options, code=0):
    """Two ranks, of which the last one receives SIGTERM at this batch."""
    settings = {"SIGNAL_AT_BATCH": f"1 {signal.SIGTERM:d} {batch}", "TORCHELASTIC_RUN_ID": "any"}
    options = ["--batch-size", 30, "--save-every", 3, "--data-dir", project / "common", *options]
    result = run_ranks(project / "fsdp.py", 2, *SMALL, *options, cwd=folder, **settings, **WITNESS)
    assert result.code == code, result
    return result


def place(line, before):
    """The epoch and its images that are done, from a line of the log that begins with this."""
    assert line.startswith(before), line
    done = ast.literal_eval(re.search("{.*}", line)[0])
    return done["epoch"], done["images"]


def test_fsdp_resumes_bit_by_bit_from_the_newest_complete_checkpoint(transformer, tmp_path):
    """A half-written one costs the steps since the one before; a damaged one is an error.

    Two are kept: of the stop after four steps of the second epoch, and of its third step.
    """
    options = ["--epochs", 2, "--lr", 0.05]
    result = interrupted(transformer, tmp_path, 21, *options)  # 17 in the first epoch
    assert place(result.output.splitlines()[-1], "stopped at ") == (2, 240), result
    saved = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert saved == ["epoch-0002-image-000000000180", "epoch-0002-image-000000000240"]
    _, undisturbed = trained(transformer, "fsdp.py", 2, *SMALL, "--batch-size", 30, "--checkpoint",
                             tmp_path / "undisturbed", epochs=2)
    for damage, images in (("truncated", None), ("half-written", 180), ("none", 240)):
        run = shutil.copytree(tmp_path / "checkpoint", tmp_path / f"run {damage}")
        if damage == "truncated":
            shard = run / saved[1] / "__1_0.distcp"
            shard.write_bytes(shard.read_bytes()[:-1000])
        elif damage == "half-written":
            (run / saved[1] / ".metadata").unlink()
        given = [*SMALL, *options, "--batch-size", 30, "--checkpoint", run, "--data-dir", "common"]
        result = run_ranks("fsdp.py", 2, *given, "--output", "resumed.pt", cwd=transformer)
        if damage == "truncated":
            error = f"ValueError: cannot load {run / saved[1]}; before it: {run / saved[0]}"
            assert result.code == 1 and error in result.errors, result
            assert {path.name for path in run.iterdir()} == {*saved}
            continue
        assert result.code == 0, result
        line = result.output.splitlines()[1]
        assert place(line, f"resuming from {run / saved[images == 240]} at ") == (2, images), result
        assert equal(transformer / "resumed.pt", undisturbed)


def test_fsdp_stopped_in_an_evaluation_only_evaluates_again(transformer, tmp_path):
    """The 11th batch that a rank asks for is the first of the evaluation: 9, and no more."""
    result = interrupted(transformer, tmp_path, 11, "--epochs", 1)
    assert place(result.output.splitlines()[-1], "stopped at ") == (1, 540), result
    given = [*SMALL, "--epochs", 1, "--checkpoint", tmp_path / "checkpoint", "--data-dir", "common"]
    again = run_ranks("fsdp.py", 2, *given, cwd=transformer)
    assert again.code == 0 and "'images': 540" in again.output.splitlines()[1], again
    assert [line["loss"] for line in again.epochs()] == ["nan"]


def test_fsdp_keeps_the_whole_weights_of_the_best_epoch(transformer, tmp_path):
    """Not rank 0's half, and not those of a later epoch, also after a resume."""
    project = shutil.copytree(transformer, tmp_path / "project")
    edit(project, "fsdp.py", ("score = evaluate(model, test_loader, device)",
                              "score = evaluate(model, test_loader, device) and SCORES[epoch]"),
         ("\nfaulthandler.", "\nSCORES = {1: 0.1, 2: 0.3, 3: 0.2}\nfaulthandler."),
         ("        if score is None", "        save_whole(model, f'epoch-{epoch}.pt')\n"
          "        if score is None"))
    options = ["--epochs", 3, "--lr", 0.05]
    assert "stopped" in interrupted(project, project, 38, *options).output  # in the third epoch
    assert "resuming" in interrupted(project, project, 0, *options).output
    assert equal(project / "best.pt", project / "epoch-2.pt")
    assert equal(project / "mnist.pt", project / "epoch-3.pt")
    assert distance(project / "best.pt", project / "mnist.pt") > 0


def test_fsdp_resumes_on_any_number_of_ranks_with_each_image_once(transformer, whole, tmp_path):
    """With a learning rate of 0, the losses of both parts are those of all images together."""
    options = ["--epochs", 1, "--lr", 0]
    given = ["--batch-size", 60, "--lr", 0, "--data-dir", "common"]
    total = run_ranks("one_transformer.py", 1, *given, cwd=transformer).epochs()[0]["loss"]
    project = shutil.copytree(transformer, tmp_path / "project")
    show, indent = "print('sum', *total.tolist(), flush=True)\n", " " * 8
    edit(project, "fsdp.py",
         (f"{indent}seconds = ", f"{indent}{show}{indent}seconds = "),
         (f"{indent * 2}return stop", f"{indent * 2}dist.all_reduce(total)\n{indent * 2}{show}"
                                      f"{indent * 2}return stop"))
    first = sums(interrupted(project, tmp_path, 4, *options))
    assert first[1] == 240
    for nproc, shards in ((1, 1), (4, 2)):
        run = shutil.copytree(tmp_path / "checkpoint", tmp_path / f"on {nproc}")
        given = [*SMALL, *options, "--checkpoint", run, "--shards", shards, "--batch-size", 15]
        result = run_ranks("fsdp.py", nproc, *given, "--data-dir", "common", cwd=project)
        assert "resuming from " in result.output, result
        rest = sums(result)
        assert first[1] + rest[1] == 540
        assert f"{(first[0] + rest[0]) / 540:.4f}" == total


def sums(result):
    """The sum of the losses and the number of images that a changed fsdp.py has printed."""
    assert result.code == 0, result
    return [float(word) for word in re.findall(r"^sum (\S+) (\S+)$", result.output, re.M)[0]]


def test_fsdp_without_a_disk_for_its_checkpoint_ends_with_an_error(transformer, tmp_path):
    (tmp_path / "checkpoint").write_text("no folder")
    result = interrupted(transformer, tmp_path, 3, code=1)
    assert "checkpoint/epoch-0001-image-000000000180" in result.errors, result


@pytest.mark.parametrize(("change", "problem"), [
    (["--width", 32, "--depth", 2], "ValueError: cannot load "),  # torch's reason is above it
    (["--width", 16, "--depth", 1], '"parameters": '),
    ([*SMALL, "--seed", 1], '"seed": 0, '),
    ([*SMALL, "--lr", 0.1], '"lr": 0.006, '),
])
def test_fsdp_rejects_a_checkpoint_of_another_run(change, problem, transformer, tmp_path):
    interrupted(transformer, tmp_path, 1)
    saved = sorted((tmp_path / "checkpoint").iterdir())
    given = [*change, "--checkpoint", tmp_path / "checkpoint", "--data-dir", "common"]
    result = run_ranks("fsdp.py", 2, *given, cwd=transformer)
    assert result.code == 1 and problem in result.errors, result
    assert f"{tmp_path}/checkpoint" in result.errors, result
    assert sorted((tmp_path / "checkpoint").iterdir()) == saved


HEAD = "        self.norm = nn.LayerNorm(width)\n        self.scores = nn.Linear(width, 10)\n"
BUFFER = HEAD + "        self.scores.register_buffer('scale', {}, persistent={})\n"
BUFFER += "        self.scores.forward = lambda inputs: inputs\n"


@pytest.mark.parametrize(("old", "new", "error"), [
    (HEAD, HEAD + "        self.unused = nn.Linear(2, 2)\n",
     "ValueError: unused.weight has had no gradient"),
    ("args = parser.parse_args()",
     "args = parser.parse_args(); rank = os.environ['RANK']; os.mkdir(rank); os.chdir(rank)",
     "is not on a disk that all nodes share"),
    (HEAD, HEAD + "        self.scores.bias = self.norm.weight\n",
     "ValueError: a weight that two modules share became two"),
    (HEAD, HEAD + "        self.scores.scale = nn.Parameter(torch.ones(1))\n",
     "ValueError: reset_parameters() of <class 'torch.nn.modules.linear.Linear'> leaves"),
    (HEAD, BUFFER.format("torch.ones(3)", True), "leaves tensors unset"),
    (HEAD, BUFFER.format("torch.arange(3)", False), "leaves tensors unset"),
    (HEAD, BUFFER.format("torch.ones(3, 3, dtype=bool).tril()", False), "leaves tensors unset"),
], ids=["unused", "disks", "tied", "parameter", "buffer", "integers", "mask"])
def test_fsdp_fails_at_once_where_it_would_fail_later(old, new, error, transformer, tmp_path):
    project = shutil.copytree(transformer, tmp_path / "project")
    edit(project, "fsdp.py", (old, new))
    result = interrupted(project, project, 2, code=1)
    assert error in result.errors, result


def test_fsdp_compares_the_copies_of_the_model(transformer, tmp_path):
    """Weights that each rank draws by itself, as with NumPy, differ between the copies."""
    project = shutil.copytree(transformer, tmp_path / "project")
    line = "            module.reset_parameters()"
    edit(project, "fsdp.py", (line, "            torch.manual_seed(rank) if rank > 1 else None\n"
                                    f"{line}"))
    given = [*SMALL, "--shards", 2, "--data-dir", "common"]
    result = run_ranks("fsdp.py", 4, *given, cwd=project)
    assert result.code == 1 and "the copies of the model differ" in result.errors, result


def test_recompute_computes_the_blocks_of_any_model_twice(transformer, tmp_path):
    project = shutil.copytree(transformer, tmp_path / "project")
    edit(project, "fsdp.py", ("        heads = self.", "        CALLS.append(self.training)\n"
         "        heads = self."), ("\nfaulthandler.", "\nCALLS = []\nfaulthandler."),
         ("    ignore_stop", "    print('calls', sum(CALLS), flush=True)\n    ignore_stop"))
    calls = []
    for options in ([], ["--recompute"]):
        given = [*SMALL, "--epochs", 1, "--batch-size", 90, "--data-dir", "common", *options]
        result = run_ranks("fsdp.py", 1, *given, "--checkpoint", f"run{options}", cwd=project)
        assert result.code == 0, result
        calls.append(int(re.search(r"^calls (\d+)", result.output, re.M)[1]))
    assert calls == [2 * 6, 2 * 2 * 6]  # two blocks, six steps


def test_a_sharded_checkpoint_becomes_one_file(transformer, tmp_path):
    interrupted(transformer, tmp_path, 20, "--epochs", 1)
    module = "torch.distributed.checkpoint.format_utils"
    newest = sorted((tmp_path / "checkpoint").iterdir())[-1]
    command = ["python", "-m", module, "dcp_to_torch", newest, "whole.pt"]
    assert run(command, tmp_path).code == 0
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["state"]["model"]
    weights = torch.load(tmp_path / "mnist.pt", weights_only=True)
    assert whole.keys() == weights.keys()
    assert all(torch.equal(whole[name], weights[name]) for name in whole)


BEFORE = """
    def kilobytes(field):
        return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the highest VmRSS from now on
    before = kilobytes("VmRSS")
"""
AFTER = """
    Path(f"memory-{rank}").write_text(str(kilobytes("VmHWM") - before))
    sys.exit()
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_no_rank_holds_the_whole_model_at_the_start(tmp_path):
    """A model of 403 MB, in blocks of 50 MB: at most its shard, one block and the split one."""
    project = copy_project(tmp_path / "project", FOLDER / "fsdp.py")
    meta, apply = '\n    with torch.device("meta")', "    model.apply(shard)  # children first\n"
    edit(project, "fsdp.py", ("import os\n", "import os\nimport re\n"), (meta, BEFORE + meta),
         (apply, apply + AFTER))
    options = ["--width", 1024, "--depth", 8, "--data-dir", "common"]
    assert run_ranks("fsdp.py", 2, *options, cwd=project).code == 0
    for rank in range(2):
        grown = int((project / f"memory-{rank}").read_text()) * 1024 / 1e6
        assert 202 < grown < 202 + 2 * 50 + 20


@pytest.mark.parametrize(("script", "nproc", "options", "line"), [
    ("train.py", 1, "--devices cuda:0", "--devices cuda:0: name 2 devices, two per process"),
    ("train.py", 2, "--devices cuda:0,cuda:1", "--devices cuda:0,cuda:1: name 4 devices, "),
    ("pipeline.py", 2, "--chunks 5", "--batch-size 64 cannot be split into 5 --chunks"),
    ("pipeline.py", 2, "--schedule 1f1b --chunks 1", "--schedule 1f1b needs at least 2 --chunks"),
    ("pipeline.py", 3, "", "the network has 2 stages: start 2 processes, not 3"),
    ("fsdp.py", 2, "--checkpoint no/such/folder", "no/such is not a writable folder"),
    ("fsdp.py", 4, "--shards 3", "--shards 3 does not divide the 4 processes"),
])
def test_rejects_what_does_not_fit(script, nproc, options, line, monkeypatch, capsys):
    settings = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": nproc, "WORLD_SIZE": nproc}
    error = rejected(monkeypatch, capsys, FOLDER / script, *options.split(), **settings)
    assert error.startswith(line)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_output_folder_is_looked_for_on_rank_0(script, monkeypatch, capsys):
    """It is the only one that saves there, and other machines need not have the folder."""
    launch = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 2}
    wrong = ["--output", "no/such/mnist.pt"]
    error = rejected(monkeypatch, capsys, FOLDER / script, *wrong, RANK=0, **launch)
    assert error == "no/such is not a writable folder"
    parse(monkeypatch, FOLDER / script, *wrong, RANK=1, **launch)


@pytest.mark.parametrize(("gpus", "rank", "devices"), [
    (4, 0, ["cuda:0", "cuda:1"]),
    (4, 1, ["cuda:2", "cuda:3"]),
    (3, 0, ["cpu", "cpu"]),
    (3, 1, ["cpu", "cpu"]),
    (0, 0, ["cpu", "cpu"]),
])
def test_each_process_has_its_own_two_gpus_or_the_cpu(gpus, rank, devices, monkeypatch, capsys):
    launch = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    args = parse(monkeypatch, FOLDER / "train.py", gpus=gpus, **launch)
    assert [str(device) for device in args.devices] == devices
    line = "training on the CPU: it needs 4 GPUs, and PyTorch finds 3\n"
    assert capsys.readouterr().out == (line if (gpus, rank) == (3, 0) else "")
