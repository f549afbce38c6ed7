"""What FAULT names, one or more of the functions below, is wrong with a copy."""

import os
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import gather


def change(script, rank):
    for name in os.environ["FAULT"].split():
        globals()[name](script, rank)


def replace(script, name, edit):
    """Let a function of the script return what `edit` makes of its result."""
    function = getattr(script, name)
    setattr(script, name, lambda *given, **named: edit(function(*given, **named)))


def nothing(script, rank):
    pass


def other_batches(script, rank):
    script.rest_of_epoch = lambda *given: range(16 + rank)


def other_test_sets(script, rank):
    """The ranks would have a different number of batches in their evaluations."""

    def shorten(sets):
        return sets[0], torch.utils.data.Subset(sets[1], range(40 + rank))

    replace(script, "load_mnist", shorten)


def plain(script, rank):
    """As if the loss came from the plain model."""
    script.DDP = lambda model, **given: model


def frozen(script, rank):
    """A large frozen parameter, which is infinite, as masks are."""

    def add_a_mask(model):
        mask = torch.full((10**6,), -torch.inf)
        model.mask = torch.nn.Parameter(mask, requires_grad=False)
        return model

    replace(script, "ConvNet", add_a_mask)


def zero_loss(script, rank):
    script.nn.CrossEntropyLoss = lambda **_: lambda out, labels: 0 * out.sum()


def anew(script, rank):
    """A layer is initialised after DDP(...), differently on each rank."""

    def reset(ddp_model):
        torch.manual_seed(rank)
        ddp_model.module.layers[1].reset_parameters()
        return ddp_model

    replace(script, "DDP", reset)


def other_seed(script, rank):
    sys.argv += ["--seed", str(rank)]


def other_batch_size(script, rank):
    sys.argv += ["--batch-size", str(rank + 1)]


def other_save_every(script, rank):
    sys.argv += ["--save-every", str(rank + 1)]


def other_order(script, rank):
    """On rank 1 one layer comes last."""

    def reorder(block):
        if rank > 0:
            block._modules["up"] = block._modules.pop("up")
        return block

    replace(script, "Block", reorder)


def overflow(script, rank):
    script.nn.CrossEntropyLoss = lambda **_: (
        lambda out, _: (1e300 * out).square().mean()
    )


def nan_image(script, rank):
    def damage(sets):
        sets[0].tensors[0][150] = torch.nan
        return sets

    replace(script, "load_mnist", damage)


def broken_step(script, rank):
    """The first parameter is divided by 0 after a step."""

    def divide(optimizer, *given):
        optimizer.param_groups[0]["params"][0].data.div_(0)

    register_optimizer_step_post_hook(divide)


def unlike_cpus(script, rank):
    # read when torch first uses it
    os.environ["ATEN_CPU_CAPABILITY"] = ["default", "avx2"][rank]
    print(torch.backends.cpu.get_cpu_capability(), flush=True)


def own_disks(script, rank):
    """Each rank has a folder of its own, and does not wait long for a file."""
    os.makedirs(str(rank), exist_ok=True)
    os.chdir(str(rank))
    gather.time.sleep = lambda seconds: None


def late_file(script, rank):
    """A rank sees the checkpoint of the other one later."""
    own_disks(script, rank)

    def link(seconds):
        if rank > 0:
            os.link("../0/checkpoint.pt", "checkpoint.pt")

    gather.time.sleep = link


def late_disk(script, rank):
    """What is `late checkpoint` appears when the training begins."""

    def rename(shard):
        for name in ("checkpoint", "checkpoint.pt"):
            if rank == 0 and os.path.exists(f"late {name}"):
                os.rename(f"late {name}", name)
        return shard

    replace(script, "rest_of_epoch", rename)


def swapped(script, rank):
    """Two layers are exchanged, which an optimizer would not notice."""

    def swap(model):
        layers = model.layers._modules
        for name in "01":
            layers[name] = layers.pop(name)
        return model

    replace(script, "ConvNet", swap)


def unused(script, rank):
    def add_a_layer(model):
        model.unused = torch.nn.Linear(2, 2)
        return model

    replace(script, "VisionTransformer", add_a_layer)


def wrapped(script, rank):
    """Blocks that are compiled and wrapped, except in the model that rank 0 holds."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    def wrap(block):
        if block.up.weight.is_meta:
            block = checkpoint_wrapper.checkpoint_wrapper(block)
            block = torch.compile(block, backend="eager")
        return block

    replace(script, "Block", wrap)
