"""05: four ways to split a model, each against the same training on one device."""

import functools
import re
import shutil
import signal

import pytest
import torch
from helpers.checks import check_rank_0_saves, check_trained, distance, equal, launch, rate_factor
from helpers.paths import ROOT
from helpers.projects import CLOCK, copy_project, edit, fewer_digits, without_batch_norm
from helpers.ranks import run_ranks
from helpers.scripts import load_script, parse
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader, TensorDataset

FOLDER = ROOT / "05_model_parallel"
SCRIPTS = ["train.py", "pipeline.py", "tensor_parallel.py", "fsdp.py"]


def transformer(width, depth):
    return load_script(FOLDER / "fsdp.py").VisionTransformer(width, depth)


def test_run_sh_trains_the_script_that_is_named(repository, tmp_path):
    settings = {"SCRIPT": "fsdp.py", "NPROC": "2"}
    result = launch(repository, "05_model_parallel", "--epochs", 1, cwd=tmp_path, **settings)
    assert result.code == 0 and result.errors == "" and len(result.epochs()) == 1, result
    check_rank_0_saves(tmp_path, 2)


def test_no_trial_run_of_the_pipeline_counts(repository, tmp_path):
    """Its real network has BatchNorm, which counts the micro-batches: of two epochs here."""
    options = ["--epochs", 2, "--data-dir", repository / "common", "--batch-size", 60]
    script = repository / "05_model_parallel/pipeline.py"
    result = run_ranks(script, 2, *options, "--chunks", 3, cwd=tmp_path)
    check_trained(result, tmp_path, epochs=2, ranks=1, at_least=0.5)
    state = torch.load(tmp_path / "mnist.pt", weights_only=True)
    counts = [state[f"layer{n}.1.num_batches_tracked"] for n in (1, 2)]
    assert counts == [2 * 21 * 3] * 2


# The same steps as on one device: in float64, and without BatchNorm, so that a batch may be split.
# An epoch has seven steps: of 56 of the 360 images, the last one of 24.

