"""The patches of copies/: what they compute on several processes is what they compute on one."""

import copy
import json
import re
import textwrap
from math import cos, pi

import pytest
import torch
from helpers import (COPIES, ROOT, SCORED, SEED, copy_project, distance, equal, load, module,
    order_of, rate_factor, run, run_ranks, without_batch_norm)
from PIL import Image
from torch.utils.data import DataLoader

pytestmark = pytest.mark.usefixtures("float64")
GIVEN = ["--seed", SEED, "--epochs", 2]
CHANGED = """
import functools, os, torch
torch.set_default_dtype(torch.float64)
import {0} as script
torch.optim.AdamW, script.MAX_GRAD_NORM = torch.optim.SGD, 1e9  # they hide a wrong divisor
{1}
script.main()
"""


def patched(folder, name, changes="", script=None):
    """A project with a patched script; changed.py sets what a reader edits, and runs it."""
    script = script or re.search("--- a/(.*)", (COPIES / f"{name}.patch").read_text())[1]
    project = copy_project(folder / "a project", script, small="data")
    [file] = project.glob("*.py")
    fits = run(["patch", "-F0", file, COPIES / f"{name}.patch"], project)
    assert fits.code == 0, fits  # it names the hunk that does not fit
    first = "import helpers; helpers.torchvision_datasets()" * ("torchvision" in file.read_text())
    (project / "changed.py").write_text(first + CHANGED.format(file.stem, changes))
    return project


def numbers(result):
    """What is printed of each epoch, without its speed."""
    return re.findall(r"^epoch [^%\n]*  [\w@]+ (?:\d|inf)\S*(?=  )", result.output, re.M)


def on_one_and_two(folder, name, changes="", *options, batch, ranks=2):
    """Train for two epochs on one process and on several, which print and save the same."""
    found = []
    for number in (1, ranks):
        project = without_batch_norm(patched(folder / str(number), name, changes))
        result = run_ranks("changed.py", number, *GIVEN, "--batch-size", batch // number, *options,
                           cwd=project, TRAIN_IMAGES=180)
        found.append((project, numbers(result)))
    (one, printed), (several, same) = found
    assert len(printed) == 2 and printed == same
    for file in one.glob("*t.pt"):  # mnist.pt, last.pt, best-last.pt; rank 0's statistics differ
        weights = [{name: part for name, part in load(folder / file.name).items()
                    if "running_" not in name} for folder in (one, several)]
        assert distance(*weights) < 1e-10
    return one, several


[LINES] = re.findall("```python\n(found, .*?)```", (ROOT / "README.md").read_text(), re.S)
OWN = f"""
script.EPOCHS, script.SEED, script.NOISE = 2, 3, 0
dist, world_size, validate = script.dist, int(os.environ["WORLD_SIZE"]), script.validate
def compare(model, *given):
    print("seed", torch.initial_seed())
    train_set = sets[0]
{textwrap.indent(LINES, "    ")}
    return validate(model, *given)
sets, Loader, script.validate = [], script.DataLoader, compare
script.DataLoader = lambda data, **named: sets.append(data) or Loader(data, **named)
os.makedirs(os.environ["RANK"], exist_ok=True)  # a folder of its own for each rank
os.chdir(os.environ["RANK"])
"""


def test_an_own_script_with_ddp(tmp_path):
    """Losses, and the best weights, which only rank 0 saves; the noise of each rank differs."""
    found = []
    for ranks in (1, 2):
        project = patched(tmp_path / str(ranks), "own_ddp", OWN, "tests/copies/own.py")
        result = run_ranks("changed.py", ranks, cwd=project)
        assert {*re.findall("seed .", result.output)} == {f"seed {3 + n}" for n in range(ranks)}
        assert list(project.glob("*/best.pt")) == [project / "0/best.pt"]
        found.append((re.findall("^epoch .*", result.output, re.M), load(project / "0/best.pt")))
    result = run_ranks("changed.py", 3, cwd=project, code=1)
    assert "ValueError: 3 processes do not divide a batch of 64" in result.errors
    (lines, weights), (same, of_two) = found
    assert len(lines) == 2 and lines == same and distance(weights, of_two) < 1e-10


