"""06: a stopped run resumes as if nothing had happened, and a foreign checkpoint is rejected."""

import contextlib
import copy
import inspect
import itertools
import math
import os
import pickle
import re
import shutil
import signal
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.checks import bits, check_trained, equal, launch, rate_factor
from helpers.paths import ROOT
from helpers.projects import copy_project, edit
from helpers.ranks import run_ranks
from helpers.readmes import blocks, sections
from helpers.scripts import load_script, parse, run_main

FOLDER = ROOT / "06_checkpointing"


def test_two_ranks_train_and_a_rerun_has_nothing_to_do(repository, tmp_path):
    options = ["--epochs", 2]
    result = launch(repository, "06_checkpointing", *options, cwd=tmp_path, NPROC="2")
    check_trained(result, tmp_path, epochs=2, at_least=0.5)
    first = (tmp_path / "mnist.pt").rename(tmp_path / "first.pt")
    again = run_ranks(repository / "06_checkpointing/train.py", 2, *options, cwd=tmp_path)
    done = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["done"]
    assert (done["epoch"], done["images"]) == (3, 0)
    assert again.output == f"resuming from checkpoint.pt at {done}\n", again
    assert equal(first, tmp_path / "mnist.pt")


# The labels are the larger of two sums
OWN = """
class Points(torch.utils.data.TensorDataset):
    def __init__(self, first, last):
        points = torch.randn(1003, 6, generator=torch.Generator().manual_seed(0))[first:last]
        super().__init__(points, (points[:, :3].sum(1) > points[:, 3:].sum(1)).long())


def network():
    hidden = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)
    return nn.Sequential(*hidden, nn.Linear(32, 2))


def record(file, *values):
    with open(file, "a") as file:
        print(*values, file=file)
"""
LOOP = "    # 5. Train and evaluate\n"
STEP = "            optimizer.step()\n"
RECORD = '            rates = [group["lr"] for group in optimizer.param_groups]\n'
RECORD += '            record(f"steps-{rank}", epoch, done["images"], *rates)\n'
SCHEDULE = "ByProgress(optimizer, lambda _: warmup_then_decay(steps_done(), total_steps))"
LAYERS = ("(model.parameters(), lr,", "([{'params': net[:2].parameters(), 'lr': lr / 10}, "
          "{'params': net[2:].parameters()}], lr,")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with another network, other data and dropout, which trains in a moment.

    Each step's epoch, images done before and learning rates go to a file.
    """
    project = copy_project(tmp_path_factory.mktemp("copy") / "my project", FOLDER / "train.py")
    changes = [
        ("load_mnist(args.data_dir)", "Points(0, 800), Points(800, 1003)"),
        ("ConvNet().to(device, memory_format=torch.channels_last)", "network().to(device)"),
        ("\n\ndef parse_args", f"\n{OWN}\n\ndef parse_args"),
        (LOOP, f'    record("seeds", torch.initial_seed())\n{LOOP}'),
        (STEP, RECORD + STEP),
    ]
    edit(project, "train.py", *changes)
    return project


def train(project, ranks, folder, *options, code=0, stop=0):
    """Train in forked ranks, of which the last one receives SIGTERM at its batch `stop`."""
    stop = (ranks - 1, signal.SIGTERM, stop or 0)
    return run_ranks(project / "train.py", ranks, *options, cwd=folder, code=code, stop=stop)


AUGMENTATION = """
    epoch = 0

    def __getitem__(self, index):
        torch.manual_seed(self.epoch * len(self) + index)
        point, label = super().__getitem__(index)
        return point + 0.1 * torch.randn(6), label


