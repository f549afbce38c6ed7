"""Save the moving average of the first weights that there should be after each step."""

import torch
from torch.optim import optimizer as hooks


def change(script, rank):
    seen, averages = [], []
    if hasattr(script, "EMA_DECAY"):
        script.EMA_DECAY = 0.8

    def follow(optimizer, *given):
        weight = optimizer.param_groups[0]["params"][0].detach()
        if hasattr(weight, "full_tensor"):
            weight = weight.full_tensor()
        if seen and weight.equal(seen[-1]):  # also in DCP's step at a rate of 0
            return
        seen.append(weight.clone())
        average = seen[-1]
        if averages:
            done = len(averages)
            kept = getattr(script, "EMA_DECAY", min(0.99, (1 + done) / (10 + done)))
            average = kept * averages[-1] + (1 - kept) * average
        averages.append(average)
        torch.save({"first": average}, f"average-{rank}.pt")

    hooks.register_optimizer_step_post_hook(follow)
    if hasattr(script, "Ema"):  # it begins with the initial weights
        hooks.register_optimizer_step_pre_hook(follow)