@pytest.mark.parametrize("fault", [
    "script.DDP = lambda net: net", "DDP = script.DDP; script.DDP = lambda net: (DDP(net), net)[1]",
    "if os.environ['RANK'] == '1': torch.optim.SGD.step = lambda self: 0",
    "script.SEED += int(os.environ['RANK'])",
    "DDP = script.DDP; script.DDP = lambda net: "
    "(net._modules.update({'4' + os.environ['RANK']: net._modules.pop('4')}), DDP(net))[1]"])
def test_lines_that_compare_the_ranks_of_an_own_script(fault, tmp_path):
    """Without DDP, with a plain call of the network, no steps, another split or name."""
    project = patched(tmp_path, "own_ddp", OWN + fault, "tests/copies/own.py")
    result = run_ranks("changed.py", 2, cwd=project, code=1)
    assert "the ranks differ: [" in result.errors


FOLDER = """
from torchvision.models.resnet import BasicBlock, ResNet
torch.manual_seed(3)
images = torch.utils.data.TensorDataset(torch.randn(35, 3, 33, 33), torch.arange(35) // 12)
images.classes, script.ImageFolder = [0, 1, 2], lambda path, prepare: images
each_image = functools.partial(torch.nn.InstanceNorm2d, affine=True, track_running_stats=True)
script.resnet18 = lambda weights: ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=each_image)
scores = iter((0.5, 0.25))
script.evaluate = lambda *given: next(scores)
"""


def test_resnet18(tmp_path):
    """Frozen layers and their statistics, the rates of two groups, and the file of the best."""
    one, _ = on_one_and_two(tmp_path, "04_resnet18", FOLDER, "--lr", 0.3, "--workers", 0, batch=14)
    best, last = load(one / "best-last.pt"), load(one / "last.pt")
    assert not any(last[f"{name}.running_mean"].any() for name in ("bn1", "layer1.0.bn2"))
    assert distance(best, last) > 0 and last["layer2.0.bn1.running_mean"].any()


AVERAGE = """
from torch.optim.optimizer import register_optimizer_step_post_hook as after_a_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_a_step
seen, averages, kept = [], [], lambda done: min(0.99, (1 + done) / (10 + done))
def follow(optimizer, *given):
    weight = optimizer.param_groups[0]["params"][0].detach()
    weight = getattr(weight, "full_tensor", lambda: weight)().clone()
    if seen and weight.equal(seen[-1]):  # DCP makes an optimizer's state by a step at a rate of 0
        return
    seen.append(weight)
    share = kept(len(averages)) if averages else 0
    averages.append(share * averages[-1] + (1 - share) * weight if averages else weight)
    torch.save({"first": averages[-1]}, f"average-{os.environ['RANK']}.pt")
after_a_step(follow)
"""


def first_of(path):
    """The first of the weights in a file, of which AVERAGE saves the moving average."""
    return {"first": next(iter(load(path).values()))}


LANGUAGE = """
kept = lambda done: 0.8
script.EMA_DECAY, factor, steps = 0.8, script.warmup_then_decay, set()
script.warmup_then_decay = lambda step, total: [  # of each group of parameters
    steps.add(step), os.environ.get("KILLED") == os.environ["RANK"] and len(steps) == 8
    and os.kill(os.getpid(), 9), factor(step, total)][2]
"""


def killed_and_resumed(folder, name, changes, *options, ranks=2, then=2, averaged=True,
                        unit="--batch-size", sizes=((16, 1), (4, 2), (4, 2))):
    """Ranks that accumulate, are killed and resumed train as one process does."""
    project = patched(folder, name, AVERAGE * averaged + LANGUAGE + changes)

    def learn(part, ranks, size, **given):
        return run_ranks(project / "changed.py", ranks, *GIVEN, *options, "--data-dir", folder,
                         unit, size[0], "--accumulate", size[1], "--save-every", 2,
                         cwd=folder / part, TRAIN_IMAGES=72, **given)  # four steps and a half

    printed = numbers(learn("one", 1, sizes[0]))
    killed = learn("killed", ranks, sizes[1], KILLED=1, code=9)
    assert len(printed) == 2 and numbers(killed) == printed[:1]
    resumed = learn("killed", then, sizes[2])
    assert re.search(r"^resuming from .*(2, 'done': \d\d|2-done-0+\d\d\b)", resumed.output, re.M)
    assert numbers(resumed)[-1].split()[-1] == printed[1].split()[-1]  # perplexity, mIoU, ...
    one, rounding = folder / "one", 1e-5 if "fsdp" in name else 1e-10  # its loss is float32
    for file in ("last.pt", "best.pt"):
        assert distance(one / file, folder / "killed" / file) < rounding
    if averaged:  # what is evaluated, and saved as the best
        assert distance(first_of(one / "best.pt"), load(one / "average-0.pt")) < rounding
        assert distance(one / "last.pt", one / "best.pt") > 1e-3
    return printed


