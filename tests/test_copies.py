"""The patches of copies/ compute on several processes what they compute on one."""

import copy
import json
import re
from math import cos, pi

import pytest
import torch
from helpers import (
    COPIES,
    ROOT,
    SEED,
    TORCHRUN,
    copy_project,
    distance,
    each_row,
    equal,
    load,
    module,
    order_of,
    rate_factor,
    run,
    run_ranks,
    without_batch_norm,
)
from PIL import Image
from torch.utils.data import DataLoader

pytestmark = pytest.mark.usefixtures("float64")
GIVEN = ["--seed", SEED, "--epochs", 2]


def patched(folder, name, script=None):
    """A project with a patched script."""
    patch = COPIES / f"{name}.patch"
    script = script or re.search("--- a/(.*)", patch.read_text())[1]
    project = copy_project(folder / "a project", script, small="data")
    [file] = project.glob("*.py")
    fits = run(["patch", "-F0", file, patch], project)
    assert fits.code == 0, fits  # it names the hunk that does not fit
    text = file.read_text()
    if "torchvision" in text:
        file.write_text(f"import helpers\nhelpers.torchvision_datasets()\n{text}")
    return project


def learn(project, ranks, *options, changes="", cwd=None, **given):
    """Train with the changes that a test needs, of the script in a project."""
    [script] = project.glob("*.py")
    given["CHANGES"] = f"plain {changes}"
    return run_ranks(script, ranks, *options, cwd=cwd or project, **given)


def numbers(result):
    """What is printed of each epoch, without its speed."""
    return re.findall(
        r"^epoch [^%\n]*  [\w@]+ (?:\d|inf)\S*(?=  )", result.output, re.M
    )


