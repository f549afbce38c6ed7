"""Rows of the troubleshooting tables in README and 04, reproduced."""

import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.commands import STANDALONE, bare_tools, free_port, run, torchrun
from helpers.paths import DIGITS, ROOT
from helpers.ranks import exit_codes, start
from helpers.readmes import READMES
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

HERE = {}  # the first words of a symptom: what two ranks of a process group do to see it


def row(symptom):
    return lambda function: HERE.setdefault(symptom, function)


def take_steps(net, **options):
    model = DDP(net, **options)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()


@row("`Watchdog caught")
def the_ranks_disagree_on_the_collective(rank):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # which a new process does by itself
    group = dist.new_group()
    with pytest.raises(RuntimeError, match="mismatch between collectives on ranks"):
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        else:
            dist.broadcast(torch.ones(1), 0, group=group)


@row("a hang at the end of an epoch")
def a_collective_of_one_rank(rank):
    assert len(DistributedSampler(range(7))) == 4  # on both
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


@row("`Expected to have finished")
def parameters_without_a_part_in_the_loss(rank):
    net = nn.Linear(2, 1)
    net.unused = nn.Linear(2, 1)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iter"):
        take_steps(net)
    take_steps(net, find_unused_parameters=True)


@row("`Expected to mark")
def activation_checkpointing(rank):
    class Checkpointed(nn.Linear):
        def forward(self, inputs, reentrant):
            return checkpoint(super().forward, inputs, use_reentrant=reentrant)

    def step(reentrant):
        model = DDP(Checkpointed(2, 2), find_unused_parameters=True)
        model(torch.ones(1, 2, requires_grad=True), reentrant).sum().backward()

    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
        step(True)
    step(False)


@row("`sampler option")
def a_sampler_and_shuffle(rank):
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(range(4), shuffle=True, sampler=DistributedSampler(range(4)))


@row("gradients take twice")
def gradients_are_copies_of_buckets(rank):
    for options, buckets in (({}, 2), ({"gradient_as_bucket_view": True}, 1)):
        take_steps(net := nn.Linear(2, 1), **options)
        storages = {weight.grad.untyped_storage().data_ptr() for weight in net.parameters()}
        assert len(storages) == buckets


@row("`SyncBatchNorm layers")
def sync_batch_norm_on_the_cpu(rank):
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(1)))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DDP(net)


@row("`DistributedDataParallel is not needed when a module`")
@row("`Expected more than 1 value per channel")
def nothing_to_train_and_a_batch_of_one(rank):
    with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed when a module"):
        DDP(nn.Linear(1, 1).requires_grad_(False))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        nn.BatchNorm1d(2)(torch.ones(1, 2))


def slowly(batch):
    time.sleep(2 * batch[0])
    return batch


@row("`DataLoader worker")
def a_worker_gets_a_signal(rank):
    def rest(number, init=None):
        options = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": slowly}
        loader = iter(DataLoader([0, 1], 1, worker_init_fn=init, **options))
        next(loader)
        os.kill(loader._workers[0].pid, number)
        return len(list(loader))

    symptom = r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        with pytest.raises(RuntimeError, match=symptom):
            rest(number)
    assert rest(signal.SIGTERM, lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)) == 1


@row("`Default process group has not")
@row("`KeyError: 'RANK'`")
def no_process_group_and_no_launcher(rank):
    dist.destroy_process_group()
    for early in (dist.barrier, lambda: DDP(nn.Linear(1, 1)), lambda: DistributedSampler([1])):
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            early()
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        dist.init_process_group("gloo")


@row("`Missing key(s) in")
def the_wrapper_was_saved(rank):
    net = nn.Sequential(nn.Linear(1, 1))
    state = DDP(net).state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"0(?s:.*)Unexpected key\(s\)'):
        net.load_state_dict(state)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    net.load_state_dict(state)


@row("`Connection reset by peer`")
def another_rank_has_ended(rank):
    dist.barrier()  # until both have connected
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="Connection (closed|reset) by peer"):
        for _ in range(100):
            dist.all_reduce(torch.ones(1))


@row("`EADDRINUSE`")
def the_port_is_in_use(rank):
    with socket.create_server(("0.0.0.0", 0)) as other:
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE.*address already in use"):
            dist.TCPStore("127.0.0.1", other.getsockname()[1], is_master=True)


