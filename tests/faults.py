"""Run a script with faults: torchrun ... faults.py "FAULT FAULT:ARGUMENT" script.py.

A fault changes torch, or the script's common/, before the script imports it.
"""

import functools
import itertools
import os
import pkgutil
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

rank = os.environ.get("RANK")


def replace(name, change):
    """Replace a function or a class with what change() makes of it."""
    owner, name = name.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    setattr(owner, name, change(getattr(owner, name)))


def loss_of_the_plain_model():
    torch.nn.parallel.DistributedDataParallel = lambda model, **_: model


def compiled_without_cpp():
    """Inductor's linker fails on the CPU if the path of torch has a space."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


def float64():
    """Rounding is then far from any mistake."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double


def float64_images():
    """In torchvision's transforms for the evaluation, which ask for float32."""
    name = "torchvision.transforms.functional.convert_image_dtype"
    replace(name, lambda convert: lambda image, _: convert(image, torch.float64))


class GroupNorm(torch.nn.GroupNorm):
    """In place of BatchNorm2d, so that a batch can be split."""

    def __init__(self, channels):
        super().__init__(4, channels)


def group_norm():
    torch.nn.BatchNorm2d = GroupNorm


def own_folders():
    """Each rank has one, in which `late.pt` becomes checkpoint.pt after a second."""
    os.chdir(rank)

    def sleep(seconds):
        if os.path.exists("late.pt"):
            os.rename("late.pt", "checkpoint.pt")

    time.sleep = sleep


def after(function, call):
    """Call this, too, when a function returns."""

    def changed(function):
        def call_both(*given, **named):
            result = function(*given, **named)
            call()
            return result

        return call_both

    replace(function, changed)


def pause(function):
    """After a call of this function, wait until a signal is noted, or pending."""
    from common import stops

    def wait():
        while not (stops.noted or signal.sigpending()):
            Path(f"paused-{rank}").touch()
            time.sleep(0.01)

    after(function, wait)


def signal_after(function, call, number, of_rank):
    """This rank gets this signal when this call of a function returns."""
    calls = itertools.count(1)

    def send():
        if next(calls) == int(call) and rank == of_rank:
            os.kill(os.getpid(), int(number))

    after(function, send)


if __name__ == "__main__":
    _, faults, script, *options = sys.argv
    sys.argv = [script, *options]
    sys.path[:1] = [f"{folder}" for folder in Path(script).absolute().parents[:2]]
    for fault in faults.split():
        name, *given = fault.split(":")
        globals()[name](*given)
    runpy.run_path(script, run_name="__main__")