def on_one_and_two(folder, name, *options, batch, changes="", ranks=2):
    """Two epochs on one process and on several, which print and save the same."""
    found = []
    given = {"changes": changes, "TRAIN_IMAGES": 180}
    for number in (1, ranks):
        project = without_batch_norm(patched(folder / str(number), name))
        size = ["--batch-size", batch // number]
        result = learn(project, number, *GIVEN, *size, *options, **given)
        found.append((project, numbers(result)))
    (one, printed), (several, same) = found
    assert len(printed) == 2 and printed == same
    for file in one.glob("*t.pt"):  # mnist.pt, last.pt, best-last.pt
        weights = [load(project / file.name) for project in (one, several)]
        for each in weights:
            for key in [key for key in each if "running_" in key]:
                del each[key]  # of rank 0's images
        assert distance(*weights) < 1e-10
    return one, several


def own_script(folder):
    """A project with own.py for several processes."""
    return patched(folder, "own_ddp", "tests/copies/own.py")


def printed_and_saved(folder, result):
    """The lines that own.py prints, the picture that it writes, and the weights."""
    lines = re.findall("^(?:seed|step|epoch) .*", result.output, re.M)
    return [*lines, (folder / "best.txt").read_text()], load(folder / "best.pt")


def test_an_own_script_with_ddp(tmp_path):
    """All that it prints and saves, on rank 0 only; ranks have other noise."""
    found = []
    for ranks in (1, 2, 3):
        project = own_script(tmp_path / str(ranks))
        result = learn(project, ranks, "--seed", SEED, changes="own")
        noise = {f"noise {SEED + rank}" for rank in range(ranks)}
        assert {*re.findall("noise .*", result.output)} == noise
        assert not [*project.glob("[12]/*")]
        found.append(printed_and_saved(project / "0", result))
    [(lines, weights), *others] = found
    assert len(lines) == 9  # the seed, one step, six epochs, the picture
    for same, of_several in others:
        assert lines == same and distance(weights, of_several) < 1e-10
    result = run([*TORCHRUN, "--nproc-per-node=7", "own.py"], project)
    assert (
        result.code == 1 and "ValueError: 7 processes do not divide 60" in result.errors
    )
    learn(project, 2, changes="own")  # a drawn seed; the lines compare the ranks


@each_row("""
    no DDP        | the ranks differ: [
    plain call    | the ranks differ: [
    no steps      | the ranks differ: [
    another split | the ranks differ: [
    another name  | the ranks differ: [
    another seed  | their shards overlap
    a list        | must be an nn.ModuleList
    a sum         | the gradient is 0.500 times
""")
def test_lines_that_compare_the_ranks_of_an_own_script(row, tmp_path):
    """They find each fault."""
    result = learn(
        own_script(tmp_path), 2, "--seed", SEED, changes="own", FAULT=row[0], code=1
    )
    assert row[1] in result.errors


def test_an_own_script_that_resumes(tmp_path):
    """Killed in the fourth epoch, it prints and saves what an undisturbed run does."""
    project = own_script(tmp_path)
    fits = run(["patch", "-F0", "own.py", COPIES / "own_resume.diff"], project)
    assert fits.code == 0, fits

    def start(name, *options, **given):
        folder = tmp_path / name
        result = run_ranks(
            project / "own.py", 2, *options, cwd=folder, CHANGES="own_killed", **given
        )
        return printed_and_saved(folder, result)

    (killed, _), (resumed, weights) = start("killed", KILLED=1, code=9), start("killed")
    whole, expected = start("whole", *f"--{killed[0]}".split())  # a seed was drawn
    assert killed[0] == resumed[0] and killed[:-1] + resumed[1:] == whole
    assert distance(weights, expected) == 0
    assert equal(tmp_path / "killed/checkpoint.pt", tmp_path / "whole/checkpoint.pt")


def test_resnet18(tmp_path):
    """Frozen layers and their statistics, the rates of two groups, the best file."""
    options = ["--lr", 0.3, "--workers", 0]
    one, _ = on_one_and_two(
        tmp_path, "04_resnet18", *options, batch=14, changes="folder"
    )
    best, last = load(one / "best-last.pt"), load(one / "last.pt")
    for frozen in ("bn1", "layer1.0.bn2"):
        assert not last[f"{frozen}.running_mean"].any()
    assert distance(best, last) > 0 and last["layer2.0.bn1.running_mean"].any()


def first_of(path):
    """The first of the weights in a file, whose average average.py saves."""
    return {"first": next(iter(load(path).values()))}


def killed_and_resumed(
    folder,
    name,
    *options,
    ranks=2,
    then=2,
    average=True,
    unit="--batch-size",
    sizes=((16, 1), (4, 2), (4, 2)),
    **given,
):
    """Ranks that accumulate, are killed and resumed train as one process does.

    sizes: the batch and how many a step has, on one process, before the kill and after.
    """
    project = patched(folder, name)
    given["changes"] = "killed average" if average else "killed"
    given["TRAIN_IMAGES"] = 72  # four steps and a half

    def start(part, ranks, sizes, **more):
        size, accumulate = sizes
        each = [unit, size, "--accumulate", accumulate, "--save-every", 2]
        each += ["--data-dir", folder, *options]
        return learn(project, ranks, *GIVEN, *each, cwd=folder / part, **given, **more)

    printed = numbers(start("one", 1, sizes[0]))
    killed = start("killed", ranks, sizes[1], KILLED=1, code=9)
    assert len(printed) == 2 and numbers(killed) == printed[:1]
    resumed = start("killed", then, sizes[2])
    there = r"^resuming from .*(2, 'done': \d\d|2-done-0+\d\d\b)"
    assert re.search(there, resumed.output, re.M)
    assert numbers(resumed) == printed[1:]
    rounding = 1e-5 if "fsdp" in name else 1e-10  # its loss is float32
    one = folder / "one"
    for file in ("last.pt", "best.pt"):
        assert distance(one / file, folder / "killed" / file) < rounding
    if average:  # what is evaluated, and saved as the best
        expected = load(one / "average-0.pt")
        assert distance(first_of(one / "best.pt"), expected) < rounding
        assert distance(one / "last.pt", one / "best.pt") > 1e-3
    return printed


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("06_language_model", ["--dropout", 0, "--lr", 4]),
        ("05_fsdp_llama", ["--width", 32, "--depth", 2, "--recompute", "--lr", 1]),
    ],
)
def test_a_language_model(name, options, tmp_path):
    """With one mean over all tokens of a step, whatever the padding."""
    lines = [f"{n**5} {n % 7 * 'ab'}" for n in range(83)]
    (tmp_path / "train.txt").write_text("\n".join(lines[:72]))
    (tmp_path / "test.txt").write_text("\n".join(lines[72:]))
    sizes = ((16, 1), (4, 2), (8, 2))
    options = [*options, "--workers", 0]
    killed_and_resumed(tmp_path, name, *options, then=1, sizes=sizes)