@pytest.mark.parametrize(("name", "average", "options"), [
    ("06_language_model", "", ["--dropout", 0, "--lr", 4]),
    ("05_fsdp_llama", "before_a_step(lambda *given: None if averages else follow(*given))",
     ["--width", 32, "--depth", 2, "--recompute", "--lr", 1])])
def test_a_language_model(name, average, options, tmp_path):
    """With one mean over all tokens of a step, whatever the padding."""
    lines = [f"{n**5} {n % 7 * 'ab'}" for n in range(83)]
    (tmp_path / "train.txt").write_text("\n".join(lines[:72]))
    (tmp_path / "test.txt").write_text("\n".join(lines[72:]))
    killed_and_resumed(tmp_path, name, average, *options, "--workers", 0, then=1,
                        sizes=((16, 1), (4, 2), (8, 2)))


def test_fsdp_with_tensor_parallelism(tmp_path):
    """Four ranks, of which two compute each layer together, with clipped gradients."""
    killed_and_resumed(tmp_path, "05_fsdp_tp", "script.MAX_GRAD_NORM = 1.3", "--lr", 1,
                        "--width", 16, "--depth", 1, "--output", "last.pt", ranks=4,
                        averaged=False, sizes=((16, 1), (4, 2), (8, 2)))


def test_a_segmentation(tmp_path):
    """The steps are those of torch's own weighted mean; a class that is nowhere has no IoU."""
    masks = torch.randint(3, (83, 8, 8), generator=torch.Generator().manual_seed(0))
    images = (80 * masks + 20 * masks.roll(1, 2))[:, None].repeat(1, 3, 1, 1)
    for n, mask in enumerate(masks):
        mask[: n % 7] = 255  # ignored
        for name, pixels in (("images", images[n, 0]), ("masks", mask)):
            path = tmp_path / ("train" if n < 72 else "test") / name / f"{n:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.byte().numpy()).save(path)
    printed = killed_and_resumed(tmp_path, "06_segmentation", "", "--lr", 1, "--workers", 1)
    torch.manual_seed(SEED)
    net = module(tmp_path / "a project/train.py").UNet(4)
    optimizer = torch.optim.SGD(net.parameters(), weight_decay=0.05)
    criterion = torch.nn.CrossEntropyLoss(torch.tensor([0.5, 1, 1, 4]), ignore_index=255)
    for epoch, first in [(epoch, 16 * step) for epoch in (1, 2) for step in range(5)]:
        rows = order_of(epoch, 72, 1)[first : first + 16]
        drawn = [torch.rand((), generator=torch.manual_seed(hash((SEED, epoch, n)) % 2**32))
                 for n in rows]
        inputs, targets = [torch.stack([part[n].flip(-1) if number < 0.5 else part[n] for n, number
                           in zip(rows, drawn, strict=True)]) for part in (images, masks)]
        criterion(net(inputs / 255), targets).backward()
        at = 5 * (epoch - 1 + first / 72) - 0.5  # of ten steps, without the half step of warm-up
        optimizer.param_groups[0]["lr"] = (1 + cos(pi * at / 9.5)) / 8 if at > 0 else 1 / 6
        optimizer.step()
        optimizer.zero_grad()
    assert distance(dict(net.state_dict()), load(tmp_path / "one/last.pt")) < 1e-10
    net.load_state_dict(load(tmp_path / "one/best.pt"))
    valid, predicted = masks[72:] < 255, net(images[72:] / 255).argmax(1)
    found, right = [part[valid][:, None] == torch.arange(4) for part in (predicted, masks[72:])]
    shared, union = (found & right).sum(0), (found | right).sum(0)
    assert union[3] == 0 and printed[1].endswith(f" {(shared / union)[:3].mean():.4f}")


