"""What a run must have printed and saved."""

import functools
import math
import re

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from helpers.commands import WITNESS, run
from helpers.paths import DIGITS, ROOT

EXACT = ["--batch-size", 50, "--seed", 3]  # no rank's images can be split equally
VERY_FEW = 20  # different digits, each at nine positions


def rate_factor(step, total_steps):
    """What the scripts multiply the peak learning rate by, in a formula of the tests' own."""
    return min((step + 1) / (0.4 * total_steps + 1), (1 - step / total_steps) / 0.6)


def bare_accuracy(weights):
    """The accuracy of saved weights, image by image, without the code of the scripts."""
    from common.data import load_mnist  # here: a rank imports this file, then a copy's common/
    from common.model import ConvNet

    model = ConvNet().eval()
    model.load_state_dict(torch.load(weights, weights_only=True))
    test_set = load_mnist(DIGITS)[1]
    with torch.no_grad():
        right = [int(model(image[None]).argmax()) == int(label) for image, label in test_set]
    return sum(right) / len(right)


def launch(repository, folder, *options, cwd, **settings):
    """Run a folder's run.sh on few digits; the ranks write what they do to cwd/witness."""
    (cwd / "data").symlink_to(repository / "common")
    settings |= {**WITNESS, "WITNESS": str(cwd / "witness")}
    result = run(["bash", repository / folder / "run.sh", *options], cwd, **settings)
    check_warnings(result, repository)
    return result


def check_warnings(result, repository=ROOT):
    """No line of the repository caused a warning of Python, such as a deprecation."""
    warning = rf"^{re.escape(str(repository))}.*Warning"
    assert not re.search(warning, result.errors, re.M), result


def check_trained(result, folder, epochs=3, ranks=2, at_least=0.6, accuracy_of=bare_accuracy):
    """Check the epoch lines, and that the saved weights have the accuracy of the last one.

    With several ranks also: all of them add their losses, and only rank 0 saves.
    """
    assert result.code == 0, result
    lines = result.epochs()
    assert [line["epoch"] for line in lines] == [str(n) for n in range(1, epochs + 1)], result
    assert all(line["loss"] != "nan" for line in lines), result
    assert float(lines[-1]["accuracy"]) >= at_least, result
    assert lines[-1]["accuracy"] == f"{accuracy_of(folder / 'mnist.pt'):.4f}", result
    if ranks > 1:
        did = check_rank_0_saves(folder, ranks)
        adds = [f"{rank} {ranks} adds" for rank in range(ranks)]
        assert sorted(line for line in did if "saves" not in line) == sorted(adds * epochs)


def check_rank_0_saves(folder, ranks):
    """And nobody else does; returns what the ranks have done."""
    did = (folder / "witness").read_text().splitlines()
    assert {line for line in did if "saves" in line} == {f"0 {ranks} saves"}
    return did


def check_as_one_process(result, folder, ranks=2, epochs=2, shuffle=False):
    """A run of `exact` with EXACT has the losses, the scores and the weights of plain_training().

    Only rank 0 saves.
    """
    assert result.code == 0, result
    lines, expected = plain_training(ranks, epochs, shuffle)
    assert [(line["loss"], line["accuracy"]) for line in result.epochs()] == lines, result
    for line in result.epochs():
        assert (line["seconds"], line["speed"]) == ("7.0", f"{9 * VERY_FEW / 7:.0f}"), line
    state = torch.load(folder / "mnist.pt", weights_only=True)
    assert state.keys() == expected.keys()
    assert all(torch.allclose(state[name], expected[name]) for name in state)
    if ranks > 1:
        check_rank_0_saves(folder, ranks)


@functools.cache
def plain_training(ranks, epochs, shuffle):
    """Train in one process, which computes the gradients of all ranks' batches.

    It has the data and the network of the scripts, and nothing else of them. Returns what an epoch
    line shows of each epoch, and the weights.
    """
    from common.data import load_mnist
    from common.model import ConvNet

    torch.set_default_dtype(torch.float64)
    train_set, test_set = load_mnist(DIGITS)
    few = [part.unflatten(0, (9, -1))[:, :VERY_FEW].flatten(0, 1) for part in train_set.tensors]
    train_set = TensorDataset(*few)
    torch.manual_seed(3)
    samplers = [DistributedSampler(train_set, ranks, rank, seed=3) for rank in range(ranks)]
    loaders = [DataLoader(train_set, 50, sampler=sampler) for sampler in samplers]
    if shuffle:
        loaders = [DataLoader(train_set, 50, shuffle=True)]
    test_loader, net = DataLoader(test_set, 250), ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, nesterov=True)
    steps, step, lines = epochs * len(loaders[0]), 0, []
    for epoch in range(1, epochs + 1):
        net.train()
        losses = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            for rank, (images, labels) in enumerate(batches):
                for layer in (net.layer1, net.layer2):  # rank 0's statistics are saved
                    layer[1].momentum = 0 if rank else 0.1
                scores = net(images)
                loss = torch.nn.functional.cross_entropy(scores, labels, label_smoothing=0.1)
                (loss / ranks).backward()
                losses += [loss.item()] * len(labels)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.7)
            peak = 0.6 * math.sqrt(50 * ranks / 256)
            optimizer.param_groups[0]["lr"] = peak * rate_factor(step, steps)
            optimizer.step()
            step += 1
        net.eval()
        with torch.no_grad():
            right = [net(images).argmax(1) == labels for images, labels in test_loader]
        accuracy = torch.cat(right).double().mean()
        lines.append((f"{sum(losses) / len(losses):.4f}", f"{accuracy:.4f}"))
    for layer in (net.layer1, net.layer2):
        layer[1].num_batches_tracked //= ranks
    torch.set_default_dtype(torch.float32)
    return lines, net.state_dict()


def distance(one, other):
    """The largest difference between two files of weights, which must have the same names."""
    one, other = (torch.load(path, weights_only=True) for path in (one, other))
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def equal(*files):
    """Whether two files contain the same weights, bit by bit."""
    one, other = (bits(torch.load(path, weights_only=True)) for path in files)
    return one == other


def bits(state):
    """A state to be compared bit by bit: its tensors as their type, shape and bytes."""
    if isinstance(state, dict):
        return {name: bits(part) for name, part in state.items()}
    if isinstance(state, list):
        return [bits(part) for part in state]
    if isinstance(state, torch.Tensor):
        return state.dtype, state.shape, state.numpy().tobytes()
    return state