def test_fsdp_with_tensor_parallelism(tmp_path):
    """Four ranks, of which two compute each layer together, with clipped gradients."""
    options = ["--lr", 1, "--width", 16, "--depth", 1, "--output", "last.pt"]
    given = {"average": False, "CHANGE": "script.MAX_GRAD_NORM = 1.3"}
    sizes = ((16, 1), (4, 2), (8, 2))
    killed_and_resumed(tmp_path, "05_fsdp_tp", *options, ranks=4, sizes=sizes, **given)


def middle(epoch, first, size=16, length=72):
    """The part of two epochs that is done in mid-step, from this sample on."""
    done = (first + min(first + size, length)) / 2 / length
    return (epoch - 1 + done) / 2


def test_a_segmentation(tmp_path):
    """Steps are those of torch's weighted mean; a class that is nowhere is left out."""
    masks = torch.randint(3, (83, 8, 8), generator=torch.Generator().manual_seed(0))
    images = (80 * masks + 20 * masks.roll(1, 2))[:, None].repeat(1, 3, 1, 1)
    for n, mask in enumerate(masks):
        mask[: n % 7] = 255  # ignored
        for name, pixels in (("images", images[n, 0]), ("masks", mask)):
            path = tmp_path / ("train" if n < 72 else "test") / name / f"{n:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.byte().numpy()).save(path)
    options = ["--lr", 2, "--workers", 1]
    printed = killed_and_resumed(tmp_path, "06_segmentation", *options)
    torch.manual_seed(SEED)
    model = module(tmp_path / "a project/train.py").UNet(4)
    optimizer = torch.optim.SGD(model.parameters(), weight_decay=0.05)
    weights = torch.tensor([0.5, 1, 1, 4])
    criterion = torch.nn.CrossEntropyLoss(weights, ignore_index=255)
    for epoch, first in [(epoch, 16 * step) for epoch in (1, 2) for step in range(5)]:
        rows = order_of(epoch, 72, 1)[first : first + 16]
        pairs = []
        for n in rows:
            torch.manual_seed(hash((SEED, epoch, n)) % 2**32)
            flipped = [-1] if torch.rand(()) < 0.5 else []
            pairs.append((images[n].flip(flipped), masks[n].flip(flipped)))
        inputs, targets = [torch.stack(part) for part in zip(*pairs, strict=True)]
        criterion(model(inputs / 255), targets).backward()
        at = middle(epoch, first)
        factor = at / 0.1 if at < 0.1 else (1 + cos(pi * (at - 0.1) / 0.9)) / 2
        optimizer.param_groups[0]["lr"] = 2 * (16 / 256) ** 0.5 * factor
        optimizer.step()
        optimizer.zero_grad()
    assert distance(dict(model.state_dict()), load(tmp_path / "one/last.pt")) < 1e-10
    model.load_state_dict(load(tmp_path / "one/best.pt"))
    valid = masks[72:] < 255
    found, right = [
        part[valid][:, None] == torch.arange(4)
        for part in (model(images[72:] / 255).argmax(1), masks[72:])
    ]
    shared, union = (found & right).sum(0), (found | right).sum(0)
    assert union[3] == 0 and printed[1].endswith(f" {(shared / union)[:3].mean():.4f}")


