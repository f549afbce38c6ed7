"""Measure at most 8 MiB on GPUs. A simulated GPU takes 0 ms, and here it takes 1."""

import torch


def change(script, rank):
    script.SIZES["cuda"] = (1, 8)
    elapsed = torch.cuda.Event.elapsed_time

    def elapsed_time(start, end):
        return elapsed(start, end) or 1

    torch.cuda.Event.elapsed_time = elapsed_time
