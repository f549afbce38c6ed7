"""Time 04 against the plain tutorial recipe, and against what its network, torchrun and torch cost by themselves.

    python tests/benchmark.py --data-dir data
    python tests/benchmark.py --data-dir data --rounds 5 --json benchmark.json --picture benchmark.png

In each round what is compared runs in turns, within the same minutes, as the speed of a shared machine swings. The
table has the medians over the rounds, of the ratios too. A round takes six minutes on two CPU cores.
"""

import argparse
import contextlib
import copy
import fcntl
import itertools
import json
import math
import os
import platform
import pty
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import EPOCH, ROOT, clean_environment, load_script
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

from common.data import load_mnist, torchvision_mnist
from common.model import ConvNet

SCRIPT = ROOT / "04_ddp_torchrun/train.py"
LAUNCHER = SCRIPT.with_name("run.sh")
CUDA = torch.cuda.is_available()
PROCESSES = torch.cuda.device_count() if CUDA else 2
BATCH = 128  # images per process and step, where the recipe's and 04's are equal
GOAL = 0.99  # of the test set
LIMIT = 900  # seconds for one command
STEPS = 25  # of the script's loop, and then as many of the bare one


# The recipe: what the tutorials write. It is started by torchrun, as 04 is.


class PerSample(Dataset):
    """What torchvision's MNIST with ToTensor gives, by its own code, of images that are in memory already."""

    def __init__(self, image_set):
        mnist = torchvision_mnist()
        from torchvision.transforms import ToTensor

        self.mnist = object.__new__(mnist)
        self.mnist.data, self.mnist.targets = image_set.tensors[0].squeeze(1), image_set.tensors[1]
        self.mnist.transform, self.mnist.target_transform = ToTensor(), None

    def __len__(self):
        return len(self.mnist)

    def __getitem__(self, index):
        return self.mnist[index]