def test_two_networks(tmp_path, monkeypatch):
    """Two ranks have micro-batches of 5 images and of 1; the best file is as logged."""
    monkeypatch.setenv("TRAIN_IMAGES", "72")
    options = ["--lr", 0.02, "--workers", 1, "--output", "last.pt"]
    sgd = "lambda weights, lr, betas: torch.optim.SGD(weights, lr, 0.5)"
    given = {"average": False, "CHANGE": f"torch.optim.AdamW = {sgd}"}
    sizes = ((20, 1), (5, 2), (10, 2))
    lines = killed_and_resumed(
        tmp_path, "06_gan", *options, then=1, sizes=sizes, **given
    )
    model = module(tmp_path / "a project/train.py").build_generator()
    model.load_state_dict(load(tmp_path / "one/best.pt"))
    noise = [
        torch.randn(64, generator=torch.manual_seed(hash((0, 0, row)) % 2**32))
        for row in range(47)
    ]
    tests = module(tmp_path / "a project/common/data.py").load_mnist(None)[1].tensors[0]
    both = torch.cat([tests, model(torch.stack(noise))])
    gaps = (both[:, None] - both).flatten(2).norm(dim=2).view(2, 47, 2, 47).mean((1, 3))
    distances = [line.split()[-1] for line in lines]
    assert f"{2 * gaps[0, 1] - gaps.trace():.4f}" == min(distances, key=float)
    saved, other = [
        load(tmp_path / folder / "checkpoint.pt")["discriminator"]
        for folder in ("one", "killed")
    ]
    assert distance(saved, other) < 1e-10


def test_batches_by_a_budget(tmp_path):
    """The steps are those of utterances without padding; another budget is rejected."""
    torch.manual_seed(0)
    said = [torch.randint(1, 5, (1 + n % 5,)) for n in range(99)]
    pairs = []
    for n, each in enumerate(said):
        frames = 3 * torch.eye(6)[each].repeat_interleave(2 + n % 4, 0)
        pairs.append((frames + 0.7 * torch.randn(6), each))
    torch.save(pairs[:11], tmp_path / "test.pt")
    torch.save(pairs[11:], tmp_path / "train.pt")
    given = {"average": False, "unit": "--frames", "ranks": 3}
    sizes = ((20, 12), (20, 4), (20, 6))
    printed = killed_and_resumed(tmp_path, "06_ctc", "--lr", 0.1, sizes=sizes, **given)
    options = ["--lr", 0.1, "--data-dir", tmp_path, "--frames", 22]  # other batches
    project, one = tmp_path / "a project", tmp_path / "one"
    other = learn(project, 1, *GIVEN, *options, cwd=one, code=1)
    rejected = "ValueError: .* 20, 'utterances': 88}, not .* 22, 'utterances'"
    assert re.search(rejected, other.errors)
    rest, batches = sorted(pairs[11:], key=lambda pair: len(pair[0])), []
    while rest:  # the longest are longer than the budget
        count = 1
        while count < len(rest) and (count + 1) * len(rest[count][0]) <= 20:
            count += 1
        batches.append(rest[:count])
        del rest[:count]
    torch.manual_seed(SEED)
    script = module(project / "train.py")
    for text, edits in (("sitting", 3), ("", 6), ("te", 4)):
        assert script.edit_distance("kitten", text) == edits
    model, saved = script.Recognizer(6, 5), {}
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True)
    ctc = torch.nn.CTCLoss(reduction="sum")
    for epoch in (1, 2):
        losses = []
        for first in range(0, 54, 12):
            rows = order_of(epoch, 54, 1)[first : first + 12]
            step = [pair for n in rows for pair in batches[n]]
            losses += [ctc(model(x[:, None]), y, [len(x)], [len(y)]) for x, y in step]
            (sum(losses[-len(step) :]) / sum(len(y) for _, y in step)).backward()
            rate = 12**0.5 / 10 * rate_factor(middle(epoch, first, 12, 54))
            sgd.param_groups[0]["lr"] = rate
            sgd.step()
            sgd.zero_grad()
        wrong = 0
        for x, y in pairs[:11]:
            path = model(x[:, None]).argmax(2).unique_consecutive()
            wrong += script.edit_distance(path[path > 0].tolist(), y.tolist())
        loss = sum(losses) / len(torch.cat(said[11:]))
        rate = wrong / len(torch.cat(said[:11]))
        line = f"epoch {epoch}/2  loss {loss:.4f}  error_rate {rate:.4f}"
        assert printed[epoch - 1] == line
        saved.setdefault(rate, copy.deepcopy(model.state_dict()))
    assert distance(model.state_dict(), one / "last.pt") < 1e-10
    assert distance(saved[min(saved)], one / "best.pt") < 1e-10