CLIP = {"train.py": 8.0, "pipeline.py": 8.0, "tensor_parallel.py": 0.8, "fsdp.py": 0.3}
SMALL = ["--width", 16, "--depth", 2]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A copy whose batches may be split, and in which each epoch takes seven seconds."""
    exact = copy_project(tmp_path_factory.mktemp("exact") / "0", FOLDER / "train.py", *SCRIPTS[1:])
    fewer_digits(exact, now=140, digits=40)
    without_batch_norm(exact)
    for script, clip in CLIP.items():
        edit(exact, script, *CLOCK, ("MAX_GRAD_NORM = ", f"MAX_GRAD_NORM = {clip} or "))
    edit(exact, "fsdp.py", ("model(images).float()", "model(images)"))
    edit(exact, "pipeline.py", ("    lr = args.lr", "    print(schedule)\n    lr = args.lr"))
    edit(exact, "tensor_parallel.py", ("    lr = args.lr", "    print(SHAPES)\n    lr = args.lr"),
         ("SHAPES", "*[tuple(part.to_local().shape) for part in model.parameters()]"))
    return exact


@functools.cache
def alone(project, script):
    """What two epochs print on one device, and their weights: computed without the script."""
    data = load_script(project / "common/data.py")  # makes float64 the default
    (images, labels), test_set = [part.tensors for part in data.load_digits()]
    torch.manual_seed(1)
    if script == "fsdp.py":
        model = transformer(16, 2)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    else:
        model = (load_script(FOLDER / script).Mlp() if script == "tensor_parallel.py"
                 else load_script(project / "common/model.py").ConvNet())
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True)
    one_order = DataLoader(range(360), 360, True, generator=torch.Generator().manual_seed(1))
    lines, norms = [], []
    for epoch in (1, 2):
        order = torch.randperm(360, generator=torch.Generator().manual_seed(1 + epoch))
        if script in ("pipeline.py", "tensor_parallel.py"):
            [order] = one_order
        if script == "pipeline.py":
            order = order[:336]  # whole batches
        batches, total = order.split(56), 0
        total_steps = 2 * len(batches)
        for step, batch in enumerate(batches):
            done = step * 56 / 360 if script == "fsdp.py" else step / len(batches)
            factor = rate_factor(total_steps * (epoch - 1 + done) / 2, total_steps)
            optimizer.param_groups[0]["lr"] = 0.01 * (56 / 256) ** 0.5 * factor
            scores = model(images[batch])
            loss = nn.functional.cross_entropy(scores, labels[batch], label_smoothing=0.1)
            loss.backward()
            total += loss.item() * len(batch)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP[script]))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            right = (model(test_set[0]).argmax(1) == test_set[1]).double().mean()
        lines.append(f"epoch {epoch}/2  loss {total / len(order):.4f}  accuracy {right:.4f}  "
                     f"7.0 s  {len(order) / 7:.0f} images/s")
    torch.set_default_dtype(torch.float32)
    torch.save(model.state_dict(), project / f"{script}.pt")
    assert min(norms) < CLIP[script] < max(norms)  # so that clipping has an effect
    return lines


def train(project, script, nproc, *options, cwd, stop=0, code=0):
    """Train for two epochs; when it asks for this batch, the last rank receives SIGTERM."""
    given = ["--epochs", 2, "--lr", 0.01, "--seed", 1, "--data-dir", project / "common"]
    given += SMALL if script == "fsdp.py" else []
    return run_ranks(project / script, nproc, *given, *options, cwd=cwd, code=code,
                     stop=(nproc - 1, signal.SIGTERM, stop), WITNESS=cwd / "witness")


def check_steps(result, project, script, cwd, nproc, epochs=(1, 2)):
    lines = [line for line in result.output.splitlines() if line.startswith("epoch ")]
    expected = [alone(project, script)[epoch - 1] for epoch in epochs]
    assert lines[-len(epochs):] == expected, result
    rounded = torch.__version__.startswith("2.8.") and script in SCRIPTS[2:]  # sharded: at clipping
    assert distance(cwd / "mnist.pt", project / f"{script}.pt") < (1e-6 if rounded else 1e-12)
    check_rank_0_saves(cwd, nproc)


@pytest.mark.parametrize(("script", "nproc", "options", "shows"), [
    ("train.py", 1, "--batch-size 56 --chunks 3", ""),
    ("train.py", 2, "--batch-size 28 --chunks 5", ""),
    ("pipeline.py", 2, "--batch-size 56 --chunks 4", "ScheduleGPipe"),
    ("pipeline.py", 2, "--batch-size 56 --chunks 7 --schedule 1f1b", "Schedule1F1B"),
    ("tensor_parallel.py", 2, "--batch-size 56", "(256, 784) (256,) (10, 256) (10,)\n"),  # of 512
    ("fsdp.py", 2, "--batch-size 7 --accumulate 4 --recompute", "each has 1 of 2"),
    ("fsdp.py", 4, "--batch-size 14 --shards 1", "each has 1 of 1"),
    ("fsdp.py", 4, "--batch-size 7 --accumulate 2 --shards 2", "each has 1 of 2"),
    ("fsdp.py", 4, "--batch-size 14 --shards 4", "each has 1 of 4"),
], ids="one two gpipe 1f1b tensor accumulate copies hsdp shards".split())
def test_takes_the_steps_of_one_device(script, nproc, options, shows, exact, tmp_path):
    """And fsdp.py begins with the same weights, which each rank draws a block at a time."""
    result = train(exact, script, nproc, *options.split(), cwd=tmp_path)
    if script == "fsdp.py":
        weights, shards = list(transformer(16, 2).parameters()), int(shows[-1])
        bytes_of = [sum(8 * weight.chunk(shards)[n].numel() for weight in weights)
                    for n in range(shards)] * (nproc // shards)
        total = sum(weight.numel() for weight in weights)
        shows = f"{total} parameters, bytes per rank: {bytes_of}\n"
    assert shows in result.output, result
    check_steps(result, exact, script, tmp_path, nproc)


def test_tensor_parallel_fails_if_the_hidden_features_cannot_be_split(exact, tmp_path):
    result = train(exact, "tensor_parallel.py", 2, "--hidden", 511, cwd=tmp_path, code=1)
    assert "a and b must have same reduction dim" in result.errors, result


# fsdp.py, stopped and resumed

TWO_RANKS = ["--batch-size", 28, "--save-every", 2]
DROPOUT = ("self.mlp(self.norm2(tokens))",
           "nn.functional.dropout(self.mlp(self.norm2(tokens)), 0.1, self.training)")


def test_fsdp_resumes_bit_by_bit_from_the_newest_complete_checkpoint(exact, tmp_path):
    """A half-written one costs the steps since the one before; a damaged one is an error.

    Two are kept: of the stop after three steps of the second epoch, and of its second step.
    """
    project = shutil.copytree(exact, tmp_path / "project")
    edit(project, "fsdp.py", DROPOUT)
    result = train(project, "fsdp.py", 2, *TWO_RANKS, cwd=tmp_path, stop=19)  # 16 in epoch 1
    assert "stopped at {'epoch': 2, 'images': 168, " in result.output, result
    saved = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert saved == ["epoch-0002-image-000000000112", "epoch-0002-image-000000000168"]
    (tmp_path / "undisturbed").mkdir()
    train(project, "fsdp.py", 2, *TWO_RANKS, cwd=tmp_path / "undisturbed")
    names = ("truncated", "half-written", "complete")
    copies = [shutil.copytree(tmp_path / "checkpoint", tmp_path / name / "checkpoint")
              for name in names]
    shard = copies[0] / saved[1] / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1000])
    result = train(project, "fsdp.py", 2, *TWO_RANKS, cwd=copies[0].parent, code=1)
    error = f"cannot load checkpoint/{saved[1]}; before it: checkpoint/{saved[0]}"
    assert f"ValueError: {error}" in result.errors, result
    assert {path.name for path in copies[0].iterdir()} == {*saved}
    (copies[1] / saved[1] / ".metadata").unlink()
    for copy, newest in zip(copies[1:], saved, strict=True):
        result = train(project, "fsdp.py", 2, *TWO_RANKS, cwd=copy.parent)
        assert result.output.splitlines()[1].startswith(f"resuming from checkpoint/{newest} at ")
        assert equal(copy.parent / "mnist.pt", tmp_path / "undisturbed/mnist.pt")
    dcp_to_torch_save(copy / "epoch-0003-image-000000000000", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["state"]["model"]
    torch.save(whole, tmp_path / "mnist.pt")
    assert equal(tmp_path / "mnist.pt", copy.parent / "mnist.pt")


def test_fsdp_resumes_on_any_number_of_ranks_with_each_image_once(exact, tmp_path):
    """With the weights of one device, and the loss and accuracy of its second epoch."""
    train(exact, "fsdp.py", 2, *TWO_RANKS, cwd=tmp_path, stop=3)
    for nproc, options in ((1, ["--batch-size", 56]), (4, ["--batch-size", 14, "--shards", 2])):
        folder = tmp_path / f"on {nproc}"
        shutil.copytree(tmp_path / "checkpoint", folder / "checkpoint")
        result = train(exact, "fsdp.py", nproc, *options, cwd=folder)
        assert "resuming from checkpoint/epoch-0001-image-000000000168 at " in result.output, result
        check_steps(result, exact, "fsdp.py", folder, nproc, epochs=[2])
    # With another batch the rate is that of the progress, too, from the first step on
    project = shutil.copytree(exact, tmp_path / "project")
    step = "            optimizer.step()\n"
    show = "            print('rate', optimizer.param_groups[0]['lr'])\n"
    edit(project, "fsdp.py", (step, show + step))
    result = train(project, "fsdp.py", 1, "--batch-size", 30, cwd=tmp_path)
    rate = 0.01 * (30 / 256) ** 0.5 * rate_factor(24 * 168 / 720, 24)
    assert float(re.search("rate (.*)", result.output)[1]) == pytest.approx(rate, rel=1e-12)


def test_fsdp_stopped_in_an_evaluation_only_evaluates_again(exact, tmp_path):
    """The 9th batch that a rank asks for is the first of the evaluation: 7, and no more."""
    result = train(exact, "fsdp.py", 2, *TWO_RANKS, "--epochs", 1, cwd=tmp_path, stop=9)
    assert "stopped at {'epoch': 1, 'images': 360, " in result.output, result
    again = train(exact, "fsdp.py", 2, *TWO_RANKS, "--epochs", 1, cwd=tmp_path)
    assert "'images': 360" in again.output.splitlines()[1], again
    assert [line["loss"] for line in again.epochs()] == ["nan"]


def test_fsdp_keeps_the_whole_weights_of_the_best_epoch(exact, tmp_path):
    """Not rank 0's half, and not those of a later epoch, also after a resume."""
    project = shutil.copytree(exact, tmp_path / "project")
    edit(project, "fsdp.py", ("score = evaluate(model, test_loader, device)",
                              "score = evaluate(model, test_loader, device) and SCORES[epoch]"),
         ("\nfaulthandler.", "\nSCORES = {1: 0.1, 2: 0.3, 3: 0.2}\nfaulthandler."),
         ("        if score is None", "        save_whole(model, f'epoch-{epoch}.pt')\n"
          "        if score is None"))
    options = [*TWO_RANKS, "--epochs", 3]
    stopped = train(project, "fsdp.py", 2, *options, cwd=project, stop=34)  # in the third epoch
    assert "stopped at {'epoch': 3, 'images': 112, " in stopped.output, stopped
    assert "resuming" in train(project, "fsdp.py", 2, *options, cwd=project).output
    assert equal(project / "best.pt", project / "epoch-2.pt")
    assert equal(project / "mnist.pt", project / "epoch-3.pt")
    assert distance(project / "best.pt", project / "mnist.pt") > 0


