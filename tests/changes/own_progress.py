"""A tensor of one's own in `progress` of 06 and 07, which is not finite."""

import torch


def change(script, rank):
    load = getattr(script, "load_checkpoint", None)

    def load_checkpoint(path, stateful, progress, fingerprint):
        load(path, stateful, progress, fingerprint)
        progress["own"] = torch.ones(2) / 0

    script.load_checkpoint = load_checkpoint