def test_without_a_data_set(tmp_path, ranks=2):
    """PPO takes the steps of a plain loop; killed, each rank resumes its own walks."""
    project = patched(tmp_path, "06_ppo")
    options = ["--seed", SEED, "--epochs", 8, "--lr", 0.5, "--batch-size", 5]
    given = {"CHANGE": "torch.optim.Adam, script.MAX_KL = torch.optim.SGD, 2e-4"}
    given["changes"] = "killed"

    def start(folder, ranks=ranks, **more):
        return learn(project, ranks, *options, cwd=tmp_path / folder, **given, **more)

    printed, passes = start("whole").output, []
    start("killed", KILLED=ranks - 1, code=9)
    assert "'processes': " in start("killed", 3, code=1).errors
    assert "resuming from checkpoint.pt at {'epoch': 8, " in start("killed").output
    assert equal(tmp_path / "whole/checkpoint.pt", tmp_path / "killed/checkpoint.pt")
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)
    )
    Walks = module(project / "train.py").Walks
    walks = [Walks(5, hash((SEED, rank)) % 2**32) for rank in range(ranks)]
    for epoch in range(1, 9):
        moves = []
        for rank, each in enumerate(walks):
            torch.manual_seed(hash((SEED, epoch, rank)))
            for _ in range(32):
                action = model(each.places)[:, :2].softmax(1).multinomial(1)
                moves.append((each.places, action, each.move(action[:, 0])[:, None]))
        seen, actions, rewards = [
            torch.stack([torch.cat(part[time::32]) for time in range(32)])
            for part in zip(*moves, strict=True)
        ]
        returns = torch.stack([rewards[time:].sum(0) for time in range(32)])
        for number in range(1, 5):
            chances, values = model(seen).split([2, 1], 2)
            logs = chances.log_softmax(2).gather(2, actions)
            if number == 1:
                old, gains = logs.detach(), (returns - values).detach()
                gains = (gains - gains.mean()) / gains.std(correction=0)
            ratio = (logs - old).exp()
            bounded = torch.where(gains > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
            loss = 0.01 * (values - returns).square().mean() - (bounded * gains).mean()
            slopes = torch.autograd.grad(loss, [*model.parameters()])
            rate = 0.5 * (5 * ranks / 256) ** 0.5 * rate_factor((epoch - 0.5) / 8)
            for weight, slope in zip(model.parameters(), slopes, strict=True):
                weight.data -= rate * slope
            if (old - logs).mean() > 2e-4:
                break
        passes.append(number)
        assert f"epoch {epoch}/8  reward {rewards.mean():.4f}\n" in printed
    assert len({*passes}) > 1  # some epochs stop early
    assert distance(dict(model.state_dict()), load(tmp_path / "whole/ppo.pt")) < 1e-10


def test_lora_on_fsdp(tmp_path, monkeypatch):
    """A weight is W + 2 B A. Files have A and B only; no run resumes with another W."""
    monkeypatch.setenv("TRAIN_IMAGES", "72")
    torch.manual_seed(0)
    model = module(ROOT / "05_model_parallel/fsdp.py").VisionTransformer(16, 2)
    base, header, data = dict(model.state_dict()), {"__metadata__": {}}, b""
    for name, part in base.items():  # https://github.com/huggingface/safetensors
        first, data = len(data), data + part.numpy().tobytes()
        header[name] = {"dtype": "F64", "shape": part.shape}
        header[name]["data_offsets"] = [first, len(data)]
    path, header = tmp_path / "base.safetensors", json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    options = ["--width", 16, "--depth", 2, "--lr", 4]
    options += ["--output", "last.pt", "--best", "best.pt"]
    given = ["--base", path, "--recompute"]
    hsdp = """if os.environ["WORLD_SIZE"] == "4":
        sys.argv += ["--shards=2", "--batch-size=2"]"""
    killed_and_resumed(
        tmp_path, "05_fsdp_lora", *options, *given, ranks=4, average=False, CHANGE=hsdp
    )
    torch.manual_seed(SEED)
    project, one = tmp_path / "a project", tmp_path / "one"
    script = module(project / "fsdp.py")
    script.add_adapters(whole := script.VisionTransformer(16, 2), amp=False)
    low = {name: part for name, part in whole.named_parameters() if part.requires_grad}
    matrices = [
        name for name, part in base.items() if "blocks" in name and part.ndim == 2
    ]
    triples = [*zip(matrices, [*low.values()][1::2], [*low.values()][::2], strict=True)]
    assert not any(b.any() for _, b, _ in triples)
    optimizer = torch.optim.SGD(low.values(), weight_decay=0.05)
    train_set, _ = module(project / "common/data.py").load_mnist(None)
    for epoch, first in [(epoch, 16 * step) for epoch in (1, 2) for step in range(5)]:
        images, labels = train_set[order_of(epoch, 72, 1)[first : first + 16]]
        merged = base | {name: base[name] + 2 * b @ a for name, b, a in triples}
        logits = torch.func.functional_call(model, merged, images)
        criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
        criterion(logits, labels).backward()
        # peak: 4 * (16 / 256) ** 0.5
        optimizer.param_groups[0]["lr"] = rate_factor(middle(epoch, first))
        optimizer.step()
        optimizer.zero_grad()
    assert distance(low, one / "last.pt") < 1e-5
    saved = script.dcp.FileSystemReader(max(one.glob("checkpoint/*"))).read_metadata()
    names = [name for name in saved.state_dict_metadata if name.startswith("model.")]
    assert {name.removeprefix("model.") for name in names} == low.keys()
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))  # the last number
    torch.save({"head.bias": torch.ones(10)}, other := tmp_path / "other.pt")
    for file, error in ((other, "Missing key"), (path, r'"base": \d+, "alpha": 16}')):
        given = [*GIVEN, *options, "--amp", "--base", file]
        again = learn(project, 1, *given, cwd=one, code=1)
        assert re.search(error, again.errors)
    # in float64, the others in bfloat16
    count = sum(part.numel() for part in low.values())
    assert f" {count} trained, {8 * count + len(data) // 4} bytes" in again.output