def test_fsdp_rejects_a_checkpoint_of_another_run(exact, tmp_path):
    train(exact, "fsdp.py", 2, *TWO_RANKS, cwd=tmp_path, stop=1)
    saved = sorted((tmp_path / "checkpoint").iterdir())
    fewer = shutil.copytree(exact, tmp_path / "fewer images")
    fewer_digits(fewer, now=40, digits=30)
    for project, change, problem in (
            (exact, "--width=32", "ValueError: cannot load "),  # torch's reason is above it
            (exact, "--depth=1", '"parameters": '), (exact, "--seed=2", '"seed": 1, '),
            (exact, "--lr=0.1", '"lr": 0.01, '), (fewer, "--epochs=2", '"images": 360, ')):
        result = train(project, "fsdp.py", 2, *TWO_RANKS, change, cwd=tmp_path, code=1)
        assert problem in result.errors and "checkpoint" in result.errors, result
        assert sorted((tmp_path / "checkpoint").iterdir()) == saved


@pytest.mark.parametrize(("script", "devices"), [("train.py", 2), ("fsdp.py", 1)])
def test_all_ranks_save_and_evaluate_with_the_buffers_of_rank_0(
        script, devices, tmp_path, monkeypatch):
    """fsdp.py keeps the newest two checkpoints, saves none twice, and loads what rank 0 finds."""

    def save(state, checkpoint_id):
        assert all((buffer == 7).all() for buffer in model.buffers())
        checkpoint_id.mkdir()
        (checkpoint_id / ".metadata").touch()

    script, model = load_script(FOLDER / script), nn.BatchNorm1d(4, affine=False)
    model.reshard = lambda: None
    monkeypatch.setattr(script.dist, "broadcast", lambda buffer, src: buffer.fill_(7 + src))
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(script, "gather_in_order", lambda correct, length: correct[:length])
    monkeypatch.setattr(script, "stop_asked", lambda: False, raising=False)
    inputs = torch.rand(5, 4)
    test_loader = DataLoader(TensorDataset(inputs, inputs.argmax(1)), 2)
    assert script.evaluate(model, test_loader, *["cpu"] * devices) == 1
    assert all((buffer == 7).all() for buffer in model.buffers())
    if devices == 1:
        done, loaded, found = {"epoch": 1, "images": 0}, [], [tmp_path / "of rank 0/.metadata"]
        state = script.State(tmp_path, nn.BatchNorm1d(4), None, {}, done, {})
        model = state.model
        monkeypatch.setattr(script.dcp, "save", save)
        monkeypatch.setattr(script.dcp, "load", lambda _, **given: loaded.append(given))
        monkeypatch.setattr(script.dist, "broadcast_object_list",
                            lambda objects: objects.__setitem__(0, found))
        (tmp_path / "epoch-0002-half-written").mkdir()
        for done["images"] in (8, 9, 9, 1000):
            state.save()
        kept = sorted(path.name.rpartition("-")[2] for path in tmp_path.iterdir())
        assert kept == ["000000000009", "000000001000", "written"]
        state.load()
        assert loaded == [{"checkpoint_id": tmp_path / "of rank 0"}]


