"""04 and 06 adapted to other models and data, as patches in copies/: right in what nobody sees.

A recorder, which the tests add to a copy, notes what each rank has before each optimizer step.
"""

import ast
import json
import math
import random
import re
import shutil
import signal
from collections import Counter

import pytest
import torch
from helpers.checks import bits, distance, equal
from helpers.commands import WITNESS, run
from helpers.paths import ROOT
from helpers.projects import apply, copy_project, edit
from helpers.ranks import run_ranks
from helpers.scripts import declare_torchvision_operators, load_script

STEP = "            optimizer.step()\n"
NOTE = """
import json, os

def note(**what):
    with open("notes", "a") as file:  # a line in one piece, also from two ranks
        file.write(json.dumps(what) + "\\n")
"""


def adapted(folder, patch, note, recorder):
    """A copy of the script that this patch is for, with the patch and a recorder of its steps."""
    [script] = ROOT.glob(f"{patch[:2]}_*/train.py")
    project = copy_project(folder / "my project", script, "run.sh")
    apply(project, patch)
    (project / "recorder.py").write_text(NOTE + recorder)
    edit(project, "train.py", ("\nfaulthandler.", "\nimport recorder\nfaulthandler."),
         (STEP, f"            recorder.{note}\n{STEP}"))
    return project


def notes(project):
    return [json.loads(line) for line in (project / "notes").read_text().splitlines()]


# 04: resnet18, the first layers frozen, on a folder of images

CLASSES = {"blue": 22, "green": 22, "red": 22}  # 53 to train, 13 to evaluate: no multiples of 2
NORMS = """
def sums(tensors):
    return [tensor.double().sum().item() for tensor in tensors]

def step(rank, epoch, epochs, net, optimizer):
    norms = [(name, part) for name, part in net.named_modules() if "BatchNorm" in str(type(part))]
    own = [parameter for parameter in net.parameters() if parameter.requires_grad]
    note(rank=rank, rates=[group["lr"] for group in optimizer.param_groups],
         norms=[name for name, part in norms if part.training],
         gradients=sums(parameter.grad for parameter in own), weights=sums(net.parameters()))
    if epoch == epochs:  # then the last weights are bad
        net.fc.bias.data[0] = 1e6
"""