def test_two_networks(tmp_path, monkeypatch):
    """Two ranks have micro-batches of 5 images and of 1; the logged distance is the best file's."""
    monkeypatch.setenv("TRAIN_IMAGES", "72")
    changes = "torch.optim.AdamW = lambda weights, lr, betas: torch.optim.SGD(weights, lr, 0.5)"
    options = ["--lr", 0.02, "--workers", 1, "--output", "last.pt"]
    lines = killed_and_resumed(tmp_path, "06_gan", changes, *options, averaged=False,
                               then=1, sizes=((20, 1), (5, 2), (10, 2)))
    net = module(tmp_path / "a project/train.py").build_generator()
    net.load_state_dict(load(tmp_path / "one/best.pt"))
    noise = [torch.randn(64, generator=torch.manual_seed(hash((0, 0, row)) % 2**32))
             for row in range(47)]
    tests = module(tmp_path / "a project/common/data.py").load_mnist(None)[1].tensors[0]
    both = torch.cat([tests, net(torch.stack(noise))])
    gaps = (both[:, None] - both).flatten(2).norm(dim=2).view(2, 47, 2, 47).mean((1, 3))
    distances = [line.split()[-1] for line in lines]
    assert f"{2 * gaps[0, 1] - gaps.trace():.4f}" == min(distances, key=float)
    saved, other = [load(tmp_path / folder / "checkpoint.pt")["discriminator"]
                      for folder in ("one", "killed")]
    assert distance(saved, other) < 1e-10


def test_batches_by_a_budget(tmp_path):
    """The steps are those of each utterance alone, without padding; another budget is rejected."""
    torch.manual_seed(0)
    said = [torch.randint(1, 5, (1 + n % 5,)) for n in range(99)]
    pairs = [(3 * torch.eye(6)[each].repeat_interleave(2 + n % 4, 0) + 0.7 * torch.randn(6), each)
             for n, each in enumerate(said)]
    torch.save(pairs[:11], tmp_path / "test.pt")
    torch.save(pairs[11:], tmp_path / "train.pt")
    printed = killed_and_resumed(
        tmp_path, "06_ctc", "", "--lr", 0.1, ranks=3, averaged=False,
        unit="--frames", sizes=((20, 12), (20, 4), (20, 6)))
    other = run_ranks("../a project/changed.py", 1, *GIVEN, "--lr", 0.1, "--data-dir", tmp_path,
                      "--frames", 22, cwd=tmp_path / "one", code=1)  # as many batches, but others
    assert re.search("ValueError: .* 20, 'utterances': 88}, not .* 22, 'utterances'", other.errors)
    rest, batches = sorted(pairs[11:], key=lambda pair: len(pair[0])), []
    while rest:  # the longest are longer than the budget
        fit = [n for n, (frames, _) in enumerate(rest, start=1) if n * len(frames) <= 20]
        batches.append([rest.pop(0) for _ in range(max(fit, default=1))])
    torch.manual_seed(SEED)
    script = module(tmp_path / "a project/train.py")
    assert [script.edit_distance("kitten", text) for text in ("sitting", "", "te")] == [3, 6, 4]
    net, saved = script.Recognizer(6, 5), {}
    sgd = torch.optim.SGD(net.parameters(), momentum=0.9, nesterov=True)
    ctc = torch.nn.CTCLoss(reduction="sum")
    for epoch in (0, 1):
        losses = []
        for first in range(0, 54, 12):
            step = sum([batches[n] for n in order_of(epoch + 1, 54, 1)[first : first + 12]], [])
            losses += [ctc(net(x[:, None]), y, [len(x)], [len(y)]) for x, y in step]
            (sum(losses[-len(step) :]) / sum(len(y) for _, y in step)).backward()
            sgd.param_groups[0]["lr"] = 12**0.5 / 10 * rate_factor(5 * (epoch + first / 54), 10)
            sgd.step()
            sgd.zero_grad()
        paths = [net(x[:, None]).argmax(2).unique_consecutive() for x, _ in pairs[:11]]
        wrong = [script.edit_distance(path[path > 0].tolist(), known.tolist())
                 for path, known in zip(paths, said, strict=False)]
        loss, rate = sum(losses) / len(torch.cat(said[11:])), sum(wrong) / len(torch.cat(said[:11]))
        assert printed[epoch] == f"epoch {epoch + 1}/2  loss {loss:.4f}  error_rate {rate:.4f}"
        saved.setdefault(rate, copy.deepcopy(net.state_dict()))
    assert distance(net.state_dict(), tmp_path / "one/last.pt") < 1e-10
    assert distance(saved[min(saved)], tmp_path / "one/best.pt") < 1e-10