def test_sparse_gradients(tmp_path):
    """With the hook two ranks have the gradients of a dense table."""
    project = copy_project(tmp_path / "a project", "tests/copies/sparse.py")
    run_ranks("sparse.py", 2, cwd=project, CHANGES="sparse")


def test_encoders(tmp_path):
    """One process has the pairs of all ranks in a batch."""
    torch.manual_seed(0)
    images, tokens = torch.randn(84, 1, 28, 28), torch.randint(1, 40, (84, 5))
    tokens[torch.arange(5) >= torch.randint(2, 6, (84, 1))] = 0  # padding
    for name, count in (("train", 84), ("test", 41)):
        pairs = {"images": images[:count], "tokens": tokens[:count]}
        torch.save(pairs, tmp_path / f"{name}.pt")
    options = ["--data-dir", tmp_path, "--lr", 6]
    on_one_and_two(tmp_path, "04_contrastive", *options, batch=28, ranks=4)


def test_early_stopping(tmp_path):
    """All stop after three worse epochs behind the peak; the best weights are saved."""
    project = patched(tmp_path, "add_early_stopping")
    given = {"CHANGES": "scored", "SCORES": "0.3 0.1 0.2 0.1 0.4 0.2 0.4 0.1 0.9"}
    given["TRAIN_IMAGES"] = 20
    result = run_ranks("train.py", 2, "--epochs", 10, cwd=project, **given)
    assert len(result.epochs()) == 8
    assert equal(project / "best-mnist.pt", project / "epoch-5.pt")


