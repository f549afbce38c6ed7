"""What communication costs: 04 on two hosts over slow links, and what grows with the processes.

    python tests/benchmark.py --network

The hosts are network namespaces of this machine (slow/hosts.py), with one process and one thread
each. A token bucket at both ends limits the rate of the link, and with a delay every packet passes
through a program that holds it back: netem, which does this as well, is not in every kernel. It
needs root and iproute2.
"""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn
from helpers.commands import Running, free_port, run
from helpers.paths import DIGITS, ROOT
from helpers.scripts import load_script
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(ROOT / "tests/slow"))
from hosts import ADDRESSES, PATH, Hosts

from common.model import ConvNet

SCRIPT = ROOT / "04_ddp_torchrun/train.py"
WITH_CHECKPOINTS = ROOT / "06_checkpointing/train.py"
GRADIENTS = sum(parameter.numel() for parameter in ConvNet().parameters())
BATCH = 64
LINKS = {  # name: Gbit/s, seconds of delay in each direction
    "10 Gbit/s": (10, 0),
    "1 Gbit/s": (1, 0),
    "100 Mbit/s": (0.1, 0),
    "100 Mbit/s, 10 ms": (0.1, 0.01),
}
WAYS = {  # name: script, options, bytes per gradient, micro-batches per all-reduce
    "as it is": (SCRIPT, [], 4, 1),
    "06, `--accumulate 8`": (WITH_CHECKPOINTS, ["--accumulate", 8], 4, 8),
    "gradients in float16": (__file__, [], 2, 1),
}
# Joins the hosts by a device whose packets it passes on when they are old enough
DELAY_LINE = """
import collections, fcntl, os, select, struct, subprocess, sys, time
devices, queue, delay = [], collections.deque(), float(sys.argv[1])
for number in (0, 1):
    devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
    name, flags, TUNSETIFF = f"tun{number}", 0x1001, 0x400454CA  # IFF_TUN | IFF_NO_PI
    fcntl.ioctl(devices[-1], TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    on_host = f"ip -n h{number}"
    for command in (
        f"ip link set {name} netns h{number}",
        f"{on_host} link set {name} name slow0 mtu 9000",
        f"{on_host} addr add 10.79.0.{number + 1}/24 dev slow0",
        f"{on_host} link set slow0 up txqueuelen 1000",
    ):
        subprocess.run(command.split(), check=True)
print("ready", flush=True)
while True:
    wait = max(0, queue[0][0] - time.monotonic()) if queue else None
    for device in select.select(devices, [], [], wait)[0]:
        queue.append((time.monotonic() + delay, device, os.read(device, 65536)))
    while queue and queue[0][0] <= time.monotonic():
        _, device, packet = queue.popleft()
        os.write(devices[1 - devices.index(device)], packet)
"""


def all_reduce_seconds(gradients, ranks, gbit_per_second, latency=0, bytes_per_gradient=4):
    """The time of an all-reduce in a ring: each rank sends 2 (n - 1) messages of 1/n of the bytes.

    The same function is in 04's README. P. Patarasuk and X. Yuan, Bandwidth Optimal All-reduce
    Algorithms for Clusters of Workstations, J. Parallel and Distributed Computing 69 (2009).
    """
    messages = 2 * (ranks - 1)
    gbits = 8e-9 * bytes_per_gradient * gradients / ranks
    return messages * (gbits / gbit_per_second + latency)


class Link:
    """The two hosts, joined by a link of this rate, in Gbit/s, and delay, in seconds."""

    def __init__(self, hosts, rate, delay):
        self.hosts = hosts
        self.device, self.address = ("slow0", "10.79.0.1") if delay else ("eth0", ADDRESSES["h0"])
        if delay:
            command = [*hosts.enter, sys.executable, "-c", DELAY_LINE, str(delay)]
            pipe = {"stdout": subprocess.PIPE, "text": True}
            line = subprocess.Popen(command, env={**os.environ, "PATH": PATH}, **pipe)
            assert line.stdout.readline() == "ready\n"
        burst = max(16, 64 * rate)  # kilobytes: small, or messages pass without waiting
        bucket = f"rate {1000 * rate:.0f}mbit burst {burst:.0f}kb latency 100ms"
        limit = f"tc qdisc replace dev {self.device} root tbf {bucket}"
        for host in ("h0", "h1"):
            command = hosts.on(host, hosts.folder, *limit.split())
            subprocess.run(command, check=True, env={**os.environ, "PATH": PATH})

    def images_per_second(self, script, options, together=True):
        """The speed of both hosts in the second epoch: of one job, or of one job on each."""
        options = ["--data-dir", DIGITS, "--epochs", 2, "--batch-size", BATCH, *options]
        nodes = []
        port = free_port()
        for rank in (0, 1):
            launch = ["--nproc-per-node=1", f"--nnodes={2 if together else 1}"]
            launch += [f"--node-rank={rank if together else 0}", f"--master-port={port}"]
            launch += [f"--master-addr={self.address if together else '127.0.0.1'}"]
            place = Path(tempfile.mkdtemp(dir=self.hosts.folder))
            command = self.hosts.on(f"h{rank}", place, "torchrun", *launch, script, *options)
            settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.device}
            nodes.append(Running(command, place, **settings))
        results = [node.finish() for node in nodes]
        assert [result.code for result in results] == [0, 0], results
        return sum(float(result.epochs()[-1]["speed"]) for result in results if result.epochs())