def test_without_a_data_set(tmp_path, ranks=2):
    """PPO takes the steps of a plain loop; killed, each rank resumes its own walks, bit for bit."""
    change = LANGUAGE + "torch.optim.Adam, script.MAX_KL = torch.optim.SGD, 2e-4"
    project = patched(tmp_path, "06_ppo", change)

    def learn(folder, ranks=ranks, **given):
        return run_ranks(project / "changed.py", ranks, "--seed", SEED, "--epochs", 8, "--lr", 0.5,
                         "--batch-size", 5, cwd=tmp_path / folder, **given)

    printed, passes = learn("whole").output, []
    learn("killed", KILLED=ranks - 1, code=9)
    assert "'processes': " in learn("killed", 3, code=1).errors
    assert "resuming from checkpoint.pt at {'epoch': 8, " in learn("killed").output
    assert equal(tmp_path / "whole/checkpoint.pt", tmp_path / "killed/checkpoint.pt")
    torch.manual_seed(SEED)
    net = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    walks = [module(project / "train.py").Walks(5, hash((SEED, rank)) % 2**32)
             for rank in range(ranks)]
    for epoch in range(1, 9):
        moves = []
        for rank, each in enumerate(walks):
            torch.manual_seed(hash((SEED, epoch, rank)))
            for _ in range(32):
                action = net(each.places)[:, :2].softmax(1).multinomial(1)
                moves.append((each.places, action, each.move(action[:, 0])[:, None]))
        seen, actions, rewards = [torch.stack([torch.cat([move[part] for move in moves[time::32]])
                                               for time in range(32)]) for part in range(3)]
        returns = torch.stack([rewards[time:].sum(0) for time in range(32)])
        for number in range(1, 5):
            chances, values = net(seen).split([2, 1], 2)
            logs = chances.log_softmax(2).gather(2, actions)
            if number == 1:
                old, gains = logs.detach(), (returns - values).detach()
                gains = (gains - gains.mean()) / gains.std(correction=0)
            ratio = (logs - old).exp()
            gain = torch.where(gains > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8)) * gains
            loss = 0.01 * (values - returns).square().mean() - gain.mean()
            slopes = torch.autograd.grad(loss, [*net.parameters()])
            for weight, slope in zip(net.parameters(), slopes, strict=True):
                weight.data -= 0.5 * (5 * ranks / 256) ** 0.5 * rate_factor(epoch - 1, 8) * slope
            if (old - logs).mean() > 2e-4:
                break
        passes.append(number)
        assert f"epoch {epoch}/8  reward {rewards.mean():.4f}  " in printed
    assert len({*passes}) > 1  # some epochs stop early
    assert distance(dict(net.state_dict()), load(tmp_path / "whole/ppo.pt")) < 1e-10


