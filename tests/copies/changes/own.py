"""Six epochs without noise, in which the page's lines compare the ranks.

FAULT is what they find.
"""

import os
import re

import helpers
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

PAGE = (helpers.COPIES / "README.md").read_text().split("### Compare the ranks")[1]
AFTER_AN_EPOCH, AFTER_A_BACKWARD = re.findall("```python\n(.*?)```", PAGE, re.S)[:2]


def change(script, rank):
    script.EPOCHS, script.NOISE = 6, 0
    DDP, validate, split = script.DDP, script.validate, script.random_split
    Criterion, Sampler = torch.nn.CrossEntropyLoss, script.DistributedSampler
    fault = os.environ.get("FAULT")
    names = dict(vars(script))

    def random_split(*given):
        if fault == "another split":
            torch.manual_seed(rank)
        sets = split(*given)
        names["train_set"] = sets[0]
        return sets

    def sampler(data_set, seed):
        own = rank if fault == "another seed" else 0
        names["train_sampler"] = Sampler(data_set, seed=seed + own)
        return names["train_sampler"]

    def wrap(model):
        if fault == "another name":
            model._modules[f"4{rank}"] = model._modules.pop("4")
        if fault == "a list":
            model.state_dict = dict
        names["model"] = model
        names["world_size"] = script.dist.get_world_size()
        names["device"] = torch.device("cpu")
        model.register_forward_pre_hook(see)
        if fault == "no DDP":
            return model
        ddp_model = DDP(model)
        return model if fault == "plain call" else ddp_model

    def see(model, inputs):
        if model.training:
            [names["points"]] = inputs

    def criterion():
        found = Criterion(reduction="sum" if fault == "a sum" else "mean")

        def loss(logits, labels):
            names["labels"] = labels
            return found(logits, labels)

        names["criterion"] = found
        return loss

    def compare(model, *given):
        print("noise", torch.initial_seed())
        exec(AFTER_AN_EPOCH, names)
        return validate(model, *given)

    def after_a_backward(optimizer, *given):
        if fault in (None, "a sum"):  # it would find others first
            exec(AFTER_A_BACKWARD, dict(names))

    if fault == "no steps" and rank == 1:
        torch.optim.SGD.step = lambda self: 0
    script.DDP, script.validate = wrap, compare
    script.random_split, script.DistributedSampler = random_split, sampler
    script.nn.CrossEntropyLoss = criterion
    register_optimizer_step_pre_hook(after_a_backward)
    os.makedirs(f"{rank}", exist_ok=True)  # a folder of its own for each rank
    os.chdir(f"{rank}")
