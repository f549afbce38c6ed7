"""Two epochs without noise, and in each the README's lines compare the ranks.

FAULT is what they find.
"""

import os
import re

import helpers
import torch

PAGE = (helpers.ROOT / "README.md").read_text().split("### Compare the ranks")[1]
LINES = re.search("```python\n(.*?)```", PAGE, re.S)[1]


def change(script, rank):
    script.EPOCHS, script.SEED, script.NOISE = 2, 3, 0
    DDP, validate, split = script.DDP, script.validate, script.random_split
    fault = os.environ.get("FAULT")
    sets = []

    def random_split(*given):
        sets.extend(split(*given))
        return sets

    def wrap(model):
        if fault == "another name":
            model._modules[f"4{rank}"] = model._modules.pop("4")
        if fault == "no DDP":
            return model
        ddp_model = DDP(model)
        return model if fault == "plain call" else ddp_model

    def compare(model, *given):
        print("seed", torch.initial_seed())
        here = {"model": model, "train_set": sets[0]}
        here["world_size"] = script.dist.get_world_size()
        exec(LINES, vars(script) | here)
        return validate(model, *given)

    if fault == "another split":
        script.SEED += rank
    if fault == "no steps" and rank == 1:
        torch.optim.SGD.step = lambda self: 0
    script.DDP, script.validate = wrap, compare
    script.random_split = random_split
    os.makedirs(f"{rank}", exist_ok=True)  # a folder of its own for each rank
    os.chdir(f"{rank}")
