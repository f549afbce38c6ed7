"""In place of evaluations: each of the numbers in SCORES is the next epoch's.

The weights of each epoch are saved.
"""

import os

import torch


def change(script, rank):
    scores = iter(enumerate(map(float, os.environ["SCORES"].split()), start=1))

    def evaluate(model, *given):
        epoch, score = next(scores)
        if hasattr(script, "save_whole"):
            script.save_whole(model, script.Path(f"epoch-{epoch}.pt"))
        elif rank == 0:
            torch.save(model.state_dict(), f"epoch-{epoch}.pt")
        return score

    script.evaluate = evaluate
