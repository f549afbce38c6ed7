"""Call a script's functions: its options, and what it defines."""

import contextlib
import gc
import importlib.util
import os
import runpy
import sys
import traceback

import pytest
import torch.distributed as dist

from helpers.commands import SITECUSTOMIZE, clean_environment


def load_script(path):
    """Import a script as a module, without running its main()."""
    spec = importlib.util.spec_from_file_location("script", path)
    module = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stderr(sys.__stderr__):  # a file, which faulthandler needs
        spec.loader.exec_module(module)
    return module


def run_main(script):
    """Call a script's main() in this process, which joins a process group.

    If it raises, the exception keeps the model alive. The model must not outlive the group, whose
    destructor could then wait for its threads forever.
    """
    try:
        script.main()
        assert not dist.is_initialized()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def declare_torchvision_operators():
    """Let this process import torchvision where torch's build is not the one it was built for.

    Its C++ extension does not load then. Commands and ranks do this at their start if their
    environment has WITNESS and TORCHVISION_OPERATORS=1.
    """
    os.environ["TORCHVISION_OPERATORS"] = "1"
    runpy.run_path(str(SITECUSTOMIZE))
    del os.environ["TORCHVISION_OPERATORS"]


def parse(monkeypatch, script, *options, gpus=0, **environment):
    """Call a script's parse_args() with these options, on a machine with this number of GPUs."""
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("sys.argv", [script.name, *map(str, options)])
    return load_script(script).parse_args()


def rejected(monkeypatch, capsys, script, *options, **settings):
    """The error that argparse prints below its usage when a script rejects these options."""
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, script, *options, **settings)
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"{script.name}: error: ")
    return error.removeprefix(f"{script.name}: error: ")
