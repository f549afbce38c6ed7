"""Time 04 against a plain DDP recipe, and two processes against one.

    python tests/benchmark.py --data-dir data

The recipe reads single samples through a default DataLoader, keeps contiguous tensors, uses Adam at
1e-3 and gathers every batch at evaluation. Both sides run in turns, and the table has the medians.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # at the top: a later import keeps the process group until the exit
from helpers import ROOT, module, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

all_gather = module(ROOT / "common/gather.py").all_gather
CUDA = torch.cuda.is_available()
PROCESSES = torch.cuda.device_count() if CUDA else 2
BATCH = 128  # images per process and step, where both sides use the same
GOAL = 0.99  # accuracy on the test set


def train_recipe(epochs, amp):
    """Train until the test accuracy reaches GOAL; print epoch lines as 04 does."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=device if CUDA else None)
    torch.manual_seed(0)
    train_set, test_set = [MNIST("data", train, ToTensor()) for train in (True, False)]
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, BATCH, sampler=train_sampler)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, BATCH, sampler=test_sampler)
    net = module(ROOT / "common/model.py").ConvNet().to(device)
    model, criterion = DDP(net), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(1, epochs + 1):
        train_sampler.set_epoch(epoch)
        start, total, right = time.perf_counter(), 0, []
        net.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = criterion(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        net.eval()
        for images, labels in test_loader:
            with torch.no_grad():
                right.append(all_gather(net(images.to(device)).argmax(1) == labels.to(device)))
        accuracy = torch.cat(right, 1).double().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}/{epochs}  loss {total / len(train_loader):.4f}  "
                  f"accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{train_sampler.total_size / seconds:.0f} images/s", flush=True)
        if accuracy >= GOAL:
            break
    dist.destroy_process_group()


def measure(folder, command, **settings):
    """Run a command to its end; returns its images/s, the median of its epochs, and its seconds."""
    start = time.perf_counter()
    result = run(command, folder, 900, **settings)
    seconds = time.perf_counter() - start
    assert result.code == 0, result
    print(result.output, file=sys.stderr)
    return statistics.median(float(line["speed"]) for line in result.epochs()), seconds


def one_round(folder):
    """Yield what is measured, 04's figure, the other one, and how many times 04 is better."""

    def ours(*options, **settings):
        return measure(folder, ["bash", ROOT / "04_ddp_torchrun/run.sh", *options], **settings)

    def recipe(*options):
        launch = ["torchrun", "--standalone", f"--nproc-per-node={PROCESSES}", __file__]
        threads = max(1, os.cpu_count() // PROCESSES)
        return measure(folder, [*launch, *options], OMP_NUM_THREADS=threads)

    (speed, seconds), mine = recipe(15), ours()[1]  # it ends at GOAL; 04 has that after one epoch
    yield f"seconds to {GOAL:.1%}, start and end included | recipe", mine, seconds, seconds / mine
    what = f"images/s, batch size {BATCH}"
    for amp in ((), ("--amp",)):
        mine = ours(f"--batch-size={BATCH}", "--epochs=2", *amp)[0]
        other = recipe(2, *amp)[0] if amp else speed
        yield f"{' '.join([what, *amp])} | recipe", mine, other, mine / other
    mine, other = [ours(NPROC=n, OMP_NUM_THREADS=1)[0] * PROCESSES / n for n in (PROCESSES, 1)]
    what = f"images/s of {PROCESSES} processes, one thread each | {PROCESSES} × one process"
    yield what, mine, other, mine / other


def main():
    if "LOCAL_RANK" in os.environ:  # torchrun has started it
        return train_recipe(int(sys.argv[1]), "--amp" in sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data-dir", type=Path, default="data", help="MNIST directory")
    add("--rounds", type=int, default=3, help="how often everything is timed")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data").symlink_to(args.data_dir.resolve())
        for _ in range(args.rounds):
            for what, *figures in one_round(folder):
                print(what, *figures, file=sys.stderr)
                results.setdefault(what, []).append(figures)
    machine = torch.cuda.get_device_name() if CUDA else f"{os.cpu_count()} CPU cores"
    print(f"{machine}, torch {torch.__version__}; medians of {args.rounds} rounds:\n")
    print("| | compared with | 04 | the other | times better |\n| --- | --- | ---: | ---: | ---: |")
    for what, rows in results.items():
        ours, other, ratio = map(statistics.median, zip(*rows, strict=True))
        print(f"| {what} | {ours:.4g} | {other:.4g} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
