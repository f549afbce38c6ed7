"""Runs SCRIPT; CLIP takes the place of its MAX_GRAD_NORM, for gradients below and above it.

02 and 03 fork, as processes that import torch again take seconds; 03 is node RANK.
"""

import functools
import importlib
import os
import sys

import torch.multiprocessing as mp

mp.spawn = functools.partial(mp.start_processes, start_method="fork")
if "-n" in sys.argv:
    sys.argv += ["-i", os.environ["RANK"], "--master-port", os.environ["MASTER_PORT"]]
script = importlib.import_module(os.environ["SCRIPT"])
script.MAX_GRAD_NORM = float(os.environ.get("CLIP", script.MAX_GRAD_NORM))
script.main()
