"""What a run must have printed and saved."""

import math
import re

import torch

from helpers.commands import WITNESS, Running
from helpers.paths import DIGITS, ROOT
from helpers.projects import FEW


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


class Launch(Running):
    """A run.sh of a copied repository with few digits, started in a folder of its own."""

    def __init__(self, place, repository, folder, *options, tools=None, **settings):
        self.place, self.repository = place, repository
        place.mkdir()
        (place / "data").symlink_to(repository / "common")
        settings |= {**WITNESS, "WITNESS": str(place / "witness")}
        if tools:
            settings["PATH"] = tools(place)
        super().__init__(["bash", repository / folder / "run.sh", *options], place, **settings)

    def check(self, **expected):
        """It has trained, and no line of the repository caused a warning."""
        result = self.finish()
        check_warnings(result, self.repository)
        check_trained(result, self.place, **expected)
        return result


def check_warnings(result, repository=ROOT):
    """No line of the repository caused a warning of Python, such as a deprecation."""
    warning = rf"^{re.escape(str(repository))}.*Warning"
    assert not re.search(warning, result.errors, re.M), result


def check_trained(result, folder, epochs=3, ranks=2, at_least=0.6, accuracy_of=bare_accuracy):
    """Check the epoch lines, and that the saved weights have the accuracy of the last one.

    With several ranks also: each adds its share to the loss, a mean over all images, and only
    rank 0 saves.
    """
    assert result.code == 0, result
    lines = result.epochs()
    assert [line["epoch"] for line in lines] == [str(n) for n in range(1, epochs + 1)], result
    assert all(line["loss"] != "nan" for line in lines), result
    assert float(lines[-1]["accuracy"]) >= at_least, result
    assert lines[-1]["accuracy"] == f"{accuracy_of(folder / 'mnist.pt'):.4f}", result
    if ranks == 1:
        return
    rows = [line.split() for line in (folder / "witness").read_text().splitlines()]
    assert {int(world) for _, world, *_ in rows} == {ranks}
    assert {rank for rank, _, *what in rows if what == ["saves"]} == {"0"}
    rows = [row for row in rows if row[2] != "saves"]
    shares = [[row[2:] for row in rows if int(row[0]) == n] for n in range(ranks)]
    for line, of_epoch in zip(lines, zip(*shares, strict=True), strict=True):
        losses, images = zip(*[map(float, share) for share in of_epoch], strict=True)
        assert min(losses) > 0 and sum(images) == math.ceil(FEW / ranks) * ranks
        assert abs(float(line["loss"]) - sum(losses) / sum(images)) < 6e-5


def pairs(one, other):
    """The tensors of two files of weights, which must have the same names."""
    one, other = (torch.load(path, weights_only=True) for path in (one, other))
    assert one.keys() == other.keys()
    return [(one[name], other[name]) for name in one]


def distance(one, other):
    """The largest difference between two files of weights."""
    return max((tensor - another).abs().max().item() for tensor, another in pairs(one, other))


def equal(one, other):
    """Whether two files contain the same weights, bit by bit."""
    return all(torch.equal(tensor, another) for tensor, another in pairs(one, other))


def bits(state):
    """A state to be compared bit by bit: its tensors as their type, shape and bytes."""
    if isinstance(state, dict):
        return {name: bits(part) for name, part in state.items()}
    if isinstance(state, list):
        return [bits(part) for part in state]
    if isinstance(state, torch.Tensor):
        return state.dtype, state.shape, state.numpy().tobytes()
    return state
