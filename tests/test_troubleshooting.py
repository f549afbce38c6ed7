"""The rows of README's troubleshooting table: reproduced here, or by a test that is named, or why by none."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT, run, torchrun

ELSEWHERE = {  # the first words of a row's symptom: the test that reproduces it
    "the start hangs": "test_hosts.py::test_nodes_that_never_meet",
    "`address already in use`": "test_hosts.py::test_nodes_that_never_meet",
    "`Temporary failure": "test_hosts.py::test_nodes_that_never_meet",
    "Gloo: `connectFullMesh": "test_hosts.py::test_selftest_names_both_hosts_and_gloo_takes_the_interface_it_is_told",
    "`invalid device ordinal`": "test_04_ddp_torchrun.py::test_more_processes_than_gpus",
    "only some of a node's GPUs": "test_shell.py::test_two_nodes_here_share_the_gpus",
    "the accuracy differs": "test_common.py::test_gather_and_exact_evaluation_on_1_2_3_and_7_processes",
    "`terminate called": "test_04_ddp_torchrun.py::test_no_thread_of_the_group_lives_on_at_the_exit",
    "`operator torchvision::nms": "test_common.py::test_torchvision_imports_beside_this_torch",
}
NOWHERE = {  # the same: why it is not reproduced
    "a long silence": "takes as long as a firewall's limit for idle connections",
    "every process uses memory of GPU 0": "needs GPUs",
    "out of memory on GPU 0": "needs GPUs",
    "`--compile` on the CPU": "needs an environment in such a path",
}
TWO_RANKS = """
import datetime, torch, torch.distributed as dist
import torch.distributed.nn
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
rank = dist.get_rank()
"""
# The same for the rest: processes, settings, the program, and the pattern that its output has. The programs show the
# symptom first, and then that the fix cures it.
HERE = {
    "a collective times out": (2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, TWO_RANKS + """
try:
    dist.all_reduce(torch.ones(1)) if rank else dist.broadcast(torch.ones(1), 0)
except RuntimeError as error:
    print(error)
""", r"mismatch between collectives on ranks"),
    "a hang at the end of an epoch": (2, {}, TWO_RANKS + """
from torch.utils.data import DistributedSampler
print("shards", sorted({len(DistributedSampler(range(7), num_replicas=2, rank=rank)) for rank in (0, 1)}))
try:
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        import time; time.sleep(5)
except RuntimeError as error:
    print(error)
""", r"(?s)shards \[4\].*Timed out|shards \[4\].*timeout"),
    "`Expected to have finished": (2, {}, TWO_RANKS + """
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
import gc; gc.collect()
dist.destroy_process_group()
""", r"(?s)Expected to have finished reduction in the prior iteration.*cured"),
    "gradients take twice": (1, {}, TWO_RANKS + """
def gradients_in_buckets(**options):
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 9), **options)
    for _ in range(3):
        net(torch.ones(1, 9)).sum().backward()
    return len({parameter.grad.untyped_storage().data_ptr() for parameter in net.parameters()}) == 1
print("in buckets:", gradients_in_buckets(), gradients_in_buckets(gradient_as_bucket_view=True))
import gc; gc.collect()
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
    "names in the saved file": (1, {}, TWO_RANKS + """
net = torch.nn.Linear(2, 1)
for model in (torch.nn.parallel.DistributedDataParallel(net), torch.compile(net), net):
    print(next(iter(model.state_dict())))
import gc; gc.collect()
dist.destroy_process_group()
""", r"^module\.weight\n_orig_mod\.weight\nweight$"),
    "`SyncBatchNorm expected": (2, {}, TWO_RANKS + """
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
    "`DataLoader worker": (0, {}, """
import os, signal, torch
from torch.utils.data import DataLoader
def terminated(init):
    loader = iter(DataLoader(range(1000), 2, num_workers=1, worker_init_fn=init))
    next(loader)
    os.kill(loader._workers[0].pid, signal.SIGTERM)
    try:
        return len(list(loader))
    except RuntimeError as error:
        return error
print(terminated(None))
print("cured:", terminated(lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)))
""", r"(?s)DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly).*cured: 499"),
}
SHARED_MEMORY = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    print("batches", len(list(DataLoader(torch.ones(8, 2**20), 1, num_workers=1))))
"""


def test_each_row_is_accounted_for():
    table = (ROOT / "README.md").read_text().split("\n## Troubleshooting\n")[1].split("\n## ")[0]
    symptoms = re.findall(r"^\| (.*?) \|", table, re.M)[2:]
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
        assert "Setting OMP_NUM_THREADS environment variable for each process to be 1" in result.errors, result
    elif processes:
        result = torchrun(script, processes, cwd=tmp_path, **settings)
    else:
        result = run([sys.executable, script], tmp_path, **settings)
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
            assert result.code and re.search("Bus error|unable to (open|allocate) shared memory", result.errors), result