def in_group(rank, symptom, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", None, 2, rank)
    HERE[symptom](rank)


@pytest.mark.parametrize("symptom", HERE)
def test_is_seen_here(symptom, tmp_path):
    assert any(symptom in path.read_text() for path in READMES)
    assert exit_codes(start(in_group, [(rank, symptom, tmp_path) for rank in (0, 1)])) == [0, 0]


SCRIPT = ROOT / "04_ddp_torchrun/train.py"
C10D = ["torchrun", "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
TWO_RANKS = [*STANDALONE, "--nproc-per-node=2", SCRIPT, "--data-dir", DIGITS]


@pytest.mark.parametrize(("command", "error"), [
    ([sys.executable, SCRIPT], "error: start it with torchrun, as"),
    (["torchrun", "--nproc-per-node=gpu", SCRIPT], "ValueError: Cuda is not available"),
    ([*C10D, "--rdzv-conf=is_host=false,read_timeout=3", SCRIPT], "RendezvousConnectionError"),
    ([*C10D, "--rdzv-conf=join_timeout=3,last_call_timeout=1", SCRIPT], "RendezvousTimeoutError"),
    ([*TWO_RANKS, "--rate", 1], "train.py: error: unrecognized arguments: --rate 1"),
    ([*TWO_RANKS, "--batch-size", 0], "ValueError: batch_size should be a positive integer value"),
    ([*TWO_RANKS, "--lr", -1], "ValueError: Invalid learning rate: -"),
])
def test_a_command_ends_with(command, error, tmp_path):
    result = run(command, tmp_path)
    assert result.code and error in result.errors, result


def test_run_sh_without_torch_torchrun_or_a_rank(tmp_path):
    python = f'exec "{sys.executable}" -S "$@"'  # without its packages
    path = bare_tools(tmp_path / "tools", getconf="echo 2", python=python)
    for folder, settings, error in (
            ("01_dataparallel", {}, "No module named 'torch'"),
            ("04_ddp_torchrun", {}, "exec: torchrun: not found"),
            ("04_ddp_torchrun", {"NNODES": "2"}, "NODE_RANK: unbound variable")):
        result = run(["bash", ROOT / folder / "run.sh"], tmp_path, PATH=path, **settings)
        assert result.code and error in result.errors, result


def test_a_machine_whose_own_name_does_not_resolve(unshare, tmp_path):
    """Without --local-addr torchrun waits minutes for an address of it."""
    for folder in ("04_ddp_torchrun", "06_checkpointing"):
        named = [*unshare, "bash", "-c", 'hostname nowhere.invalid && exec "$@"', "_"]
        command = ["bash", ROOT / folder / "run.sh", "--data-dir", DIGITS]
        result = run([*named, *command], tmp_path)
        assert result.code == 0 and len(result.epochs()) == 1, result
        assert "cannot be retrieved" not in result.errors, result


FAILING = """
import os, signal, sys
from torch.distributed.elastic.multiprocessing.errors import record

def main():
    if "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("my reason")

record(main)() if "record" in sys.argv else main()
"""


def test_the_report_of_torchrun(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    plain, recorded, killed = [
        torchrun("failing.py", 1, word, cwd=tmp_path).errors.split("Root Cause")[1]
        for word in ("plain", "record", "killed")
    ]
    assert re.search(r"error_file *: <N/A>", plain) and "my reason" not in plain
    assert "ValueError: my reason" in recorded and "in main" in recorded
    assert re.search(r"exitcode *: -9 ", killed) and "Signal 9 (SIGKILL)" in killed


def test_torchrun_sets_one_thread(tmp_path):
    """Unless something is set: not by a helper, which sets it."""
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python", "printenv"]
    result = run([*command, "OMP_NUM_THREADS"], tmp_path)
    assert result.output == "1\n1\n", result
    symptom = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
    assert symptom in result.errors, result


LOAD = """
import torch
from torch.utils.data import DataLoader
print("batches", len(list(DataLoader(torch.ones(8, 2**20), 1, num_workers=1))))
"""


def test_too_little_shared_memory_and_enough(unshare, tmp_path):
    """A container's /dev/shm, which a mount namespace stands in for."""
    mount = 'mount -t tmpfs -o size=$0 none /dev/shm && exec "$1" -c "$2"'
    few, enough = [run([*unshare, "sh", "-c", mount, size, sys.executable, LOAD], tmp_path)
                   for size in ("1m", "512m")]
    assert few.code and re.search("Bus error|unable to (open|alloca)", few.errors), few
    assert enough.output == "batches 8\n", enough