def test_resnet18_trains_as_its_single_process_would(tmp_path):
    from PIL import Image

    declare_torchvision_operators()
    from torchvision.models import ResNet18_Weights, resnet18

    project = adapted(tmp_path, "04_resnet18.patch",
                      "step(rank, epoch, args.epochs, net, optimizer)", NORMS)
    edit(project, "train.py", (".transforms()", ".transforms(crop_size=32, resize_size=32)"))
    noise = torch.Generator().manual_seed(0)
    for number, name in enumerate(CLASSES):
        (project / "data" / name).mkdir(parents=True)
        for image in range(CLASSES[name]):
            pixels = torch.randint(128, (8, 8, 3), generator=noise, dtype=torch.uint8)
            pixels[:, :, 2 - number] += 64
            Image.fromarray(pixels.numpy()).save(project / f"data/{name}/{image:02}.png")
    options = ["--epochs", 2, "--batch-size", 9, "--workers", 1]
    settings = {**WITNESS, "TORCHVISION_OPERATORS": 1}
    result = run_ranks("train.py", 2, *options, cwd=project, **settings)
    assert result.code == 0, result

    # Each group's rates are torch's, and gradients and weights are the same on both ranks
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (1e-4, 1e-3)]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    ranks = [[note for note in notes(project) if note.pop("rank") == rank] for rank in range(2)]
    assert ranks[0] == ranks[1] and len(ranks[0]) == 6
    for note in ranks[0]:
        assert note["rates"] == [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        scheduler.step()

    # BatchNorm: the frozen ones keep their statistics, and all others train
    net = resnet18(num_classes=3).eval()
    norms = [name for name, part in net.named_modules() if isinstance(part, torch.nn.BatchNorm2d)]
    own = [name for name in norms if not name.startswith(("bn1", "layer1"))]
    assert len(own) == 15
    assert all(note["norms"] == own for note in ranks[0])
    best = torch.load(project / "best-last.pt", weights_only=True)
    assert [name for name in norms if best[f"{name}.running_mean"].any()] == own

    # The best score is that of the saved file, image by image; the last weights are others
    net.load_state_dict(best)
    prepare = ResNet18_Weights.DEFAULT.transforms(crop_size=32, resize_size=32)
    files = [(path, number) for number, name in enumerate(CLASSES)
             for path in sorted((project / "data" / name).iterdir())]
    split = torch.Generator().manual_seed(0)
    right = []
    for path, number in torch.utils.data.random_split(files, [0.8, 0.2], split)[1]:
        with torch.no_grad(), Image.open(path) as image:
            right.append(int(net(prepare(image)[None]).argmax()) == number)
    scores = [line["accuracy"] for line in result.epochs()]
    assert max(scores) == f"{sum(right) / 13:.4f}" > scores[-1], result
    assert result.output.splitlines()[-1] == f"best accuracy {max(scores)}"
    assert not equal(project / "best-last.pt", project / "last.pt")


# 06: a language model on lines of text

LINES = 142  # to train: four steps of 32 on two ranks, and a fifth of 14
OPTIONS = ["--batch-size", 4, "--accumulate", 4, "--save-every", 2]
EVENTS = """
import signal, time
import torch.distributed as dist

def step(rank, world, args, done, total, optimizer, micro_batches):
    rows = [row for batch in micro_batches for row in batch["tokens"]]
    note(world=world, epochs=args.epochs, epoch=done["epoch"], images=done["images"],
         losses=total[0].item(), rates=[group["lr"] for group in optimizer.param_groups],
         lines=[bytes(row[row > 0].tolist()).decode().strip() for row in rows])
    at(f"{done['epoch']}:{done['images']}", rank)

def at(place, rank):
    for event in os.environ.get("EVENTS", "").split():
        marker = f"{event} on {rank}"  # it happens once
        if event.endswith(f"@{place}") and not os.path.exists(marker):
            open(marker, "w").close()
            happen(event.split("@")[0], rank)

def happen(what, rank):
    dist.barrier()
    if what == "kill-all" or what == "kill-one" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop-one" and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "stop-torchrun" and rank == 0:
        remember, received = signal.getsignal(signal.SIGTERM), []
        signal.signal(signal.SIGTERM, lambda *event: [remember(*event), received.append(event)])
        os.kill(os.getppid(), signal.SIGTERM)
        while not received:  # torchrun forwards the signal
            time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of 06 with the language model, and a text of lines that differ."""
    note = "step(rank, world_size, args, done, total, optimizer, micro_batches)"
    folder = tmp_path_factory.mktemp("language")
    project = adapted(folder, "06_language_model.patch", note, EVENTS)
    evaluation = "    net.eval()\n"
    event = "    recorder.at('evaluation', dist.get_rank())\n"
    edit(project, "train.py", (evaluation, evaluation + event))
    words = "the a small large model step rank node trains reads keeps gradient of with".split()
    numbers = random.Random(0)
    lines = [" ".join(numbers.choices(words, k=numbers.randint(1, 8))) for _ in range(LINES + 31)]
    lines = [f"{number} {line}" for number, line in enumerate(lines)]
    (project / "train.txt").write_text("\n".join(lines[:LINES]))
    (project / "test.txt").write_text("\n".join(lines[LINES:]))
    return project


def trained(project, folder, nproc, *options, **settings):
    """Train in this folder, with checkpoints; returns the result, which must be a success."""
    options = ["--data-dir", project, "--amp", *OPTIONS, *options]
    result = run_ranks(project / "train.py", nproc, *options, cwd=folder, **settings)
    assert result.code == 0, result
    return result


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, epochs_of(trained(project, folder, 2, "--epochs", 3))


def epochs_of(result):
    """The losses and perplexities of the epoch lines."""
    return re.findall(r"^epoch .* loss (\S+)  perplexity (\S+) ", result.output, re.M)


def mean_loss(folder, epoch, done=0):
    """The mean loss of an epoch, or of its rest after the first lines, whose number is done.

    From an undisturbed run, whose ranks noted their sums of losses, with the step that begins.
    """
    losses, tokens = {}, 0
    for note in notes(folder):
        if note["epoch"] == epoch:
            losses[note["images"]] = losses.get(note["images"], 0) + note["losses"]
            if note["images"] >= done:
                tokens += sum(len(line) + 1 for line in note["lines"])  # and the end of each line
    return f"{(losses[max(losses)] - losses.get(done - 32, 0)) / tokens:.4f}"


def resumed(result):
    """Where a run was when it began."""
    return place(result.output.splitlines()[0], "resuming from checkpoint.pt at ", "")


def stopped(result):
    """Where a run was when it ended."""
    last = result.output.splitlines()[-1]
    return place(last, "stopped at ", "; rerun the same command to resume")


def place(line, before, after):
    """What a line has between these texts: a dictionary that is printed as plain values."""
    assert line.startswith(before) and line.endswith(after), line
    return ast.literal_eval(line.removeprefix(before).removesuffix(after))


def at(epoch, images, best):
    """A place, with a best perplexity that was printed, or None."""
    best = best and pytest.approx(float(best), abs=6e-5)
    return {"epoch": epoch, "images": images, "best": best}


def check_notes(folder, epochs):
    """Every line came once in each epoch, and both groups had the rates of the formula."""
    seen = [Counter() for _ in range(epochs)]
    for note in notes(folder):
        progress = (note["epoch"] - 1 + note["images"] / LINES) / note["epochs"]
        peak = 3e-3 * (4 * 4 * note["world"] / 256) ** 0.5
        steps = note["epochs"] * math.ceil(LINES / (4 * 4 * note["world"]))
        up, down = (progress * steps + 1) / (0.4 * steps + 1), (1 - progress) / 0.6
        rate = peak * min(up, down)
        assert note["rates"] == pytest.approx([rate] * 2, rel=1e-12)
        seen[note["epoch"] - 1].update(note["lines"])
    assert all(len(epoch) == LINES and {*epoch.values()} == {1} for epoch in seen), seen


def test_perplexity_is_that_of_a_single_process(project, undisturbed, monkeypatch):
    """The score of the saved best file, line by line; every line came once in each epoch.

    And the losses are means over the tokens, without padding.
    """
    folder, epochs = undisturbed
    check_notes(folder, 3)
    assert [loss for loss, _ in epochs] == [mean_loss(folder, epoch) for epoch in (1, 2, 3)]
    monkeypatch.syspath_prepend(project)  # for the recorder
    model = load_script(project / "train.py").LanguageModel().eval()
    model.load_state_dict(torch.load(folder / "best.pt", weights_only=True))
    losses = []
    for line in (project / "test.txt").read_text().splitlines():
        line = torch.tensor([10, *line.encode(), 10])
        with torch.no_grad():
            chances = model(line[None, :-1])[0].double().softmax(1)
        losses += [-math.log(chances[n, byte]) for n, byte in enumerate(line[1:])]
    perplexity = math.exp(sum(losses) / len(losses))
    assert min(float(perplexity) for _, perplexity in epochs) == pytest.approx(perplexity, rel=1e-5)
    done = torch.load(folder / "checkpoint.pt", weights_only=True)["done"]
    assert done["best"] == pytest.approx(perplexity, rel=1e-6)


def test_two_ranks_and_micro_batches_take_the_steps_of_a_whole_batch(project, tmp_path):
    """Also the last step of the epoch, although each micro-batch has other numbers of tokens.

    Without what would hide a wrong divisor: clipping, AdamW, dropout, and rounding.
    """
    exact = tmp_path / "exact"
    shutil.copytree(project, exact)
    edit(exact, "train.py", ("MAX_GRAD_NORM = 1.0", "MAX_GRAD_NORM = 1e9"), ("AdamW(", "SGD("),
         ("dropout=0.1", "dropout=0.0"),
         ("    train(", "    torch.set_default_dtype(torch.float64)\n    train("))
    for nproc, batch, accumulate in ((1, 32, 1), (2, 4, 4)):
        folder = exact / str(nproc)
        folder.mkdir()
        batches = ["--data-dir", exact, "--batch-size", batch, "--accumulate", accumulate]
        result = run_ranks(exact / "train.py", nproc, *batches, "--lr", 1, cwd=folder)
        assert result.code == 0, result
    for weights in ("last.pt", "best.pt"):
        assert distance(exact / "1" / weights, exact / "2" / weights) < 1e-12


@pytest.mark.slow
def test_language_model_resumes_bitwise_after_sigterm_and_sigkill(project, undisturbed, tmp_path):
    """One rank is killed, and torchrun restarts both; both are stopped, once more in an evaluation;
    then both are killed. A resumed epoch has the loss of its rest, and the perplexity of all of it.
    """
    folder, epochs = undisturbed
    perplexities = [perplexity for _, perplexity in epochs]
    best = [min(perplexities[:number], key=float) for number in (1, 2)]
    command = ["bash", project / "run.sh", "--data-dir", project, "--amp", *OPTIONS, "--epochs", 3]
    settings = {"NPROC": "2", "OMP_NUM_THREADS": "1"}
    settings["EVENTS"] = "kill-one@1:96 stop-torchrun@2:32"
    restarted = run(command, tmp_path, **settings)
    assert restarted.code == 1, restarted
    assert resumed(restarted) == at(1, 64, None)
    assert stopped(restarted) == at(2, 64, best[0])
    evaluating = trained(project, tmp_path, 2, "--epochs", 3, EVENTS="stop-one@evaluation")
    assert resumed(evaluating) == at(2, 64, best[0])
    assert stopped(evaluating) == at(2, LINES, best[0])
    killed = run_ranks(project / "train.py", 2, *command[2:], cwd=tmp_path, EVENTS="kill-all@3:32")
    assert killed.code == signal.SIGKILL, killed
    assert resumed(killed) == at(2, LINES, best[0])
    result = trained(project, tmp_path, 2, "--epochs", 3)
    assert resumed(result) == at(3, 0, best[1])
    lines = [line for each in (restarted, evaluating, killed, result) for line in epochs_of(each)]
    losses = [mean_loss(folder, 1, done=64), "nan", epochs[2][0]]
    assert lines == [*zip(losses, perplexities, strict=True)]
    for weights in ("last.pt", "best.pt"):
        assert equal(tmp_path / weights, folder / weights)
    runs = []
    for each in (tmp_path, folder):
        state = bits(torch.load(each / "checkpoint.pt", weights_only=True))
        scheduler = state["objects"].pop("scheduler")  # but its count of its own steps
        rates = {(note["epoch"], note["images"]): note["rates"] for note in notes(each)}
        runs.append((state, scheduler["_last_lr"], rates))
    assert runs[0] == runs[1]
    assert runs[0][0]["objects"].keys() == {"model", "optimizer", "ema"}


@pytest.mark.slow
def test_language_model_resumes_on_one_process_and_trains_longer(project, tmp_path):
    first = trained(project, tmp_path, 2, "--epochs", 2, EVENTS="stop-one@2:32")
    [(_, best)] = epochs_of(first)
    assert stopped(first) == at(2, 64, best)
    assert resumed(trained(project, tmp_path, 1, "--epochs", 2)) == at(2, 64, best)
    longer = trained(project, tmp_path, 2, "--epochs", 3)
    assert len(epochs_of(longer)) == 1, longer
    check_notes(tmp_path, 3)
    assert {note["epochs"] for note in notes(tmp_path)} == {2, 3}
    assert [note["world"] for note in notes(tmp_path)].count(1) == 5
