"""The troubleshooting tables: each row is reproduced here or by another test, or by none."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.commands import bare_tools, free_port, new_namespace, run, torchrun
from helpers.paths import ROOT
from test_common import in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

# What two ranks of a process group do: each shows a symptom and, where there is one, its cure


def the_ranks_disagree_on_the_collective(rank):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # which a new process does by itself
    group = dist.new_group()
    with pytest.raises(RuntimeError, match="mismatch between collectives on ranks"):
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        else:
            dist.broadcast(torch.ones(1), 0, group=group)


def a_collective_of_one_rank(rank):
    shards = [DistributedSampler(range(7), num_replicas=2, rank=each) for each in (0, 1)]
    assert [len(shard) for shard in shards] == [4, 4]
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def take_steps(net, **options):
    model = DDP(net, **options)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()


def parameters_without_a_part_in_the_loss(rank):
    net = nn.Linear(2, 1)
    net.unused = nn.Linear(2, 1)
    symptom = "Expected to have finished reduction in the prior iteration"
    with pytest.raises(RuntimeError, match=symptom):
        take_steps(net)
    take_steps(net, find_unused_parameters=True)


class Checkpointed(nn.Linear):
    def forward(self, inputs, use_reentrant):
        return checkpoint(super().forward, inputs, use_reentrant=use_reentrant)


def activation_checkpointing(rank):
    def step(use_reentrant):
        model = DDP(Checkpointed(2, 2), find_unused_parameters=True)
        model(torch.ones(1, 2, requires_grad=True), use_reentrant).sum().backward()

    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
        step(True)
    step(False)


def a_sampler_and_shuffle(rank):
    options = {"sampler": DistributedSampler(range(4))}
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(range(4), shuffle=True, **options)
    assert len(DataLoader(range(4), **options)) == 2


def gradients_are_copies_of_buckets(rank):
    def storages(**options):
        net = nn.Linear(2, 1)
        take_steps(net, **options)
        return len({parameter.grad.untyped_storage().data_ptr() for parameter in net.parameters()})

    assert (storages(), storages(gradient_as_bucket_view=True)) == (2, 1)


def sync_batch_norm_on_the_cpu(rank):
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(1)))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DDP(net)


def slowly(batch):
    time.sleep(2 * batch[0])
    return batch


def a_worker_gets_sigterm(rank):
    def rest(init):
        options = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": slowly}
        loader = iter(DataLoader([0, 1], 1, worker_init_fn=init, **options))
        next(loader)
        os.kill(loader._workers[0].pid, signal.SIGTERM)
        return len(list(loader))

    symptom = r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)"
    with pytest.raises(RuntimeError, match=symptom):
        rest(None)
    assert rest(lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)) == 1


HERE = {  # the first words of a symptom: what shows it
    "`SyncBatchNorm layers": sync_batch_norm_on_the_cpu,
    "a collective times out": the_ranks_disagree_on_the_collective,
    "a hang at the end of an epoch": a_collective_of_one_rank,
    "`Expected to have finished": parameters_without_a_part_in_the_loss,
    "`Expected to mark": activation_checkpointing,
    "`sampler option": a_sampler_and_shuffle,
    "gradients take twice": gradients_are_copies_of_buckets,
    "`DataLoader worker": a_worker_gets_sigterm,
}
ELSEWHERE = {  # the test that shows it
    "`KeyError: 'RANK'`": "slow/test_troubleshooting.py::test_without_a_launcher",
    "`error: unrecognized arguments`": "slow/test_troubleshooting.py::test_wrong_options",
    "`batch_size should be": "slow/test_troubleshooting.py::test_wrong_options",
    "`No module named 'torch'`": "slow/test_troubleshooting.py::test_run_sh_without",
    "`NODE_RANK: unbound": "slow/test_troubleshooting.py::test_run_sh_without",
    "the start hangs, then fails": "slow/test_hosts.py::test_nodes_that_cannot_connect",
    "`address already in use`": "slow/test_hosts.py::test_nodes_that_cannot_connect",
    "`Temporary failure": "slow/test_hosts.py::test_nodes_that_cannot_connect",
    "`Cuda is not available`": "slow/test_troubleshooting.py::test_torchrun_ends_with",
    "c10d: `RendezvousConnectionError`": "slow/test_troubleshooting.py::test_torchrun_ends_with",
    "c10d: `network addresses":
        "slow/test_hosts.py::test_c10d_where_each_host_knows_only_its_own_name",
    "Gloo: `connectFullMesh":
        "slow/test_hosts.py::test_selftest",
    "`MNIST is not in data":
        "test_common.py::test_when_one_node_has_no_mnist_all_ranks_train_on_the_digits",
    "a job prints nothing": "test_04_ddp_torchrun.py::test_sigusr1_prints_where_every_rank_is",
    "`ValueError: ... samples":
        "test_common.py::test_gather_and_exact_evaluation_on_1_2_3_and_7_processes",
    "`terminate called":
        "slow/test_exits.py::test_no_thread_of_the_process_group_is_left_at_the_exit",
    "the accuracy differs":
        "test_common.py::test_gather_and_exact_evaluation_on_1_2_3_and_7_processes",
    "other losses than last time":
        "test_04_ddp_torchrun.py::test_two_ranks_take_the_steps_of_one_with_the_whole_batch",
    "the same order of images": "test_04_ddp_torchrun.py::test_epochs_are_shuffled_differently",
    "names in the saved file":
        "slow/test_exits.py::test_a_compiled_model_is_saved_with_the_plain_names",
    "exit code −9": "slow/test_troubleshooting.py::test_the_report_of_torchrun",
    "torchrun's report": "slow/test_troubleshooting.py::test_the_report_of_torchrun",
    "slower with more processes": "slow/test_troubleshooting.py::test_torchrun_sets_one_thread",
}
NOWHERE = {  # why a row is not reproduced
    "a node waits for over 60 s": "takes minutes",
    "`invalid device ordinal`": "needs GPUs",
    "every process uses memory of GPU 0": "needs GPUs",
    "out of memory on GPU 0": "needs GPUs",
    "it trains on the CPU although": "needs a GPU with an old driver",
    "only some of a node's GPUs": "needs GPUs",
    "`operator torchvision::nms": "needs builds that do not match",
    "`--compile` on the CPU": "needs a virtual environment in such a path",
    "`(errno: 97": "needs a machine without IPv6",
    "a notebook": "needs a notebook",
    "NCCL: `unhandled": "needs GPUs",
    "self-test: the checks": "needs GPUs",
    "a hang at the first": "needs GPUs",
    "slow between machines": "needs InfiniBand",
    "GPU memory is in use": "needs GPUs",
    "`--amp` is slower": "needs an old GPU",
    "a few % slower": "needs an idle machine",
}


def test_each_row_is_accounted_for():
    main, of_04 = ((ROOT / name / "README.md").read_text() for name in (".", "04_ddp_torchrun"))
    tables = main.split("\n## Troubleshooting\n")[1].split("\n## ")[0]
    for section in ("### If the nodes do not connect", "## Find a hang"):
        tables += of_04.split(f"\n{section}\n")[1].split("\n## ")[0]
    symptoms = re.findall(r"^\| (?!symptom|---)(.*?) \|", tables, re.M)
    rows = [*HERE, *ELSEWHERE, *NOWHERE]
    for symptom in symptoms:
        assert sum(symptom.startswith(row) for row in rows) == 1, symptom
    assert len(symptoms) == len(rows)
    for test in ELSEWHERE.values():
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), test


def in_group(rank, show, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", None, 2, rank)
    show(rank)


@pytest.mark.parametrize("row", HERE)
def test_is_seen_here(row, tmp_path):
    in_processes(in_group, 2, HERE[row], tmp_path)


def test_without_a_launcher(tmp_path):
    result = run([sys.executable, ROOT / "04_ddp_torchrun/train.py"], tmp_path)
    assert result.code == 2 and "error: start it with torchrun, as" in result.errors, result


C10D = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:PORT"]


@pytest.mark.parametrize(("options", "error"), [
    (["--nproc-per-node=gpu"], "ValueError: Cuda is not available"),
    ([*C10D, "--rdzv-conf=is_host=false,read_timeout=3"], "RendezvousConnectionError"),
    ([*C10D, "--rdzv-conf=join_timeout=3,last_call_timeout=1"], "RendezvousTimeoutError"),
])
def test_torchrun_ends_with(options, error, tmp_path):
    options = [option.replace("PORT", str(free_port())) for option in options]
    result = run(["torchrun", *options, ROOT / "04_ddp_torchrun/train.py"], tmp_path, limit=100)
    assert result.code and error in result.errors, result


@pytest.mark.parametrize(("options", "error"), [
    (["--rate", 1], "train.py: error: unrecognized arguments: --rate 1"),
    (["--batch-size", 0], "ValueError: batch_size should be a positive integer value"),
    (["--lr", -1], "ValueError: Invalid learning rate: -"),
])
def test_wrong_options(options, error, tmp_path):
    """Each process reports it, unless torchrun, whose report comes last, has ended it before."""
    options = ["--data-dir", ROOT / "common", *options]
    result = torchrun(ROOT / "04_ddp_torchrun/train.py", 2, *options, cwd=tmp_path)
    assert result.code == 1 and error in result.errors, result
    assert result.errors.rindex("ChildFailedError") > result.errors.rindex(error), result


@pytest.mark.parametrize(("folder", "tools", "settings", "error"), [
    ("01_dataparallel", {}, {}, "exec: python: not found"),
    ("01_dataparallel", {"python": f'exec "{sys.executable}" -S "$@"'}, {},
     "No module named 'torch'"),
    ("04_ddp_torchrun", {}, {}, "exec: torchrun: not found"),
    ("04_ddp_torchrun", {}, {"NNODES": "2"}, "NODE_RANK: unbound variable"),
    ("04_ddp_torchrun", {}, {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: unbound variable"),
])
def test_run_sh_without(folder, tools, settings, error, tmp_path):
    path = bare_tools(tmp_path / "tools", getconf="echo 2", **tools)
    result = run(["bash", ROOT / folder / "run.sh"], tmp_path, PATH=path, **settings)
    assert result.code and error in result.errors, result


def test_a_machine_whose_own_name_does_not_resolve(tmp_path):
    """Without --local-addr torchrun waits minutes for an address of it."""
    named = ["bash", "-c", 'hostname nowhere.invalid && exec "$@"', "_"]
    enter = [*new_namespace("uts"), *named]
    if run([*enter, "true"], tmp_path).code:
        pytest.skip("this machine does not let us change the host name of a namespace")
    for folder in ("04_ddp_torchrun", "06_checkpointing"):
        command = ["bash", ROOT / folder / "run.sh", "--data-dir", ROOT / "common"]
        result = run([*enter, *command], tmp_path, limit=100)
        assert result.code == 0 and len(result.epochs()) == 1, result


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


def test_too_little_shared_memory_and_enough(tmp_path):
    """A container's /dev/shm, which a mount namespace stands in for."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("no mount namespaces on this machine")

    def load(size):
        mount = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$0" -c "$1"'
        return run(["unshare", "--mount", "sh", "-c", mount, sys.executable, LOAD], tmp_path)

    little = load("1m")
    symptom = "Bus error|unable to (open|allocate) shared memory"
    assert little.code != 0 and re.search(symptom, little.errors), little
    enough = load("512m")
    assert enough.output == "batches 8\n", enough
