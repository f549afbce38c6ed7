"""04 and 06 adapted to other models and data, as patches in copies/: right in what nobody sees."""

import json
import math
import re
import shutil

import pytest
import torch
from helpers.checks import bits, distance, equal
from helpers.paths import ROOT
from helpers.projects import apply, copy_project, edit, write_lines
from helpers.ranks import run_ranks
from helpers.scripts import declare_torchvision_operators, load_script

# 04: resnet18, the first layers frozen, on a folder of images

CLASSES = {"blue": 22, "green": 22, "red": 22}  # 53 to train, 13 to evaluate: no multiples of 2
RECORDER = """
import json

def sums(tensors):
    return [tensor.double().sum().item() for tensor in tensors]

def step(rank, epoch, epochs, net, optimizer):
    norms = [(name, part) for name, part in net.named_modules() if "BatchNorm" in str(type(part))]
    own = [parameter for parameter in net.parameters() if parameter.requires_grad]
    note = {"rates": [group["lr"] for group in optimizer.param_groups],
            "norms": [name for name, part in norms if part.training],
            "gradients": sums(parameter.grad for parameter in own),
            "weights": sums(net.parameters())}
    with open(f"notes-{rank}", "a") as file:
        print(json.dumps(note), file=file)
    if epoch == epochs:  # then the last weights are bad
        net.fc.bias.data[0] = 1e6
"""


