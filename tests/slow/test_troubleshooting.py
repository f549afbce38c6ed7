"""README's troubleshooting table: each row is reproduced here or by another test, or by none."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT, run, run_ranks, torchrun

ELSEWHERE = {  # the first words of a symptom: the test that reproduces it
    "the start hangs, then fails": "slow/test_hosts.py::test_nodes_that_cannot_connect",
    "`address already in use`": "slow/test_hosts.py::test_nodes_that_cannot_connect",
    "`Temporary failure": "slow/test_hosts.py::test_nodes_that_cannot_connect",
    "Gloo: `connectFullMesh":
        "slow/test_hosts.py::test_selftest_where_host_names_resolve_to_loopback",
    "`invalid device ordinal`":
        "test_04_ddp_torchrun.py::test_needs_torchrun_and_a_gpu_per_process",
    "the accuracy differs":
        "test_common.py::test_gather_and_exact_evaluation_on_1_2_3_and_7_processes",
    "`operator torchvision::nms":
        "test_common.py::test_torchvision_imports_whatever_build_of_torch_there_is",
}
NOWHERE = {  # why a row is not reproduced
    "a node waits for over 60 s": "takes minutes",
    "after a cut link": "takes over ten minutes",
    "every process uses memory of GPU 0": "needs GPUs",
    "out of memory on GPU 0": "needs GPUs",
    "only some of a node's GPUs": "needs GPUs",
    "`--compile` on the CPU": "needs a virtual environment in such a path",
}
START = """
import gc, torch, torch.distributed as dist
import torch.distributed.nn
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
# The others: number of processes, settings, a program that shows the symptom and then, where there
# is one, that the fix helps, and the pattern of its output.
HERE = {
    "a collective times out": (2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, START + """
try:
    dist.all_reduce(torch.ones(1)) if rank else dist.broadcast(torch.ones(1), 0)
except RuntimeError as error:
    print(error)
""", r"mismatch between collectives on ranks"),
    "a hang at the end of an epoch": (2, {}, START + """
from datetime import timedelta
from torch.utils.data import DistributedSampler
print("shards", {len(DistributedSampler(range(7), num_replicas=2, rank=r)) for r in (0, 1)})
dist.barrier()
group = dist.new_group(timeout=timedelta(seconds=5))
try:
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=group)
except RuntimeError as error:
    print(error)
dist.barrier()
""", r"(?s)shards \{4\}.*Timed out"),
    "`Expected to have finished": (2, {}, START + """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    def forward(self, images):
        return self.used(images)
def two_steps(**options):
    net = torch.nn.parallel.DistributedDataParallel(Net(), **options)
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
try:
    two_steps()
except RuntimeError as error:
    print(error)
two_steps(find_unused_parameters=True)
print("cured")
gc.collect()
dist.destroy_process_group()
""", r"(?s)Expected to have finished reduction in the prior iteration.*cured"),
    "gradients take twice": (1, {}, START + """
def gradients_in_buckets(**options):
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 9), **options)
    for _ in range(3):
        net(torch.ones(1, 9)).sum().backward()
    return len({parameter.grad.untyped_storage().data_ptr() for parameter in net.parameters()}) == 1
print("in buckets:", gradients_in_buckets(), gradients_in_buckets(gradient_as_bucket_view=True))
gc.collect()
dist.destroy_process_group()
""", r"in buckets: False True"),
    "other losses than last time": (0, {}, """
import torch
torch.manual_seed(0); one = torch.rand(1)
torch.manual_seed(1); other = torch.rand(1)
torch.manual_seed(0); again = torch.rand(1)
print((one == other).item(), (one == again).item())
""", r"False True"),
    "the same order of images": (0, {}, """
from torch.utils.data import DistributedSampler
sampler = DistributedSampler(range(100), num_replicas=2, rank=0)
first, second = list(sampler), list(sampler)
sampler.set_epoch(1)
print(first == second, first == list(sampler))
""", r"True False"),
    "names in the saved file": (1, {}, START + """
net = torch.nn.Linear(2, 1)
for model in (torch.nn.parallel.DistributedDataParallel(net), torch.compile(net), net):
    print(next(iter(model.state_dict())))
gc.collect()
dist.destroy_process_group()
""", r"^module\.weight\n_orig_mod\.weight\nweight$"),
    "`SyncBatchNorm expected": (2, {}, START + """
net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm2d(1)))
try:
    net(torch.ones(2, 1, 2, 2))
except ValueError as error:
    print(error)
dist.destroy_process_group()
""", r"SyncBatchNorm expected input tensor to be on"),
    "slower with more processes": (2, {}, """
import os
print("threads", os.environ["OMP_NUM_THREADS"])
""", r"(?s)threads 1"),
    "`terminate called": (2, {"OMP_NUM_THREADS": "1"}, START + """
import os
from pathlib import Path
def train():
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 9))(torch.ones(1, 9))
def gloo_threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
gc.disable()
train()
if rank == 0:
    gc.collect()
dist.destroy_process_group()
print(f"threads are left on rank {rank}: {gloo_threads() > 0}\\n", end="", flush=True)
os._exit(0)
""", r"(?s)(?=.*rank 0: False)(?=.*rank 1: True)"),
    "`DataLoader worker": (0, {}, """
import os, signal, time, torch
from torch.utils.data import DataLoader
class SecondIsSlow(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        time.sleep(5 * index)
        return index
def terminate_worker(init):
    loader = iter(DataLoader(SecondIsSlow(), 1, num_workers=1, worker_init_fn=init))
    next(loader)
    os.kill(loader._workers[0].pid, signal.SIGTERM)
    try:
        return len(list(loader))
    except RuntimeError as error:
        return error
print(terminate_worker(None))
print("cured:", terminate_worker(lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)))
""", r"(?s)DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly).*cured: 1"),
}
SHARED_MEMORY = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    print("batches", len(list(DataLoader(torch.ones(8, 2**20), 1, num_workers=1))))
"""


def test_each_row_is_accounted_for():
    table = (ROOT / "README.md").read_text().split("\n## Troubleshooting\n")[1].split("\n## ")[0]
    symptoms = re.findall(r"^\| (?!symptom|---)(.*?) \|", table, re.M)
    rows = [*ELSEWHERE, *NOWHERE, *HERE, "in a container"]
    for symptom in symptoms:
        assert sum(symptom.startswith(row) for row in rows) == 1, symptom
    assert len(symptoms) == len(rows)
    for test in ELSEWHERE.values():
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), test


@pytest.mark.parametrize("row", HERE)
def test_is_seen_here(row, tmp_path):
    processes, settings, program, pattern = HERE[row]
    script = tmp_path / "program.py"
    script.write_text(program)
    if row.startswith("slower"):  # without the helper, which sets OMP_NUM_THREADS
        result = run(["torchrun", "--standalone", "--nproc-per-node=2", script], tmp_path)
        symptom = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
        assert symptom in result.errors, result
    elif settings:  # for processes that import torch
        result = torchrun(script, processes, cwd=tmp_path, **settings)
    elif processes:
        result = run_ranks(script, processes, cwd=tmp_path)
    else:
        result = run([sys.executable, script], tmp_path)
    assert re.search(pattern, result.output), result


def test_too_little_shared_memory_and_enough(tmp_path):
    """A container's /dev/shm, which a mount namespace stands in for."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("no mount namespaces on this machine")
    script = tmp_path / "program.py"
    script.write_text(SHARED_MEMORY)
    for mebibytes, right in ((1, False), (512, True)):
        mount = f'mount -t tmpfs -o size={mebibytes}m none /dev/shm && exec "$0" program.py'
        result = run(["unshare", "--mount", "sh", "-c", mount, sys.executable], tmp_path)
        if right:
            assert result.output == "batches 8\n", result
        else:
            symptom = "Bus error|unable to (open|allocate) shared memory"
            assert result.code != 0 and re.search(symptom, result.errors), result