def network"""


def test_a_copy_with_its_own_state_and_augmentation_resumes(project, tmp_path):
    """An EMA, a scheduler of torch and a number, each with the lines that a reader adds.

    The scheduler counts steps, so another number of processes is an error.
    """
    own = shutil.copytree(project, tmp_path / "own")
    ema = "torch.optim.swa_utils.AveragedModel(net, multi_avg_fn="
    ema += "torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))"
    edit(
        own, "train.py", LAYERS, ("\n\n\ndef network", f"\n{AUGMENTATION}"),
        ("        train_sampler[:]", "        train_set.epoch = epoch\n        train_sampler[:]"),
        (SCHEDULE, "torch.optim.lr_scheduler.OneCycleLR(optimizer, [lr / 10, lr], total_steps)\n"
                   f"    ema = {ema}"),
        ('"lr": args.lr}', '"lr": args.lr, "batch": global_batch, "epochs": args.epochs}'),
        ('"scheduler": scheduler}', '"scheduler": scheduler, "ema": ema}'),
        ('"best": None}', '"best": None, "evaluations": 0}'),
        (STEP, f"{STEP}            ema.update_parameters(net)\n"),
        ("        score = eval", '        done["evaluations"] += 1\n        score = eval'),
    )
    options = ["--epochs", 4, "--batch-size", 16]  # 100 steps
    folders = [tmp_path / name for name in ("stopped", "undisturbed")]
    for folder in folders:
        folder.mkdir()
    [line] = train(own, 2, folders[0], *options, stop=40).output.splitlines()[1:]
    alone = train(own, 1, folders[0], *options, code=1)
    assert re.search("ValueError: .* 'batch': 32, 'epochs': 4}, not .* 'batch': 16, ", alone.errors)
    rest = train(own, 2, folders[0], *options)
    progress = re.fullmatch("stopped (at .*); rerun the same.*", line)[1]
    assert rest.output.startswith(f"resuming from checkpoint.pt {progress}\n"), rest
    assert float(rest.epochs()[-1]["accuracy"]) > 0.9, rest
    train(own, 2, folders[1], *options)
    one, other = [torch.load(folder / "checkpoint.pt") for folder in folders]
    assert bits(one) == bits(other) and one["done"]["evaluations"] == 4
    assert equal(*[folder / "best.pt" for folder in folders])


def cosine(step, total_steps):
    warmup = total_steps // 10
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup)))


TRANSFORMERS = f"""
import math
from torch.optim.lr_scheduler import LambdaLR
{inspect.getsource(cosine)}
def get_cosine_schedule_with_warmup(optimizer, warmup, total):
    assert warmup == total // 10
    return LambdaLR(optimizer, lambda step: cosine(step, total))
