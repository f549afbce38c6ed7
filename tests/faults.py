"""Run a script with faults: torchrun ... faults.py "FAULT FAULT:ARGUMENT" script.py.

A fault changes torch, or common/ next to the script, before the script imports it.
"""

import functools
import itertools
import os
import pkgutil
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import Parameter, parallel
from torch.optim.optimizer import register_optimizer_step_post_hook

rank = int(os.environ["RANK"])


def replace(name, change):
    """Replace a function or a class with what change() makes of it."""
    owner, name = name.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    setattr(owner, name, change(getattr(owner, name)))


def with_a_parameter(value, change):
    """Give the model a parameter `own`, then call a function with it, before DDP."""

    def network(make):
        def made():
            model = make()
            model.own = Parameter(torch.tensor([value]))
            change(model)
            return model

        return made

    replace("common.model.ConvNet", network)


# The ranks differ


def loss_of_the_plain_model():
    parallel.DistributedDataParallel = lambda model, **_: model


def bfloat16_after_ddp():
    name = "torch.nn.parallel.DistributedDataParallel"
    replace(name, lambda ddp: lambda model, **_: (ddp(model), model.bfloat16())[0])


def set_by_the_forward():
    """A parameter that each rank sets from its first batch, as ActNorm does."""

    def center(model, images):
        if model.own == 0:
            model.own.data.fill_(images[0].mean())
        return images[0] - model.own

    with_a_parameter(0.0, lambda model: model.register_forward_pre_hook(center))


def edit_on_one_rank():
    def edit(optimizer, *_):
        for weight in optimizer.param_groups[0]["params"]:
            weight.data.add_(rank / 100)

    register_optimizer_step_post_hook(edit)


def with_two_layers(names, change):
    """Both models get two equal layers with these names; change() applies them."""

    def with_layers(make):
        def made(*size):
            model = make(*size)
            for name in names:
                model.add_module(name, torch.nn.Linear(10, 10))
            model.register_forward_hook(lambda model, _, logits: change(model, logits))
            return model

        return made

    for name in ("ConvNet", "VisionTransformer"):
        replace(f"common.model.{name}", with_layers)


def another_order_on_rank_1():
    """As if a model registered its layers from a set."""
    names = ["left", "right"]
    if rank == 1:
        names.reverse()
    with_two_layers(names, lambda model, logits: model.right(model.left(logits)))


def another_layer_on_rank_1():
    """As with a head for each data set: FSDP would add up gradients of both heads."""
    with_two_layers(
        ["left", "right"],
        lambda model, logits: (model.right if rank == 1 else model.left)(logits),
    )


def nan_in_one_row():
    """Of an embedding, of which no other row gets it."""

    def change(model):
        weight = torch.zeros(1000, 8)
        weight[777] = torch.nan
        model.words = torch.nn.Embedding.from_pretrained(weight)
        model.own.requires_grad_(False)

    with_a_parameter(0.0, change)


# Nothing is wrong


def nothing():
    pass


def float64():
    """Rounding is then far from any mistake."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double


def float64_images():
    """In torchvision's transforms for the evaluation, which ask for float32."""
    name = "torchvision.transforms.functional.convert_image_dtype"
    replace(name, lambda convert: lambda image, _: convert(image, torch.float64))


def group_norm():
    """In place of BatchNorm, so that a batch can be split."""

    class GroupNorm(torch.nn.GroupNorm):
        def __init__(self, channels):
            super().__init__(4, channels)

    torch.nn.BatchNorm2d = GroupNorm


def compiled_without_cpp():
    """Inductor's linker fails on the CPU if the path of torch has a space."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


def unlike_cpus():
    if rank == 0:  # read when torch first uses it
        os.environ["ATEN_CPU_CAPABILITY"] = "default"


def zero_gradients():
    torch.nn.CrossEntropyLoss = lambda **_: lambda logits, labels: 0 * logits.sum()


def bfloat16_and_frozen():
    """The weights of the first layer, and a parameter that is -inf."""

    def change(model):
        model.bfloat16().own.requires_grad_(False)
        model.layers[1].requires_grad_(False)
        model.register_forward_pre_hook(lambda model, images: images[0].bfloat16())

    with_a_parameter(-torch.inf, change)


def skipped_steps():
    """By a GradScaler, whose first scales are too large: gradients are inf or NaN."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    step = torch.optim.AdamW.step

    def scaled_step(optimizer):
        groups = optimizer.param_groups
        scaler.step(SimpleNamespace(param_groups=groups, step=lambda: step(optimizer)))
        scaler.update()

    torch.optim.AdamW.step = scaled_step
    replace("torch.Tensor.backward", lambda old: lambda loss: old(scaler.scale(loss)))


# Interruptions, random numbers, and other folders


def augmentation():
    """Each image gets noise in __getitem__."""

    def with_noise(read):
        def noisy(self, index):
            image, label = read(self, index)
            return image + torch.rand_like(image), label

        return noisy

    replace("torch.utils.data.TensorDataset.__getitem__", with_noise)


def gpus(count):
    torch.cuda.device_count = lambda: int(count)


def nothing_is_deleted():
    shutil.rmtree = lambda *_, **__: None


def own_folders():
    """Each rank has one, in which `late.pt` becomes checkpoint.pt after a second."""
    os.chdir(str(rank))

    def sleep(seconds):
        if os.path.exists("late.pt"):
            os.rename("late.pt", "checkpoint.pt")

    time.sleep = sleep


def pause(function):
    """After a call of this function, wait until a signal is noted, or pending."""
    from common import stops

    def paused(call):
        def call_and_pause(*given, **named):
            result = call(*given, **named)
            while not (stops.noted or signal.sigpending()):
                Path(f"paused-{rank}").touch()
                time.sleep(0.01)
            return result

        return call_and_pause

    replace(function, paused)


def signal_after(function, call, number, of_rank):
    """This rank gets this signal when this call of a function returns."""
    calls = itertools.count(1)

    def with_signal(function):
        def call_and_signal(*given, **named):
            result = function(*given, **named)
            if next(calls) == int(call) and rank == int(of_rank):
                os.kill(os.getpid(), int(number))
            return result

        return call_and_signal

    replace(function, with_signal)


def killed_in_save(number):
    """In this call of torch.save, after a part of the file is written."""
    save, calls = torch.save, itertools.count(1)

    def save_or_die(content, file):
        if next(calls) == int(number):
            file.write(b"part of a file")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(content, file)

    torch.save = save_or_die


if __name__ == "__main__":
    _, faults, script, *options = sys.argv
    sys.argv = [script, *options]
    sys.path[0] = str(Path(script).parent)
    for fault in faults.split():
        name, *given = fault.split(":")
        globals()[name](*given)
    runpy.run_path(script, run_name="__main__")