def measure_links(rounds):
    print("| link | 04 | images/s | communication, % of the time | predicted |")
    print("| --- | --- | ---: | ---: | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        for name, (rate, delay) in LINKS.items():
            link = Link(hosts, rate, delay)
            for way, (script, options, size, micro_batches) in WAYS.items():
                pairs = []
                for _ in range(rounds):
                    alone = SCRIPT if script == __file__ else script
                    apart = link.images_per_second(alone, options, together=False)
                    pairs.append((apart, link.images_per_second(script, options)))
                share = statistics.median(1 - joined / apart for apart, joined in pairs)
                apart, speed = [statistics.median(each) for each in zip(*pairs, strict=True)]
                computing = 2 * BATCH * micro_batches / apart  # seconds of an optimizer step
                waiting = all_reduce_seconds(GRADIENTS, 2, rate, delay, size)
                predicted = waiting / (computing + waiting)
                cells = [name, way, f"{speed:,.0f}", f"{share:.0%}", f"{predicted:.0%}"]
                print(f"| {' | '.join(cells)} |", flush=True)
        hosts.end()  # with all that runs in them


def train_compressed():
    """04, with DDP's own hook that sends the gradients in half as many bytes."""
    script = load_script(SCRIPT)
    wrap = script.DDP

    def wrap_and_compress(*args, **kwargs):
        model = wrap(*args, **kwargs)
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    script.DDP = wrap_and_compress
    script.main()  # which also destroys the process group


# What grows with the number of processes, here all on one machine


def measure_costs(checkpoint):
    """Called on all ranks; rank 0 prints one row, in milliseconds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    joined = time.time()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    script = load_script(WITH_CHECKPOINTS)
    state = torch.nn.Linear(2 * GRADIENTS, 1)  # as large as the network and its momentum

    def median_of(function, times=5):
        seconds = []
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            function()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        return 1000 * statistics.median(seconds)

    def new_group():
        group = dist.new_group(backend="gloo")
        dist.barrier(group)  # no rank may leave it while others still connect
        dist.destroy_process_group(group)

    def gather_objects():
        dist.all_gather_object([None] * ranks, ("MNIST", "host", ""))

    def save():
        if rank == 0:
            assert script.save_checkpoint(checkpoint, {}, {"model": state}, {})

    sampler = DistributedSampler(range(60_000))
    figures = {
        "start": 1000 * (joined - float(os.environ["STARTED"])),
        "barrier": median_of(lambda: None),
        "group": median_of(new_group),
        "objects": median_of(gather_objects),
        "gradients": median_of(lambda: dist.all_reduce(torch.zeros(GRADIENTS))),
        "indices": median_of(lambda: list(sampler)),
        "checkpoint": median_of(save),
    }
    if rank == 0:
        print("|", ranks, "|", " | ".join(f"{each:,.1f}" for each in figures.values()), "|")
    gc.collect()
    dist.destroy_process_group()


def measure_processes():
    print("| processes | start | barrier | new group | all_gather_object | all-reduce of the "
          "gradients | sampler's list | checkpoint |")
    print("| ---: " * 8 + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4, 8, 16, 32):
            launch = ["torchrun", "--standalone", f"--nproc-per-node={ranks}"]
            command = [*launch, __file__, "--costs", f"{folder}/checkpoint.pt"]
            result = run(command, folder, OMP_NUM_THREADS="1", STARTED=str(time.time()))
            assert result.code == 0, result
            print(result.output, end="", flush=True)


def main():
    """What torchrun starts here: 04 that compresses, or the costs."""
    if sys.argv[1:2] == ["--costs"]:
        measure_costs(Path(sys.argv[2]))
    else:
        train_compressed()


if __name__ == "__main__":
    main()