"""


def gradients_on_one_device(net, points, step, ranks, batch, seed):
    """Those of the mean over the points with the indices `step`; returns the losses.

    Each rank has its own dropout and each micro-batch its own BatchNorm, with rank 0's statistics.
    """
    losses = []
    for rank in reversed(range(ranks)):
        statistics = copy.deepcopy(list(net.buffers()))
        torch.manual_seed(hash((*seed, rank)))
        for part in torch.tensor(step[rank::ranks]).split(batch):
            inputs, labels = points[part]
            chances = net(inputs).log_softmax(1)
            each = -0.9 * chances[range(len(part)), labels] - 0.1 * chances.mean(1)
            (each.sum() / len(step)).backward()
            losses += each.tolist()
        if rank > 0:
            for buffer, before in zip(net.buffers(), statistics, strict=True):
                buffer.copy_(before)
    return losses


@pytest.mark.parametrize("factor", [rate_factor, cosine], ids=["linear", "cosine"])
def test_each_option_may_change_and_the_rate_follows_the_progress(
        factor, project, tmp_path, monkeypatch):
    """Stopped on two processes, shortened, finished on one, extended, resumed on three.

    The steps, losses and scores are those of one device. Three divides neither the 800 points nor
    the 203 to evaluate.
    """
    own = shutil.copytree(project, tmp_path / "own")
    edit(own, "train.py", LAYERS, ("(points, (", "(points.double(), ("),
         ("nn.Linear(32, 2))", "nn.Linear(32, 2)).double()"))
    if factor is cosine:
        page = sections(ROOT / "06_checkpointing/README.md")["Your own schedule"]
        [lines] = blocks(page, "python")
        imported = "from transformers import get_cosine_schedule_with_warmup\n"
        (own / "transformers.py").write_text(TRANSFORMERS)
        monkeypatch.syspath_prepend(own)
        edit(own, "train.py", (f"    scheduler = {SCHEDULE}\n", textwrap.indent(lines, "    ")),
             ("import argparse\n", f"import argparse\n{imported}"))
    starts = [
        ({"--epochs": 4, "--batch-size": 24}, 2, 6, 0),
        ({"--epochs": 1, "--accumulate": 4}, 1, None, 6 * 48),
        ({"--epochs": 2}, 1, 6, 800),
        ({"--epochs": 3, "--batch-size": 8, "--accumulate": 2}, 3, None, 800 + 2 * 96),
    ]
    options = {"--lr": 0.5, "--accumulate": 1, "--seed": 3}
    steps = tmp_path / "steps-0"
    script = load_script(own / "train.py")
    points, [inputs, labels] = script.Points(0, 800), script.Points(800, 1003).tensors
    torch.manual_seed(3)
    net = script.network()
    groups = [{"params": part.parameters()} for part in (net[:2], net[2:])]
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    best = 0
    for changed, ranks, stop, images in starts:
        options |= changed
        given = [word for option in options.items() for word in option]
        printed = train(own, ranks, tmp_path, *given, stop=stop).epochs()
        global_batch = options["--batch-size"] * options["--accumulate"] * ranks
        peak = options["--lr"] * (global_batch / 256) ** 0.5
        total_steps = options["--epochs"] * math.ceil(800 / global_batch)
        losses = []
        for line in steps.read_text().splitlines():
            epoch, done, *rates = map(float, line.split())
            assert (epoch - 1) * 800 + done == images
            rate = peak * factor(total_steps * images / (800 * options["--epochs"]), total_steps)
            assert rates == pytest.approx([rate / 10, rate], rel=1e-12)
            epoch, done = int(epoch), int(done)
            shuffle = torch.Generator().manual_seed(3 + epoch)
            order = torch.randperm(800, generator=shuffle).tolist()
            rest = order[done:]
            rest += order[: -len(rest) % ranks]
            losses += gradients_on_one_device(net, points, rest[:global_batch], ranks,
                                              options["--batch-size"], seed=(3, epoch, done))
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.7)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            images += min(global_batch, 800 - done)
            if images == epoch * 800:
                net.eval()
                score = (net(inputs).argmax(1) == labels).double().mean().item()
                net.train()
                best = max(best, score)
                epoch_line = printed.pop(0)
                assert epoch_line["loss"] == f"{sum(losses) / len(losses):.4f}"
                assert epoch_line["accuracy"] == f"{score:.4f}"
                losses = []
        assert not printed
        state = torch.load(tmp_path / "checkpoint.pt")
        torch.testing.assert_close(state["objects"]["model"], net.state_dict(), atol=1e-9, rtol=0)
        steps.unlink()
    assert images == 3 * 800 and state["done"]["best"] == best > 0.8


def test_stopped_in_an_evaluation_it_only_evaluates_again(project, tmp_path):
    """The first batch of the evaluation is the 27th that a rank asks for: 25, and no more."""
    options, done = ["--batch-size", 16], {"epoch": 1, "images": 800, "best": None}
    stopped = train(project, 2, tmp_path, *options, stop=27)
    assert stopped.output == f"stopped at {done}; rerun the same command to resume\n", stopped
    again = train(project, 2, tmp_path, *options)
    line = f"resuming from checkpoint.pt at {done}\nepoch 1/1  loss nan  accuracy "
    assert again.output.startswith(line), again
    assert (tmp_path / "steps-1").read_text().count("\n") == 25
    assert {*(tmp_path / "seeds").read_text().split()} == {"0", "1"}  # of the two ranks


@pytest.fixture
def script(project, tmp_path, monkeypatch):
    """The copy as a module, whose alone(option, ...) trains in this process, the only rank."""
    monkeypatch.chdir(tmp_path)
    script = load_script(project / "train.py")
    join, script.handlers = dist.init_process_group, {}
    monkeypatch.setattr(signal, "signal", script.handlers.__setitem__)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: join(
        backend, store=dist.HashStore(), rank=0, world_size=1))

    def alone(*options):
        parse(monkeypatch, project / "train.py", *options, RANK=0, LOCAL_RANK=0)
        run_main(script)

    script.alone = alone
    return script


def test_what_the_options_turn_on(script, monkeypatch):
    class Compiled(torch.nn.Sequential):  # in place of torch.compile, which takes long
        def no_sync(self):
            return self[0].no_sync()

    def note(module, inputs, output):
        seen.append((type(module).__name__, output.dtype))

    seen, no_sync = [], []
    monkeypatch.setattr(torch, "compile", Compiled)
    monkeypatch.setattr(script.DDP, "no_sync",
                        lambda model: no_sync.append(model) or contextlib.nullcontext())
    script.evaluate = lambda *given: 0.5
    options = ["--amp", "--compile", "--accumulate", 2, "--checkpoint", "other.pt"]
    with torch.nn.modules.module.register_module_forward_hook(note):
        script.alone("--batch-size", 300)  # three batches
        assert ("Linear", torch.float32) in seen and not no_sync
        assert not {("Linear", torch.bfloat16), ("Compiled", torch.float32)} & set(seen)
        seen.clear()
        script.alone("--batch-size", 300, *options)
        assert seen.count(("Compiled", torch.bfloat16)) == 3 and len(no_sync) == 1
    with pytest.raises(ValueError, match="^SyncBatchNorm "):  # for GPUs only
        script.alone("--checkpoint", "third.pt", "--sync-bn")


def test_when_it_saves_and_how_fast_it_is(script, monkeypatch, capsys):
    """Each file is replaced by a complete one, which is on the disk: after a power cut, too."""
    saves, on_disk, seconds = [], [], itertools.count(step=2)
    fsync, replace = os.fsync, os.replace

    def note_fsync(file):
        fsync(file)
        on_disk.append(os.fstat(file).st_size)

    def note_replace(temporary, path):
        assert on_disk.pop() == os.path.getsize(temporary) and temporary.parent == path.parent
        saves.append((path.name, torch.load(temporary).get("done", {}).copy()))
        replace(temporary, path)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    script.evaluate = lambda *given: 0.5
    script.alone("--epochs", 2, "--batch-size", 150, "--save-every", 4)  # six steps in an epoch
    done = [{"epoch": 1, "images": images, "best": None} for images in (600, 800)]
    done += [{"epoch": 2, "images": images, "best": 0.5} for images in (0, 600, 800)]
    done += [{"epoch": 3, "images": 0, "best": 0.5}]
    expected = [("checkpoint.pt", each) for each in done]
    expected.insert(2, ("best.pt", {}))
    assert saves == [*expected, ("mnist.pt", {})]
    assert capsys.readouterr().out.count("  accuracy 0.5000  2.0 s  400 images/s\n") == 2


@pytest.mark.parametrize("file", ["checkpoint.pt", "best.pt", "mnist.pt"])
def test_a_save_that_fails_ends_the_run_and_keeps_the_file_before(file, script):
    """And the same command resumes the run when the disk has room again."""
    script.evaluate = lambda *given: 0.25
    script.alone("--batch-size", 100)
    before = Path(file).read_bytes()
    script.evaluate = lambda *given: 0.5
    os.mkdir(f"{file}.tmp")  # nothing can be written to it
    with pytest.raises(IsADirectoryError):
        script.alone("--batch-size", 100, "--epochs", 2)
    assert Path(file).read_bytes() == before
    os.rmdir(f"{file}.tmp")
    script.alone("--batch-size", 100, "--epochs", 2)
    assert Path(file).read_bytes() != before
    assert torch.load("checkpoint.pt", weights_only=True)["done"]["best"] == 0.5


def test_only_a_better_epoch_replaces_the_best_weights(script):
    """And a path that is a symlink stays one."""
    os.mkdir("disk")
    os.symlink("disk/real.pt", "best.pt")
    best = []
    for epochs, score in enumerate((0.5, 0.4, 0.6), start=1):
        script.evaluate = lambda *given, score=score: score
        script.alone("--batch-size", 100, "--epochs", epochs)
        best.append(Path("disk/real.pt").read_bytes())
        assert torch.load("checkpoint.pt")["done"]["best"] == max(0.5, score)
    assert best[0] == best[1] and os.path.islink("best.pt") and equal("best.pt", "mnist.pt")


def test_what_a_signal_does(script, monkeypatch):
    """It stops all ranks, and ends neither workers nor the exit. So does a lost launcher."""
    loaders, loader = [], script.DataLoader
    monkeypatch.setattr(script, "DataLoader", lambda *given, **options: loaders.append(
        options["worker_init_fn"]) or loader(*given, **options))
    handlers = {}
    script.evaluate = lambda *given: handlers.update(script.handlers) or 0.5
    script.alone("--batch-size", 400)
    ignored = dict.fromkeys([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], signal.SIG_IGN)
    assert script.handlers == ignored
    script.handlers.clear()
    [ignore] = set(loaders)
    ignore(0)
    assert script.handlers == ignored
    dist.init_process_group("gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the question is on the CPU
    assert not script.stop_asked()
    for number, handler in handlers.items():
        handler(number, None)
        assert script.stop_asked() and script.received.pop() == number
    script.LAUNCHER += 1
    assert script.stop_asked() and handlers.keys() == ignored.keys()
    dist.destroy_process_group()


class RunsCode:
    """Its pickle creates a file when something loads it that trusts it."""

    def __reduce__(self):
        return open, ("code-was-run", "w")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in a tensor, where torch.load does not notice it
    path.write_bytes(data)


OTHER = "checkpoint.pt is of {'images': 800, 'seed': 1, 'lr': 0.5}, not {'images': 800, 'seed': "


@pytest.mark.parametrize(("options", "change", "error", "message"), [
    (["--lr", 2], None, ValueError, OTHER + "1, 'lr': 2.0}: move it away to start again"),
    (["--seed", 2], None, ValueError, OTHER + "2, 'lr': 0.5}: move it away to start again"),
    ([], lambda path: path.write_bytes(path.read_bytes()[:-1000]), ValueError, "pt is damaged"),
    ([], flip_a_bit, ValueError, "checkpoint.pt is damaged"),
    ([], lambda path: torch.save(RunsCode(), path), pickle.UnpicklingError, "Weights only load f"),
    ([], lambda path: torch.save({"w": 1}, path), ValueError, "checkpoint.pt is of None, not {"),
    ([], "network", RuntimeError, "Missing key(s) in state_dict"),
], ids="lr seed truncated bit code weights network".split())
def test_a_checkpoint_is_rejected(options, change, error, message, script):
    path, given = Path("checkpoint.pt"), ["--batch-size", 400, "--lr", 0.5, "--seed", 1]
    script.alone(*given)
    if change == "network":
        script.network = lambda: torch.nn.Linear(6, 2)
    elif change:
        change(path)
    before = path.read_bytes()
    with pytest.raises(error, match=re.escape(message)):
        script.alone(*given, "--epochs", 2, *options)
    assert path.read_bytes() == before and not os.path.exists("code-was-run")


def test_what_is_saved_can_be_loaded(script, monkeypatch):
    """Also without the GPU that it was on. What cannot be loaded is not saved: torch's reason."""
    monkeypatch.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
    script.alone("--batch-size", 400)
    script.alone("--batch-size", 400, "--epochs", 2)
    before = Path("checkpoint.pt").read_bytes()
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: .* pathlib"):
        script.save_file({"output": Path("mnist.pt")}, Path("checkpoint.pt"))
    assert Path("checkpoint.pt").read_bytes() == before