NOTE = """
SEEN = {}


def note(*key):
    SEEN[key] = SEEN.get(key, 0) + 1


def note_step(loss, gradient):
    note("loss", loss.dtype)
    if gradient is not None:  # it is that of the ranks only after the last micro-batch
        local = gradient.to_local()
        note("averaged in bfloat16", bool((local.bfloat16() == local).all()))
"""


@pytest.mark.parametrize(("options", "dtype", "times"), [
    ([], "torch.float32", 1),
    (["--amp", "--recompute"], "torch.bfloat16", 2),
])
def test_fsdp_computes_and_communicates_as_its_options_say(options, dtype, times, tmp_path):
    """On each rank: two blocks, two epochs, five steps of at most 3 of an epoch's 14 batches."""
    project = copy_project(tmp_path / "project", FOLDER / "fsdp.py")
    edit(project, "fsdp.py", ("\n\ndef parse_args", f"{NOTE}\n\ndef parse_args"),
         ("        heads = ", "        if self.training:\n"
          "            note('block', tokens.dtype, self.out.weight.dtype)\n        heads = "),
         ("                total[0] +=", "                "
          "note_step(loss, model.patches.weight.grad)\n                total[0] +="),
         ("            nn.utils.clip_", "            note('seed', torch.initial_seed())\n"
          "            nn.utils.clip_"),
         ("    # 5.", "    note(train_loader.worker_init_fn.__name__, torch.initial_seed())\n"
          "    # 5."),
         ("        if score is None", "        note({type(each).__name__ for each in "
          "model.parameters()} == {'DTensor'})\n        if score is None"),
         ("    dist.destroy", "    note(*map(signal.getsignal, (1, 2, 15)))\n"
          "    print(*SEEN.items(), sep='\\n')\n    dist.destroy"))
    given = [*SMALL, "--epochs", 2, "--batch-size", 45, "--accumulate", 3, "--data-dir", "common"]
    result = run_ranks("fsdp.py", 2, *given, *options, cwd=project)
    ignored = ", ".join(map(repr, [signal.SIG_IGN] * 3))
    for seen in (f"('block', {dtype}, {dtype}), {2 * 2 * 14 * times}",
                 f"('loss', torch.float32), {2 * 14}", f"('averaged in bfloat16', False), {2 * 5}",
                 "(True,), 2", f"({ignored}), 1"):
        assert result.output.count(f"({seen})\n") == 2, seen
    for rank in (0, 1):  # whose DataLoader workers draw other numbers
        assert result.output.count(f"(('ignore_stop_signals', {rank}), 1)\n") == 1, result
    seeds = re.findall(r"'seed', (\d+)\), 1\)", result.output)
    assert len({*seeds}) == len(seeds) == 2 * 2 * 5  # one per rank and step


