"""Replaces common/model.py (then whole.py): a small network with BatchNorm, dropout.

With WAITS, torch warns where a line of the training waits for the GPU.
"""

import os
import traceback

import torch
from common.whole import VisionTransformer, warmup_then_decay  # noqa: F401
from torch import nn


class ConvNet(nn.Module):
    """Images [N, 1, 28, 28] to logits [N, 10]; in each mode it once prints how."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(16, 10),
        )
        self.reported = set()

    @torch.compiler.disable  # compiling it would take long
    def forward(self, images):
        logits = self.layers(images)
        if self.training not in self.reported:
            self.reported.add(self.training)
            callers = [frame.filename for frame in traceback.extract_stack()]
            # torch.compiler.disable() is one
            wrappers = sum(file.endswith("eval_frame.py") for file in callers)
            what = "training" if self.training else "evaluation"
            print(
                f"{what} on {logits.device} in {logits.dtype}, "
                f"gradients {logits.requires_grad}, seed {torch.initial_seed()}, "
                f"compiled {wrappers > 1}\n",
                end="",  # a single write, so that the lines of two ranks do not mix
                flush=True,
            )
            if "WAITS" in os.environ:
                torch.cuda.set_sync_debug_mode("warn" if self.training else "default")
        return logits
