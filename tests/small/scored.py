"""Runs SCRIPT with the scores SCORES in place of its evaluate(), and saves each epoch's weights."""

import importlib
import os

import torch
import torch.distributed as dist

script = importlib.import_module(os.environ["SCRIPT"])
scores = iter(enumerate(map(float, os.environ["SCORES"].split()), start=1))


def save(net, path):
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), path)


def evaluate(net, *given):
    epoch, score = next(scores)
    getattr(script, "save_whole", save)(net, script.Path(f"epoch-{epoch}.pt"))
    return score


script.evaluate = evaluate
script.main()