def test_ema(tmp_path):
    """The average of all steps' weights is evaluated and saved, as on one process."""
    _, two = on_one_and_two(tmp_path, "add_ema", batch=62, changes="average")
    for rank in (0, 1):
        average = load(two / f"average-{rank}.pt")
        assert distance(first_of(two / "mnist.pt"), average) < 1e-10


def test_a_global_batch(tmp_path):
    """Two processes with the patch compute what 04 does on one with these options."""
    one = copy_project(tmp_path, "04_ddp_torchrun/train.py", small="data")
    two = patched(tmp_path, "add_global_batch")
    options = [*GIVEN, "--batch-size", 46]
    for ranks, project in ((1, one), (2, two)):
        without_batch_norm(project)
        run_ranks("train.py", ranks, *options, cwd=project, TRAIN_IMAGES=180)
    assert distance(one / "mnist.pt", two / "mnist.pt") < 1e-10


def test_predictions_are_in_the_order_of_the_data_set(tmp_path):
    project = patched(tmp_path, "add_predictions")
    run_ranks("train.py", 3, *GIVEN, cwd=project)
    model = module(project / "common/model.py").ConvNet().eval()
    model.load_state_dict(load(project / "mnist.pt"))
    _, test_set = module(project / "common/data.py").load_mnist(None)
    expected = model(test_set.tensors[0]).argmax(1)
    assert [*map(int, (project / "predictions.txt").open())] == expected.tolist()


def test_a_profile(tmp_path):
    """One file for each rank, with three steps, and in it what communicates."""
    project = patched(tmp_path, "add_profiler")
    run_ranks("train.py", 2, "--batch-size", 10, cwd=project)
    for rank in (0, 1):
        trace = (project / f"trace-{rank}.json").read_text()
        found = {*re.findall(r"ProfilerStep#\d+|gloo:all_reduce", trace)}
        assert found == {"gloo:all_reduce", *[f"ProfilerStep#{n}" for n in (4, 5, 6)]}


def test_weighted_sampling(tmp_path):
    """Each class as often, by one draw per epoch, of which each rank has its share."""
    project = patched(tmp_path, "add_weighted_sampling")
    result = learn(project, 2, *GIVEN, changes="drawn")
    labels = module(project / "common/data.py").load_mnist(None)[0].tensors[1]
    rare = torch.tensor([1 / (labels == label).sum() for label in labels])
    for seed in (SEED + 1, SEED + 2):
        numbers = torch.Generator().manual_seed(seed)
        drawn = rare.multinomial(182, True, generator=numbers).tolist()
        for rank in (0, 1):
            assert f"drawn {rank} {drawn[rank::2]}\n" in result.output


def test_a_stream(tmp_path):
    """No sample comes twice, few are left out, all end together, steps have a rate."""
    project = patched(tmp_path, "add_stream")
    given = {"cwd": project, "TRAIN_IMAGES": 63}
    run_ranks("train.py", 2, *GIVEN, "--batch-size", 8, **given)  # 4 batches and 3
    given["CHANGES"] = "stream"
    result = run_ranks("train.py", 2, *GIVEN, "--batch-size", 7, **given)  # 4 and 4
    stream = module(project / "train.py").Stream
    loaders = [DataLoader(stream(range(63), n, 2), 7, num_workers=2) for n in (0, 1)]
    assert sorted(torch.cat([*loaders[0], *loaders[1]]).tolist()) == [*range(63)]
    rates = [float(rate) for rate in re.findall("rate (.*)", result.output)]
    assert rates and min(rates) > 0