HEAD = "        self.norm = nn.LayerNorm(width)\n        self.scores = nn.Linear(width, 10)\n"
BUFFER = HEAD + "        self.scores.register_buffer('scale', {}, persistent={})\n"
BUFFER += "        self.scores.forward = lambda inputs: inputs\n"
PARSED, RESET = "args = parser.parse_args()", "            module.reset_parameters()"


@pytest.mark.parametrize(("old", "new", "error"), [
    (HEAD, HEAD + "        self.unused = nn.Linear(2, 2)\n",
     "ValueError: unused.weight has had no gradient"),
    (PARSED, f"{PARSED}; rank = os.environ['RANK']; os.mkdir(rank); os.chdir(rank)",
     "is not on a disk that all nodes share"),
    (PARSED, f"{PARSED}; Path('checkpoint').touch()", "checkpoint/epoch-0001-image-000000000056"),
    (HEAD, HEAD + "        self.scores.bias = self.norm.weight\n",
     "ValueError: a weight that two modules share became two"),
    (HEAD, HEAD + "        self.scores.scale = nn.Parameter(torch.ones(1))\n",
     "ValueError: reset_parameters() of <class 'torch.nn.modules.linear.Linear'> leaves"),
    (HEAD, BUFFER.format("torch.ones(3)", True), "leaves tensors unset"),
    (HEAD, BUFFER.format("torch.arange(3)", False), "leaves tensors unset"),
    (HEAD, BUFFER.format("torch.ones(3, 3, dtype=bool).tril()", False), "leaves tensors unset"),
    (RESET, f"            torch.manual_seed(rank)\n{RESET}", "the copies of the model differ"),
], ids="unused disks disk tied parameter buffer integers mask copies".split())
def test_fsdp_fails_at_once_where_it_would_fail_later(old, new, error, exact, tmp_path):
    project = shutil.copytree(exact, tmp_path / "project")
    edit(project, "fsdp.py", (old, new))
    options = [*TWO_RANKS, "--shards", 1, "--save-every", 1]
    result = train(project, "fsdp.py", 2, *options, cwd=tmp_path, code=1)
    assert error in result.errors, result