def test_resnet18_trains_as_its_single_process_would(tmp_path):
    from PIL import Image

    declare_torchvision_operators()
    from torchvision.models import ResNet18_Weights, resnet18

    project = copy_project(tmp_path / "my project", ROOT / "04_ddp_torchrun/train.py")
    apply(project, "04_resnet18.patch")
    (project / "recorder.py").write_text(RECORDER)
    step = "            optimizer.step()\n"
    note = "            recorder.step(rank, epoch, args.epochs, net, optimizer)\n"
    edit(project, "train.py", ("\nfaulthandler.", "\nimport recorder\nfaulthandler."),
         (step, note + step), (".transforms()", ".transforms(crop_size=32, resize_size=32)"))
    noise = torch.Generator().manual_seed(0)
    for number, name in enumerate(CLASSES):
        (project / "data" / name).mkdir(parents=True)
        for image in range(CLASSES[name]):
            pixels = torch.randint(128, (8, 8, 3), generator=noise, dtype=torch.uint8)
            pixels[:, :, 2 - number] += 64
            Image.fromarray(pixels.numpy()).save(project / f"data/{name}/{image:02}.png")
    options = ["--epochs", 2, "--batch-size", 9, "--workers", 1]
    result = run_ranks("train.py", 2, *options, cwd=project, TORCHVISION_OPERATORS=1)

    # Each group's rate is half a cosine, and gradients and weights are the same on both ranks
    texts = [(project / f"notes-{rank}").read_text() for rank in range(2)]
    notes = [json.loads(line) for line in texts[0].splitlines()]
    assert texts[0] == texts[1] and len(notes) == 6
    for step, note in enumerate(notes):
        factor = (1 + math.cos(math.pi * step / 6)) / 2
        assert note["rates"] == pytest.approx([1e-4 * factor, 1e-3 * factor], rel=1e-9)

    # BatchNorm: the frozen ones keep their statistics, and all others train
    net = resnet18(num_classes=3).eval()
    norms = [name for name, part in net.named_modules() if isinstance(part, torch.nn.BatchNorm2d)]
    own = [name for name in norms if not name.startswith(("bn1", "layer1"))]
    assert len(own) == 15
    assert all(note["norms"] == own for note in notes)
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


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of 06 with the language model, and a text of lines that differ."""
    folder = tmp_path_factory.mktemp("language") / "my project"
    project = copy_project(folder, ROOT / "06_checkpointing/train.py")
    apply(project, "06_language_model.patch")
    write_lines(project, LINES)
    return project


@pytest.fixture(scope="module")
def exact(project, tmp_path_factory):
    """Without what would hide a wrong divisor: clipping, AdamW, dropout, and rounding."""
    exact = shutil.copytree(project, tmp_path_factory.mktemp("exact") / "project")
    edit(exact, "train.py", ("MAX_GRAD_NORM = 1.0", "MAX_GRAD_NORM = 1e9"), ("AdamW(", "SGD("),
         ("dropout=0.1", "dropout=0.0"),
         ("    train(", "    torch.set_default_dtype(torch.float64)\n    train("))
    return exact


def trained(project, folder, nproc, *options, **given):
    """Train in this folder; returns the losses and perplexities of the epoch lines."""
    folder.mkdir(exist_ok=True)
    options = ["--data-dir", project, *OPTIONS, *options]
    result = run_ranks(project / "train.py", nproc, *options, cwd=folder, **given)
    return re.findall(r"^epoch .* loss (\S+)  perplexity (\S+) ", result.output, re.M)


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, trained(project, folder, 2, "--amp", "--epochs", 3)


def mean_loss(project, weights, text):
    """The mean loss of the tokens of a text, line by line, without padding."""
    model = load_script(project / "train.py").LanguageModel()
    weights = torch.load(weights, weights_only=True)
    model.to(weights["head.bias"].dtype).eval().load_state_dict(weights)
    losses = []
    for line in (project / text).read_text().splitlines():
        line = torch.tensor([10, *line.encode(), 10])
        with torch.no_grad():
            chances = model(line[None, :-1])[0].double().softmax(1)
        losses += [-math.log(chances[n, byte]) for n, byte in enumerate(line[1:])]
    return sum(losses) / len(losses)


def test_perplexity_is_that_of_a_single_process(project, exact, undisturbed, tmp_path):
    """The score of the saved best file; and a loss is a mean over the tokens of all ranks."""
    folder, epochs = undisturbed
    perplexity = math.exp(mean_loss(project, folder / "best.pt", "test.txt"))
    assert min(float(perplexity) for _, perplexity in epochs) == pytest.approx(perplexity, rel=1e-5)
    done = torch.load(folder / "checkpoint.pt", weights_only=True)["done"]
    assert done["best"] == pytest.approx(perplexity, rel=1e-6)
    [(loss, _)] = trained(exact, tmp_path, 2, "--lr", 0)
    assert loss == f"{mean_loss(exact, tmp_path / 'last.pt', 'train.txt'):.4f}"


def test_two_ranks_and_micro_batches_take_the_steps_of_a_whole_batch(exact, tmp_path):
    """Also the last step of the epoch, although each micro-batch has other numbers of tokens."""
    trained(exact, tmp_path / "1", 1, "--batch-size", 32, "--accumulate", 1, "--lr", 1)
    trained(exact, tmp_path / "2", 2, "--lr", 1)
    for weights in ("last.pt", "best.pt"):
        assert distance(tmp_path / "1" / weights, tmp_path / "2" / weights) < 1e-12


@pytest.mark.slow
def test_language_model_resumes_bitwise_after_sigterm_and_sigkill(project, undisturbed, tmp_path):
    """One of its two ranks is stopped in the first epoch, and killed in the second."""
    folder, epochs = undisturbed
    options = ["--amp", "--epochs", 3]
    trained(project, tmp_path, 2, *options, stop=(1, 15, 7))
    trained(project, tmp_path, 2, *options, stop=(1, 9, 24), code=9)
    assert trained(project, tmp_path, 2, *options)[-1] == epochs[-1]
    for weights in ("last.pt", "best.pt"):
        assert equal(tmp_path / weights, folder / weights)
    states = [bits(torch.load(each / "checkpoint.pt")) for each in (tmp_path, folder)]
    rates = [state["objects"].pop("scheduler")["_last_lr"] for state in states]  # not its own steps
    assert states[0] == states[1] and rates[0] == rates[1]
    assert states[0]["objects"].keys() == {"model", "optimizer", "ema"}