def recipe(data_dir, epochs, amp, all_epochs):
    """Train with Adam on single samples, and gather every batch at evaluation; prints epoch lines as 04 does."""
    device = torch.device("cuda" if CUDA else "cpu", int(os.environ["LOCAL_RANK"]))
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)
    train_set, test_set = (PerSample(image_set) for image_set in load_mnist(data_dir))
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, BATCH, sampler=sampler)
    test_loader = DataLoader(test_set, BATCH, sampler=DistributedSampler(test_set, shuffle=False))
    net = ConvNet().to(device)
    model = DDP(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        start, total_loss = time.perf_counter(), 0
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
        loss, seconds = total_loss / len(train_loader), time.perf_counter() - start
        accuracy = recipe_evaluate(net, test_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}/{epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{sampler.total_size / seconds:.0f} images/s", flush=True)
        if accuracy >= GOAL and not all_epochs:
            break
    del model
    dist.destroy_process_group()


@torch.no_grad()
def recipe_evaluate(net, test_loader, device):
    """The accuracy, from predictions and labels that are gathered batch by batch."""
    net.eval()
    right = count = 0
    for images, labels in test_loader:
        mine = torch.stack([net(images.to(device)).argmax(1), labels.to(device)])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        for predictions, labels in parts:
            right, count = right + (predictions == labels).sum().item(), count + len(labels)
    net.train()
    return right / count


# Inside 04: its own train(), in whose loop and evaluation the other side is timed in turns with it.


def clock():
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class InTurns(tqdm):
    """The script's progress bar; after every STEPS batches it times as many steps of the same loop, but on tensors in
    memory, and with no process group, no progress and no bookkeeping."""

    times = []  # seconds of a step: of the script, of the other

    def __iter__(self):
        batches, device = super().__iter__(), torch.device("cuda" if CUDA else "cpu")
        memory = [[part.to(device) for part in batch] for batch in itertools.islice(self.iterable, STEPS)]
        model, criterion = ConvNet().to(device, memory_format=torch.channels_last), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
        scheduler = LambdaLR(optimizer, lambda step: 1)
        for turn in range(len(self.iterable) // STEPS):
            dist.barrier()
            start = clock()
            yield from itertools.islice(batches, STEPS)
            middle = clock()
            for images, labels in memory:
                loss = criterion(model(images), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if turn:  # the first one warms up
                self.times.append([(middle - start) / STEPS, (clock() - middle) / STEPS])


def inside():
    """Run 04's main() with InTurns, and with both evaluations in turns; prints what it finds as JSON."""
    script = load_script(SCRIPT)
    evaluate, speeds = script.evaluate, []

    def evaluate_in_turns(net, test_loader, device):
        test_set = PerSample(test_loader.dataset)
        plain_net = copy.deepcopy(net).to(memory_format=torch.contiguous_format)
        slow_loader = DataLoader(test_set, BATCH, sampler=DistributedSampler(test_set, shuffle=False))
        sides = (evaluate, net, test_loader), (recipe_evaluate, plain_net, slow_loader)
        for _ in range(4):
            speeds.append([])
            for function, its_net, loader in sides:
                dist.barrier()
                start = clock()
                accuracy = function(its_net, loader, device)
                speeds[-1].append(len(test_set) / (clock() - start))
        return accuracy

    script.tqdm, script.evaluate = InTurns, evaluate_in_turns
    script.main()
    if os.environ["RANK"] == "0":
        print("inside", json.dumps([medians(InTurns.times), medians(speeds[1:])]), flush=True)


# Running both, and the table.


def medians(pairs):
    return [statistics.median(side) for side in zip(*pairs, strict=True)]


class Run:
    """A command that ran on a terminal of 120 columns: what it printed and when, and its peak memory."""

    def __init__(self, command, folder, until_first_step=False, **settings):
        terminal, its_end = pty.openpty()
        fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        start, self.text, self.epochs, self.first_step = time.perf_counter(), "", [], None
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=clean_environment() | {name: str(value) for name, value in settings.items()},
            stdin=subprocess.DEVNULL,
            stdout=its_end,
            stderr=its_end,
            start_new_session=True,
        )
        os.close(its_end)
        timer = threading.Timer(LIMIT, os.killpg, [process.pid, signal.SIGKILL])
        timer.start()
        with contextlib.suppress(OSError):  # at its end
            while part := os.read(terminal, 65536):
                self.text += part.decode(errors="replace")
                now = time.perf_counter() - start
                if self.first_step is None and re.search("loss=|torch is here", self.text):
                    self.first_step = now
                    if until_first_step:
                        os.killpg(process.pid, signal.SIGTERM)
                for line in list(EPOCH.finditer(self.text))[len(self.epochs) :]:
                    self.epochs.append({name: float(value) for name, value in line.groupdict().items()} | {"at": now})
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        os.close(terminal)
        if status and not until_first_step:
            raise SystemExit(f"{command} failed:\n{self.text}")
        self.peak = usage.ru_maxrss / 1024  # MiB, of its largest process

    def time_to_goal(self):
        """Seconds from its start to the line that reports the accuracy; infinite if there is none."""
        return next((epoch["at"] for epoch in self.epochs if epoch["accuracy"] >= GOAL), math.inf)

    def speed(self):
        """Images per second of training, the median of its epochs."""
        return statistics.median(epoch["speed"] for epoch in self.epochs)

    def inside(self):
        """What inside() printed: seconds of a step, images per second of an evaluation; of 04 and the other side."""
        return json.loads(re.search(r"inside (\[.*\])", self.text)[1])


# What is measured, the other side, whether more is better. The other side is the recipe, or what nothing can beat: the
# network without what surrounds it, processes that lose nothing to each other, torch's own start.
ROWS = {
    "goal": (f"seconds to {GOAL:.1%} accuracy, start and evaluation included", "recipe", False),
    "float32": (f"images/s of training, batch size {BATCH}", "recipe", True),
    "amp": (f"images/s of training, batch size {BATCH}, `--amp`", "recipe with autocast", True),
    "evaluation": ("images/s of evaluation", "single samples, a gather a batch", True),
    "memory": ("MiB of the largest process at its peak", "recipe", False),
    "processes": (f"images/s of {PROCESSES} processes, one thread each", f"{PROCESSES} × one process", True),
    "step": (f"ms a step, {PROCESSES} processes", "tensors in memory, no group", False),
    "alone": ("ms a step, one process", "tensors in memory, no group", False),
    "start": ("seconds to the end of the first step", "torchrun and `import torch`", False),
}


def one_round(folder, curves):
    """Give a row's name, 04's figure and the other side's, one after the other; the folder's data/ has the data."""
    threads = max(1, os.cpu_count() // PROCESSES)
    memory = dict(re.findall(r"(MALLOC_\w+_)=(\d+)", LAUNCHER.read_text()))  # the recipe knows nothing of it
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={PROCESSES}"]

    def ours(*options, **settings):
        return Run(["bash", LAUNCHER, *options], folder, **settings)

    def recipe(*options):
        command = [*torchrun, __file__, "--side", "recipe", *options]
        return Run(command, folder, OMP_NUM_THREADS=threads)

    def inside(processes):
        command = [*torchrun[:2], f"--nproc-per-node={processes}", __file__, "--side", "inside", "--epochs", "1"]
        return Run(command, folder, OMP_NUM_THREADS=threads, **memory).inside()

    default, plain = ours(), recipe("--epochs", "15")
    curves.update({"o": default.epochs, "+": plain.epochs})
    yield "goal", default.time_to_goal(), plain.time_to_goal()
    yield "memory", default.peak, plain.peak
    yield "float32", ours("--batch-size", BATCH, "--epochs", 2).speed(), plain.speed()
    half = ours("--batch-size", BATCH, "--epochs", 2, "--amp")
    yield "amp", half.speed(), recipe("--epochs", "2", "--all-epochs", "--amp").speed()
    if PROCESSES > 1:
        several, one = (ours("--epochs", 1, NPROC=number, OMP_NUM_THREADS=1).speed() for number in (PROCESSES, 1))
        yield "processes", several, PROCESSES * one
    (step, other), evaluation = inside(PROCESSES)
    yield "step", 1000 * step, 1000 * other
    yield "evaluation", *evaluation
    if PROCESSES > 1:
        yield "alone", *(1000 * seconds for seconds in inside(1)[0])
    first = ours(until_first_step=True).first_step
    importing = [*torchrun, "--no-python", sys.executable, "-c", "import torch; print('torch is here', flush=True)"]
    yield "start", first, Run(importing, folder, OMP_NUM_THREADS=threads).first_step


def round_to_3(number):
    """A number to three digits, as people write it; a goal that was not reached took infinitely long."""
    return f"{float(f'{number:.3g}'):,.10g}" if math.isfinite(number) else "not reached"


def cpu():
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def chart(curves, width=90):
    """Accuracies in percent over seconds, as text: a list of epochs by the mark of its curve."""
    points = [(mark, epoch["at"], 100 * epoch["accuracy"]) for mark, epochs in curves.items() for epoch in epochs]
    scale = width / max(seconds for _, seconds, _ in points)
    lowest, highest = (round(4 * pick(percent for *_, percent in points)) for pick in (min, max))  # in quarters
    lines = []
    for quarters in range(highest, lowest - 1, -1):
        line = [" "] * (width + 1)
        for mark, seconds, percent in points:
            if round(4 * percent) == quarters:
                line[round(seconds * scale)] = mark
        lines.append(f"{quarters / 4:6.2f} % │{''.join(line).rstrip()}")
    ticks = range(0, round(width / scale) + 1, 10)
    axis = "".join("┴" if any(round(tick * scale) == place for tick in ticks) else "─" for place in range(width + 1))
    numbers = [" "] * (width + 4)
    for tick in ticks:
        place = round(tick * scale)
        numbers[place : place + len(str(tick))] = str(tick)
    return "\n".join([*lines, f"{'':9}└{axis}", f"{'':10}{''.join(numbers).rstrip()} s"])


def draw(title, rows, path):
    """The ratios as bars, with a line from the least to the most of the rounds."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(rows) + 1.5), layout="constrained")
    for place, row in enumerate(reversed(rows)):
        axes.barh(place, row["ratio"], color="tab:blue" if "recipe" in row["other"] else "tab:gray")
        axes.plot([min(row["ratios"]), max(row["ratios"])], [place, place], color="black")
    axes.set_yticks(range(len(rows)), [f"{row['what']}\nagainst: {row['other']}" for row in reversed(rows)], fontsize=7)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel("times better")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=150)


def compare(options):
    found, curves = {name: [] for name in ROWS}, {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data").symlink_to(options.data_dir.resolve())
        for number in range(1, options.rounds + 1):
            for name, *pair in one_round(folder, curves):
                found[name].append(pair)
                print(f"round {number}: {name} {pair[0]:.4g} against {pair[1]:.4g}", file=sys.stderr, flush=True)
    rows = []
    for name, (what, other, more_is_better) in ROWS.items():
        if pairs := found[name]:
            ratios = [ours / theirs if more_is_better else theirs / ours for ours, theirs in pairs]
            ours, theirs, ratio = *medians(pairs), statistics.median(ratios)
            row = {"what": what, "ours": ours, "other": other, "theirs": theirs, "ratio": ratio, "ratios": ratios}
            rows.append(row | {"pairs": pairs})
    machine = f"{PROCESSES} × {torch.cuda.get_device_name()}" if CUDA else cpu()
    title = (f"{machine}, torch {torch.__version__}, Python {platform.python_version()}; "
             f"{PROCESSES} processes, medians of {options.rounds} rounds")
    print(f"{title}:\n\n| | 04 | the other side | | times better |\n| --- | ---: | --- | ---: | ---: |")
    for row in rows:
        ours, theirs = round_to_3(row["ours"]), round_to_3(row["theirs"])
        print(f"| {row['what']} | {ours} | {row['other']} | {theirs} | {row['ratio']:.2f} |")
    print(f"\nAccuracy on the test set over seconds from the start, o: 04, +: the recipe\n\n{chart(curves)}")
    if options.json:
        options.json.write_text(json.dumps({"title": title, "rows": rows, "curves": curves}, indent=1) + "\n")
    if options.picture:
        draw(title, rows, options.picture)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of MNIST; common: the bundled digits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--picture", type=Path, help="file for the ratios as bars; needs matplotlib")
    parser.add_argument("--side", choices=("recipe", "inside"), help=argparse.SUPPRESS)  # what compare() starts
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--all-epochs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--amp", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_args()
    if options.side == "recipe":
        recipe(options.data_dir, options.epochs, options.amp, options.all_epochs)
    elif options.side == "inside":
        del sys.argv[1:3]  # the rest is 04's
        inside()
    else:
        compare(options)
