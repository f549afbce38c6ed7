"""Scripts adapted to other models and data, as patches in copies/: right in what nobody sees."""

import json
import math
import re
import shutil

import pytest
import torch
from helpers.checks import bits, check_rank_0_saves, check_warnings, distance, equal, rate_factor
from helpers.paths import ROOT
from helpers.projects import COPIES, apply, copy_project, edit, write_lines
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


# 04: two encoders, whose loss needs the batches of all ranks

OLD = "images, labels = [part.to(device, non_blocking=True) for part in batch]"
NEW = "batch = {name: part.to(device, non_blocking=True) for name, part in batch.items()}"


@pytest.fixture
def encoders(tmp_path):
    """A copy of 04 with the patch, and pairs: an image is the sum of patterns, one per token.

    It computes in float64, without clipping and AdamW: both would hide a wrong factor.
    """
    project = copy_project(tmp_path / "project", ROOT / "04_ddp_torchrun/train.py")
    apply(project, "04_contrastive.patch")
    random = torch.Generator().manual_seed(0)
    patterns = torch.randn(40, 1, 28, 28, generator=random)
    patterns[0] = 0  # of the padding
    for name, number in (("train", 84), ("test", 41)):  # to train: two batches of 32, one of 20
        tokens = torch.randint(1, 40, (number, 5), generator=random)
        tokens[torch.arange(5) >= torch.randint(2, 6, (number, 1), generator=random)] = 0
        images = patterns[tokens].sum(1) + torch.randn(number, 1, 28, 28, generator=random)
        torch.save({"images": images, "tokens": tokens}, project / f"{name}.pt")
    edit(project, "train.py", ("MAX_GRAD_NORM = 1.0", "MAX_GRAD_NORM = 1e9"),
         ("torch.optim.AdamW(", "torch.optim.SGD("),
         ('"images": image,', '"images": image.double(),'),
         ("net = TwoEncoders()", "net = TwoEncoders().double()"))
    return project


def alone(project, peak, epochs):
    """The weights, and the loss and recall@1 of each epoch; each batch in one piece."""
    pairs, test_pairs = [torch.load(project / f"{name}.pt") for name in ("train", "test")]
    torch.manual_seed(0)
    net = load_script(project / "train.py").TwoEncoders().double()
    lines, step, steps = [], 0, 3 * epochs
    for epoch in range(1, epochs + 1):
        total = 0
        order = torch.randperm(84, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(32):
            images, texts, scale = net(pairs["images"][rows].double(), pairs["tokens"][rows])
            scores = scale * images @ texts.T
            loss = -(scores.log_softmax(0) + scores.log_softmax(1)).diag().mean() / 2
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.data -= rate_factor(step, steps) * peak * gradient
            total += loss.item() * len(rows) / 84
            step += 1
        with torch.no_grad():  # pair by pair, without the padding
            found = [net(image[None].double(), tokens[tokens > 0][None])[:2]
                     for image, tokens in zip(*test_pairs.values(), strict=True)]
        right = [torch.stack([(image * text).sum() for _, text in found]).argmax() == number
                 for number, (image, _) in enumerate(found)]
        lines.append((f"{total:.4f}", f"{sum(right) / 41:.4f}"))
    assert sum(right) > 4 and float(lines[-1][0]) < float(lines[0][0])  # it has learned something
    return net.state_dict(), lines


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_ranks_take_the_steps_of_one_with_the_whole_batch(nproc, encoders):
    """And the recall is that of the saved weights, although no number divides the 41 pairs."""
    options = ["--data-dir", ".", "--epochs", 6, "--batch-size", 32 // nproc]
    result = run_ranks("train.py", nproc, *options, "--lr", 2 * (256 / 32) ** 0.5, cwd=encoders)
    check_warnings(result, encoders)
    line = r"^epoch .* loss (\S+)  recall@1 (\S+)  \S+ s  \d+ pairs/s$"
    expected, lines = alone(encoders, peak=2, epochs=6)
    assert re.findall(line, result.output, re.M) == lines, result
    weights = torch.load(encoders / "last.pt")
    assert weights.keys() == expected.keys() and "log_scale" in weights
    for name in weights:
        assert (weights[name] - expected[name]).abs().max() < 1e-12, name


def test_the_line_of_04_ends_at_a_dictionary(encoders):
    assert OLD in (ROOT / "04_ddp_torchrun/train.py").read_text()
    edit(encoders, "train.py", (NEW, OLD))
    result = run_ranks("train.py", 1, "--data-dir", ".", cwd=encoders, code=1)
    assert "AttributeError: 'str' object has no" in result.errors, result


# An own script: copies/own.py, to which own_ddp.patch adds DDP

SHORT = [("SEED = 30,", "SEED = 8,"), ("patience=2", "patience=0, threshold=0.4")]
EXACT = [("    torch.manual_seed(SEED)\n",
          "    torch.manual_seed(SEED)\n    torch.set_default_dtype(torch.float64)\n"),
         ("0.01 * torch.randn_like(points)", "0")]
SAME_ORDER = [
    ("shuffle=True", "sampler=sampler"),
    ("    train_loader =", "    sampler = torch.utils.data.DistributedSampler(train_set, 1, 0)\n"
     "    train_loader ="),
    ("        model.train()\n", "        sampler.set_epoch(epoch)\n        model.train()\n"),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of own.py after a run as it is, except for the order of the samples."""
    folder = tmp_path_factory.mktemp("one")
    shutil.copy(COPIES / "own.py", folder)
    edit(folder, "own.py", *SHORT, *EXACT, *SAME_ORDER)
    result = run_ranks("own.py", 1, cwd=folder)
    rates = {line.split()[-1] for line in result.output.splitlines()}
    assert len(result.output.splitlines()) == 8 and len(rates) > 1, result
    return folder, result.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_ddp_it_computes_what_one_process_does(ranks, one, tmp_path):
    """Validation losses, learning rates, and the weights of the best epoch."""
    shutil.copy(COPIES / "own.py", tmp_path)
    apply(tmp_path, "own_ddp.patch")
    edit(tmp_path, "own.py", *SHORT, *EXACT)
    result = run_ranks("own.py", ranks, cwd=tmp_path, WITNESS=tmp_path / "witness")
    assert result.output == one[1], result
    assert distance(tmp_path / "best.pt", one[0] / "best.pt") < 1e-12
    check_rank_0_saves(tmp_path, ranks)


def test_noise_differs_between_ranks_but_not_the_data_and_the_seed_sets_the_order(tmp_path):
    shutil.copy(COPIES / "own.py", tmp_path)
    apply(tmp_path, "own_ddp.patch")
    seen = "[*train_set[:], *test_set[:], list(train_sampler), noise]"
    seen = f"torch.save({seen}, f'{{SEED}}-{{rank}}')\n            loss.backward()"
    edit(tmp_path, "own.py", ("SEED = 30, 0", 'SEED = 1, int(os.environ["SEED"])'),
         ("points = points + 0.01 * ", "noise = "), ("loss.backward()", seen))
    orders = []
    for seed in range(2):
        run_ranks("own.py", 2, cwd=tmp_path, SEED=seed)
        one, other = [torch.load(tmp_path / f"{seed}-{rank}") for rank in range(2)]
        assert all(map(torch.equal, one[:4], other[:4]))  # points and labels of both sets
        assert sorted(one[4] + other[4]) == [*range(1200)]
        assert one[5].shape == other[5].shape and not torch.equal(one[5], other[5])
        orders.append(one[4])
    assert orders[0] != orders[1]