def test_lora_on_fsdp(tmp_path, monkeypatch):
    """A weight is W + 2 B A. The files have A and B only, and no run resumes with another W."""
    monkeypatch.setenv("TRAIN_IMAGES", "72")
    torch.manual_seed(0)
    net = module(ROOT / "05_model_parallel/fsdp.py").VisionTransformer(16, 2)
    base, header, data = dict(net.state_dict()), {"__metadata__": {"format": "pt"}}, b""
    for name, part in base.items():  # https://github.com/huggingface/safetensors
        header[name] = {"dtype": "F64", "shape": part.shape, "data_offsets": [
            len(data), len(data := data + part.numpy().tobytes())]}
    path, header = tmp_path / "base.safetensors", json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    options = ["--width", 16, "--depth", 2, "--lr", 4, "--output", "last.pt", "--best", "best.pt"]
    hsdp = "script.sys.argv += ['--shards=2', '--batch-size=2'] * (os.environ['WORLD_SIZE'] == '4')"
    killed_and_resumed(tmp_path, "05_fsdp_lora", hsdp, *options, "--base", path, "--recompute",
                        ranks=4, averaged=False)
    torch.manual_seed(SEED)
    script, one = module(tmp_path / "a project/fsdp.py"), tmp_path / "one"
    script.add_adapters(whole := script.VisionTransformer(16, 2), amp=False)
    low = {name: part for name, part in whole.named_parameters() if part.requires_grad}
    matrices = [name for name, part in base.items() if "blocks" in name and part.ndim == 2]
    triples = [*zip(matrices, [*low.values()][1::2], [*low.values()][::2], strict=True)]
    assert not any(b.any() for _, b, _ in triples)
    optimizer = torch.optim.SGD(low.values(), weight_decay=0.05)  # peak: 4 * (16 / 256) ** 0.5
    train_set, _ = module(tmp_path / "a project/common/data.py").load_mnist(None)
    for epoch, first in [(epoch, 16 * step) for epoch in (1, 2) for step in range(5)]:
        images, labels = train_set[order_of(epoch, 72, 1)[first : first + 16]]
        merged = base | {name: base[name] + 2 * b @ a for name, b, a in triples}
        logits = torch.func.functional_call(net, merged, images)
        torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1).backward()
        optimizer.param_groups[0]["lr"] = rate_factor(5 * (epoch - 1 + first / 72), 10)
        optimizer.step()
        optimizer.zero_grad()
    assert distance(low, one / "last.pt") < 1e-5
    saved = script.dcp.FileSystemReader(max(one.glob("checkpoint/*"))).read_metadata()
    assert {name[12:] for name in saved.state_dict_metadata if "e.model." in name} == low.keys()
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))  # the last number
    torch.save({"head.bias": torch.ones(10)}, other := tmp_path / "other.pt")
    for file, error in ((other, "Missing key"), (path, r'"base": \d+, "alpha": 16}')):
        again = run_ranks(tmp_path / "a project/changed.py", 1, *GIVEN, *options, "--amp",
                          "--base", file, cwd=one, code=1)
        assert re.search(error, again.errors)
    count = sum(part.numel() for part in low.values())  # in float64, the others in bfloat16
    assert f" {count} trained, {8 * count + len(data) // 4} bytes" in again.output


SPARSE = """
import torch, torch.distributed as dist
from common.gather import all_gather_ragged
dist.init_process_group("gloo")
tables = [torch.nn.Embedding(9, 4, sparse=sparse, _weight=torch.ones(9, 4))
          for sparse in (True, False)]
(model := torch.nn.parallel.DistributedDataParallel(tables[0])).register_comm_hook(None, average)
words = torch.tensor([[0, 1, 1], [1, 7, 2]])  # two rows of rank 0, three of rank 1
model(words[dist.get_rank()]).square().mean().backward()
tables[1](words).square().mean().backward()
assert tables[0].weight.grad.to_dense().allclose(tables[1].weight.grad)
"""


def test_sparse_gradients(tmp_path):
    """With the hook of the page two ranks have the gradients of one process with dense tables."""
    text = (COPIES / "README.md").read_text().split("### Sparse gradients")[1]
    project = copy_project(tmp_path / "a project")
    (project / "train.py").write_text(re.search("```python\n(.*?)```", text, re.S)[1] + SPARSE)
    run_ranks("train.py", 2, cwd=project)


def test_encoders(tmp_path):
    """One process has the pairs of all ranks in a batch."""
    torch.manual_seed(0)
    images, tokens = torch.randn(84, 1, 28, 28), torch.randint(1, 40, (84, 5))
    tokens[torch.arange(5) >= torch.randint(2, 6, (84, 1))] = 0  # padding
    for name, count in (("train", 84), ("test", 41)):
        torch.save({"images": images[:count], "tokens": tokens[:count]}, tmp_path / f"{name}.pt")
    options = ["--data-dir", tmp_path, "--lr", 6]
    on_one_and_two(tmp_path, "04_contrastive", "", *options, batch=28, ranks=4)


