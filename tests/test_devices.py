"""What a process does with its rank, its GPU and its options, on the CPU with stand-ins."""

import faulthandler
import os
import signal
from unittest import mock

import pytest
import torch
from helpers.commands import free_port
from helpers.paths import DIGITS, FOLDERS, ROOT, label
from helpers.scripts import load_script, parse, run_main

SCRIPTS = [path for path in sorted(ROOT.glob("0*/*.py")) if not path.parent.match("01*")]
RANK = {"RANK": 2, "LOCAL_RANK": 1, "WORLD_SIZE": 5, "LOCAL_WORLD_SIZE": 2}  # on the second node


class Stop(BaseException):
    """Ends a script where a test has seen enough."""


def second_process(monkeypatch, path, *options, **settings):
    """A call of a script's train() in the second process of the second node, with its rank."""
    script, given, rank, extra = load_script(path), RANK, 2, ()
    if path.parent.name.startswith("02"):  # one node
        options, given, rank, extra = [*options, "--nprocs", 5], {}, 1, (29500,)
    elif path.parent.name.startswith("03"):
        options, given = [*options, "-n", 2, "-g", "1,4", "-i", 1], {}
    args = parse(monkeypatch, path, *options, **{**given, **settings})
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *address, **options: address)
    before = [] if given else [1]
    train = script.selftest if path.name == "selftest.py" else script.train
    return lambda: train(*before, args, *extra), rank, script


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_it_takes_the_gpu_of_its_local_rank_then_joins_the_group(path, monkeypatch):
    def join(backend, rank=2, world_size=5, **options):
        calls.append((backend, rank, world_size))
        raise Stop

    calls = []
    stages = {"WORLD_SIZE": 2} if path.name == "pipeline.py" else {}  # it rejects another number
    train, rank, script = second_process(monkeypatch, path, gpus=4, **stages)
    monkeypatch.setattr("torch.cuda.set_device", calls.append)
    monkeypatch.setattr("torch.distributed.init_process_group", join)
    monkeypatch.setattr("threading.Timer", mock.Mock())  # selftest's would end this process
    with pytest.raises(Stop):
        train()
    both = path.name in ("fsdp.py", "selftest.py") or path.parent.name[:2] in ("06", "07", "08")
    gpu = 2 if path.match("05*/train.py") else 1  # it has two per process
    backend = "cpu:gloo,cuda:nccl" if both else "nccl"
    assert calls == [torch.device("cuda", gpu), (backend, rank, 5)]
    assert faulthandler.unregister(signal.SIGUSR1)  # kill -USR1 printed where it is


@pytest.mark.parametrize("folder", FOLDERS[1:4])
def test_it_has_its_own_seed_and_no_progress_bar(folder, monkeypatch):
    def bar(loader, title, **options):
        seen.append((title, len(loader), loader.sampler.rank, options))
        raise Stop

    seen = []
    options = ["--seed", 7, "--device", "cpu", "--data-dir", DIGITS]
    train, rank, script = second_process(monkeypatch, ROOT / folder / "train.py", *options)
    for name, value in (("init_process_group", None), ("get_rank", rank), ("get_world_size", 5)):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *args, value=value, **_: value)
    monkeypatch.setattr(script, "DDP", lambda net, **_: net)
    monkeypatch.setattr(script, "tqdm", bar)
    with pytest.raises(Stop):
        train()
    steps = -(-1438 * 9 // 5 // 64)
    assert seen == [("epoch 1/1", steps, rank, {"leave": False, "disable": True})]
    assert torch.initial_seed() == 7 + rank


@pytest.fixture
def run_alone(monkeypatch, tmp_path):
    """Run a script in this process, as the only rank; returns what each forward() computed.

    That is: the class of the module, whether it was training, and the type of its result.
    """
    class Compiled(torch.nn.Sequential):
        """In place of torch.compile, which takes long."""

    def run(folder, *options):
        path, port = ROOT / folder / "train.py", free_port()
        options = [*options, "--output", tmp_path / "mnist.pt", "--data-dir", DIGITS]
        if folder.startswith("02"):
            options += ["--nprocs", 1]
        elif folder.startswith("03"):
            options += ["--gpus", 1, "--master-port", port]
        launch = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        parse(monkeypatch, path, *options, MASTER_PORT=port, **launch)
        script = load_script(path)
        few = [torch.utils.data.Subset(part, range(100)) for part in script.load_mnist(DIGITS)]
        monkeypatch.setattr(script, "load_mnist", lambda root: few)
        monkeypatch.setattr("torch.multiprocessing.spawn", lambda run, args, _: run(0, *args))
        run_main(script)
        return seen

    seen = []
    monkeypatch.setattr("os.environ", os.environ.copy())  # what 02 and 03 set there
    monkeypatch.setattr("torch.compile", Compiled)
    with torch.nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: seen.append(
                (type(module).__name__, module.training, output.dtype))):
        yield run


@pytest.mark.parametrize("folder", FOLDERS[:4])
def test_amp_and_compile_are_for_the_training_alone(folder, run_alone):
    for options, of_training in (([], torch.float32), (["--amp", "--compile"], torch.bfloat16)):
        seen = run_alone(folder, *options)
        types = {(training, dtype) for name, training, dtype in seen if name == "Conv2d"}
        assert types == {(True, of_training), (False, torch.float32)}
        names = [name for name, *_ in seen]
        assert names.count("CrossEntropyLoss") == 2
        assert names.count("Compiled") == (2 if options else 0)
        assert names.count("DistributedDataParallel") == (0 if folder.startswith("01") else 2)
        seen.clear()
    if not folder.startswith("01"):
        with pytest.raises(ValueError, match="^SyncBatchNorm "):  # for GPUs only
            run_alone(folder, "--sync-bn")


@pytest.mark.parametrize(("given", "threads"), [({}, "3"), ({"OMP_NUM_THREADS": "7"}, "7")])
@pytest.mark.parametrize(("folder", "option"), [(FOLDERS[1], "--nprocs"), (FOLDERS[2], "--gpus")])
def test_spawned_processes_share_the_cores(folder, option, given, threads, monkeypatch):
    """And each knows its number, and ends with its parent: 14 cores, 4 processes."""

    def spawn(run, args, nprocs):
        assert (nprocs, os.environ["OMP_NUM_THREADS"]) == (4, threads)
        run(2, *args)

    monkeypatch.setattr("os.environ", os.environ.copy())
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    path = ROOT / folder / "train.py"
    default = vars(parse(monkeypatch, path, gpus=5))[option.removeprefix("--")]
    assert default in (5, [5])  # one per GPU
    parse(monkeypatch, path, option, 4, gpus=5, **given)  # main() will read the same options
    script, ranks = load_script(path), []
    assert signal.signal(signal.SIGINT, handler) == signal.SIG_DFL
    monkeypatch.setattr(script, "train", lambda rank, *_: ranks.append(os.environ["LOCAL_RANK"]))
    monkeypatch.setattr("torch.get_num_threads", lambda: 14)
    monkeypatch.setattr("torch.distributed.TCPStore", mock.Mock())
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: ranks.append("end"))
    monkeypatch.setattr("torch.multiprocessing.spawn", spawn)
    script.main()
    assert ranks == ["2", "end"]