def test_no_rank_holds_the_whole_model_at_the_start(exact, tmp_path):
    """At most its shards of the blocks, half of one that is being split, and the rest."""
    project = shutil.copytree(exact, tmp_path / "project")
    count = """        print("held", sum(
            getattr(each, "_local_tensor", each).numel()
            for each in model.parameters() if not each.is_meta))
"""
    before = "        if isinstance(module, (Block"
    edit(project, "fsdp.py", (before, count + before))
    result = train(project, "fsdp.py", 2, *TWO_RANKS, "--depth", 8, cwd=tmp_path, stop=1)
    held = max(map(int, re.findall(r"^held (\d+)", result.output, re.M)))
    model = transformer(16, 8)
    whole, blocks, block = [sum(each.numel() for each in part.parameters())
                            for part in (model, model.blocks, model.blocks[0])]
    assert held <= (blocks + block) / 2 + whole - blocks


# Options and devices


@pytest.mark.parametrize(("gpus", "rank", "devices"), [
    (4, 2, ["cuda:0", "cuda:1"]),  # on the second machine
    (4, 3, ["cuda:2", "cuda:3"]),
    (3, 0, ["cpu", "cpu"]),
    (3, 1, ["cpu", "cpu"]),
    (0, 0, ["cpu", "cpu"]),
])
def test_each_process_has_its_own_two_gpus_or_the_cpu(gpus, rank, devices, monkeypatch, capsys):
    launch = {"RANK": rank, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    args = parse(monkeypatch, FOLDER / "train.py", gpus=gpus, **launch)
    assert [str(device) for device in args.devices] == devices
    line = "training on the CPU: it needs 4 GPUs, and PyTorch finds 3\n"
    assert capsys.readouterr().out == (line if (gpus, rank) == (3, 0) else "")


def test_each_layer_and_micro_batch_is_on_its_device_and_dropout_differs(tmp_path):
    """The other device is `meta`, for tensors without memory, which cannot move back."""
    project = copy_project(tmp_path / "project", FOLDER / "train.py")
    note = """            print([each.device.type for each in (images, labels, *net.parameters())])
            for layer in (net.layer1, net.layer2):
                layer.register_forward_pre_hook(
                    lambda layer, inputs: print(len(inputs[0]), inputs[0].device))
            rank or net(images)
            sys.exit(f'{rank} {torch.initial_seed()}')
"""
    edit(project, "train.py", ("DDP(net, gradient_as_bucket_view=True)", "net"),
         ("            loss = criterion", f"{note}            loss = criterion"))
    options = ["--devices", "cpu,meta,meta,cpu", "--batch-size", 8, "--chunks", 3]
    result = run_ranks("train.py", 2, *options, "--data-dir", "common", cwd=project, code=1)
    assert sorted(result.errors.splitlines()) == ["0 0", "1 1"], result  # rank and seed
    shown = [f"{n} {device}" for n in (3, 3, 2) for device in ("cpu", "meta")]  # of layers 1 and 2
    for first, second in (("cpu", "meta"), ("meta", "cpu")):
        shown.append(str([first, second, *[first] * 4, *[second] * 6]))
    assert sorted(result.output.splitlines()) == sorted(shown), result