def test_early_stopping(tmp_path):
    """All ranks stop after three worse epochs behind the peak; the file has the best weights."""
    project = patched(tmp_path, "add_early_stopping")
    given = {"CHANGE": SCORED, "SCORES": "0.3 0.1 0.2 0.1 0.4 0.2 0.4 0.1 0.9"}
    result = run_ranks("train.py", 2, "--epochs", 10, cwd=project, TRAIN_IMAGES=20, **given)
    assert len(result.epochs()) == 8
    assert equal(project / "best-mnist.pt", project / "epoch-5.pt")


def test_ema(tmp_path):
    """The average of all steps' weights is evaluated and saved, as on one process."""
    _, two = on_one_and_two(tmp_path, "add_ema", AVERAGE, batch=62)
    for rank in (0, 1):
        assert distance(first_of(two / "mnist.pt"), load(two / f"average-{rank}.pt")) < 1e-10


def test_a_global_batch(tmp_path):
    """Two processes with the patch compute what 04 does on one with the same options."""
    one = copy_project(tmp_path, "04_ddp_torchrun/train.py", small="data")
    for ranks, project in ((1, one), (2, patched(tmp_path, "add_global_batch"))):
        without_batch_norm(project)
        run_ranks("train.py", ranks, *GIVEN, "--batch-size", 46, cwd=project, TRAIN_IMAGES=180)
    assert distance(one / "mnist.pt", project / "mnist.pt") < 1e-10


def test_predictions_are_in_the_order_of_the_data_set(tmp_path):
    project = patched(tmp_path, "add_predictions")
    run_ranks("train.py", 3, *GIVEN, cwd=project)
    net = module(project / "common/model.py").ConvNet().eval()
    net.load_state_dict(load(project / "mnist.pt"))
    expected = net(module(project / "common/data.py").load_mnist(None)[1].tensors[0]).argmax(1)
    assert [*map(int, (project / "predictions.txt").open())] == expected.tolist()


def test_a_profile(tmp_path):
    """One file for each rank, with three steps, and in it what communicates."""
    project = patched(tmp_path, "add_profiler")
    run_ranks("train.py", 2, "--batch-size", 10, cwd=project)
    for rank in (0, 1):
        trace = (project / f"trace-{rank}.json").read_text()
        found = {*re.findall(r"ProfilerStep#\d+|gloo:all_reduce", trace)}
        assert found == {"gloo:all_reduce", *[f"ProfilerStep#{n}" for n in (4, 5, 6)]}


DRAWN = """
draw = script.WeightedSampler.__iter__
script.WeightedSampler.__iter__ = lambda self: iter(
    print("drawn", self.rank, drawn := [*draw(self)], flush=True) or drawn)
"""


def test_weighted_sampling(tmp_path):
    """Each class as often, by one draw, of which each rank has its share; another in each epoch."""
    project = patched(tmp_path, "add_weighted_sampling", DRAWN)
    result = run_ranks("changed.py", 2, *GIVEN, cwd=project)
    labels = module(project / "common/data.py").load_mnist(None)[0].tensors[1]
    rare = torch.tensor([1 / (labels == label).sum() for label in labels])
    for seed in (SEED + 1, SEED + 2):
        drawn = rare.multinomial(182, True, generator=torch.Generator().manual_seed(seed)).tolist()
        assert all(f"drawn {n} {drawn[n::2]}\n" in result.output for n in (0, 1))


STREAM = """
Loader, factor = script.DataLoader, script.warmup_then_decay
script.DataLoader = lambda *given, **named: Loader(*given, num_workers=2, **named)
script.warmup_then_decay = lambda *given: print("rate", factor(*given)) or factor(*given)
"""


def test_a_stream(tmp_path):
    """No sample comes twice, few are left out, all ranks end together, and no rate is negative."""
    project = patched(tmp_path, "add_stream", STREAM)
    for file, batch in (("train.py", 8), ("changed.py", 7)):  # batches of the ranks: 4, 3; 4, 4
        result = run_ranks(file, 2, *GIVEN, "--batch-size", batch, cwd=project, TRAIN_IMAGES=63)
    stream = module(project / "train.py").Stream
    loaders = [DataLoader(stream(range(63), n, 2), 7, num_workers=2) for n in (0, 1)]
    assert sorted(torch.cat([*loaders[0], *loaders[1]]).tolist()) == [*range(63)]
    assert "rate 0" in result.output and "rate -" not in result.output
