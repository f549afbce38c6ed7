"""Time 04 against a plain recipe, and what 04 costs against a bare minimum.

    python tests/benchmark.py --data-dir data
    python tests/benchmark.py --data-dir data --rounds 5
    python tests/benchmark.py --network

A plain recipe: single samples, Adam at 1e-3, a gather per batch. A bare minimum: the network
without DDP, a process that waits for no other, a torchrun that only imports torch.

The speed of a shared machine varies, so both sides run in turns. The table has the medians over
the rounds, for the ratios too. A round takes six minutes on two CPU cores.
"""

import argparse
import contextlib
import copy
import fcntl
import gc
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import network
import torch
import torch.distributed as dist
import torch.distributed.nn  # if DDP imports it later, it keeps the process group alive
from helpers.commands import EPOCH, clean_environment
from helpers.paths import ROOT
from helpers.scripts import declare_torchvision_operators, load_script
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

from common.data import load_mnist
from common.model import ConvNet

SCRIPT = ROOT / "04_ddp_torchrun/train.py"
RUN_SH = ROOT / "04_ddp_torchrun/run.sh"
CUDA = torch.cuda.is_available()
PROCESSES = torch.cuda.device_count() if CUDA else 2
BATCH = 128  # images per process and step, where both sides use the same
GOAL = 0.99  # accuracy on the test set
LIMIT = 900  # seconds for one command
STEPS = 25  # of the script's loop, then as many of the bare loop


# The plain recipe, started by torchrun as 04 is


class SingleSamples(Dataset):
    """A set of common.data as torchvision's MNIST with ToTensor, which converts image by image."""

    def __init__(self, image_set):
        declare_torchvision_operators()
        from torchvision.datasets import MNIST
        from torchvision.transforms import ToTensor

        images, labels = image_set.tensors
        self.mnist = object.__new__(MNIST)  # without its __init__, which reads files
        self.mnist.data = (images.squeeze(1) * 255).round().to(torch.uint8)
        self.mnist.targets = labels
        self.mnist.transform = ToTensor()
        self.mnist.target_transform = None

    def __len__(self):
        return len(self.mnist)

    def __getitem__(self, index):
        return self.mnist[index]


def train_recipe(data_dir, epochs, amp):
    """Train until the test accuracy reaches GOAL; print epoch lines as 04 does."""
    device = torch.device("cpu")
    if CUDA:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)
    train_set, test_set = load_mnist(data_dir)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(SingleSamples(train_set), BATCH, sampler=train_sampler)
    test_loader = single_sample_test_loader(test_set)
    net = ConvNet().to(device)
    model = DDP(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(1, epochs + 1):
        train_sampler.set_epoch(epoch)
        start = time.perf_counter()
        total_loss = 0
        for images, labels in train_loader:
            images = images.to(device)
            labels = labels.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
        mean_loss = total_loss / len(train_loader)
        seconds = time.perf_counter() - start
        speed = train_sampler.total_size / seconds
        accuracy = evaluate_recipe(net, test_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}/{epochs}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  "
                  f"{seconds:.1f} s  {speed:.0f} images/s", flush=True)
        if accuracy >= GOAL:
            break


def single_sample_test_loader(test_set):
    sampler = DistributedSampler(test_set, shuffle=False)
    return DataLoader(SingleSamples(test_set), BATCH, sampler=sampler)


@torch.no_grad()
def evaluate_recipe(net, test_loader, device):
    """Return the accuracy; predictions and labels are gathered batch by batch."""
    net.eval()
    correct = 0
    count = 0
    for images, labels in test_loader:
        mine = torch.stack([net(images.to(device)).argmax(1), labels.to(device)])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        for predictions, labels in parts:
            correct += (predictions == labels).sum().item()
            count += len(labels)
    net.train()
    return correct / count


# Inside 04: its own main(), in which its loop and its evaluation take turns with the other side


def clock():
    """Seconds, after the GPU has finished its work."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class InTurns(tqdm):
    """A progress bar that, after every STEPS steps of the script, times as many bare steps.

    A bare step computes the same on tensors in memory. It has no process group, no progress bar,
    no learning rate schedule and no sum of the losses.
    """

    times = []  # pairs of seconds per step: the script's, the bare one's

    def __iter__(self):
        batches = super().__iter__()
        device = torch.device("cuda" if CUDA else "cpu")
        memory = []
        for images, labels in itertools.islice(self.iterable, STEPS):
            memory.append((images.to(device), labels.to(device)))
        model = ConvNet().to(device, memory_format=torch.channels_last)
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9, nesterov=True)
        for turn in range(len(self.iterable) // STEPS):
            dist.barrier()
            start = clock()
            yield from itertools.islice(batches, STEPS)
            middle = clock()
            for images, labels in memory:
                loss = criterion(model(images), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.7)
                optimizer.step()
                optimizer.zero_grad()
            end = clock()
            if turn > 0:  # the first turn is the warm-up
                self.times.append([(middle - start) / STEPS, (end - middle) / STEPS])


def train_in_turns():
    """Run one epoch of 04's main() in turns with the other side; print the medians as JSON."""
    script = load_script(SCRIPT)
    evaluate = script.evaluate
    speeds = []  # pairs of images per second: 04's, the recipe's

    def images_per_second(evaluate_function, net, loader, device):
        dist.barrier()
        start = clock()
        evaluate_function(net, loader, device)
        return len(loader.dataset) / (clock() - start)

    def evaluate_in_turns(net, test_loader, device):
        recipe_loader = single_sample_test_loader(test_loader.dataset)
        recipe_net = copy.deepcopy(net).to(memory_format=torch.contiguous_format)
        for _ in range(4):
            ours = images_per_second(evaluate, net, test_loader, device)
            other = images_per_second(evaluate_recipe, recipe_net, recipe_loader, device)
            speeds.append([ours, other])
        return evaluate(net, test_loader, device)

    script.tqdm = InTurns
    script.evaluate = evaluate_in_turns
    sys.argv = [str(SCRIPT)]
    script.main()
    if os.environ["RANK"] == "0":
        result = {"step": medians(InTurns.times), "evaluation": medians(speeds[1:])}
        print("in turns:", json.dumps(result), flush=True)


def medians(pairs):
    """The median of the first numbers, and that of the second ones."""
    return [statistics.median(numbers) for numbers in zip(*pairs, strict=True)]


# Run both sides and print the table


class Run:
    """A command that has run: its output, its epochs, when its first step ended, its peak memory.

    It runs on a terminal, where the scripts show the progress bar that reports the first step.
    """

    def __init__(self, command, folder, stop_after_first_step=False, **settings):
        self.text = ""
        self.epochs = []  # dictionaries; "at" is in seconds since the start
        self.first_step = None  # seconds since the start
        terminal, process_end = pty.openpty()
        fcntl.ioctl(process_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = clean_environment()
        for name, value in settings.items():
            environment[name] = str(value)
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=process_end,
            stderr=process_end,
            start_new_session=True,
        )
        os.close(process_end)
        timer = threading.Timer(LIMIT, os.killpg, [process.pid, signal.SIGTERM])
        timer.start()
        stopped = False
        with contextlib.suppress(OSError):  # raised when the command has ended
            while part := os.read(terminal, 65536):
                self.text += part.decode(errors="replace")
                self.look_for_progress(time.perf_counter() - start)
                if stop_after_first_step and self.first_step is not None and not stopped:
                    os.killpg(process.pid, signal.SIGTERM)
                    stopped = True
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        os.close(terminal)
        if status != 0 and not stopped:
            raise SystemExit(f"{command} failed:\n{self.text}")
        self.peak = usage.ru_maxrss / 1024  # MiB, of its largest process

    def look_for_progress(self, now):
        steps = r"\| [1-9]\d*/\d+ \[|torch is imported"  # of a progress bar
        if self.first_step is None and re.search(steps, self.text):
            self.first_step = now
        lines = list(EPOCH.finditer(self.text))
        for line in lines[len(self.epochs) :]:
            epoch = {name: float(value) for name, value in line.groupdict().items()}
            epoch["at"] = now
            self.epochs.append(epoch)

    def time_to_goal(self):
        """Seconds from the start until GOAL is reported; infinite if it is not reached."""
        for epoch in self.epochs:
            if epoch["accuracy"] >= GOAL:
                return epoch["at"]
        return math.inf

    def speed(self):
        """Images per second of training, the median of its epochs."""
        return statistics.median(epoch["speed"] for epoch in self.epochs)

    def in_turns(self):
        """What train_in_turns() printed."""
        return json.loads(re.search(r"in turns: (\{.*\})", self.text)[1])


# What is measured, what it is compared with, whether more is better
ROWS = {
    "float32": (f"images/s of training, batch size {BATCH}", "recipe", True),
    "amp": (f"images/s of training, batch size {BATCH}, `--amp`", "recipe with autocast", True),
    "evaluation": ("images/s of evaluation", "single samples, a gather per batch", True),
    "goal": (f"seconds to {GOAL:.1%} accuracy, start and evaluation included", "recipe", False),
    "memory": ("MiB of the largest process at its peak", "recipe", False),
    "processes": (
        f"images/s of {PROCESSES} processes, one thread each",
        f"{PROCESSES} × one process",
        True,
    ),
    "apart": (
        f"images/s of {PROCESSES} jobs of one process, side by side",
        f"{PROCESSES} × one process",
        True,
    ),
    "step": (f"ms per step, {PROCESSES} processes", "tensors in memory, no process group", False),
    "single step": ("ms per step, one process", "tensors in memory, no process group", False),
    "start": ("seconds to the end of the first step", "torchrun and `import torch`", False),
}


def one_round(folder):
    """Yield a row's name, 04's figure and the other one. The folder has the data set in data/."""
    threads = max(1, os.cpu_count() // PROCESSES)

    def run_04(*options, **settings):
        return Run(["bash", RUN_SH, *options], folder, **settings)

    def torchrun(processes, *command, **settings):
        launcher = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
        return Run([*launcher, *command], folder, OMP_NUM_THREADS=threads, **settings)

    def run_recipe(*options):
        return torchrun(PROCESSES, __file__, "--side=recipe", *options)

    def run_in_turns(processes):
        return torchrun(processes, __file__, "--side=in-turns").in_turns()

    default = run_04()
    recipe = run_recipe("--epochs=15")
    yield "goal", default.time_to_goal(), recipe.time_to_goal()
    yield "memory", default.peak, recipe.peak

    same_batch = run_04(f"--batch-size={BATCH}", "--epochs=2")
    yield "float32", same_batch.speed(), recipe.speed()

    same_batch_amp = run_04(f"--batch-size={BATCH}", "--epochs=2", "--amp")
    recipe_amp = run_recipe("--epochs=2", "--amp")
    yield "amp", same_batch_amp.speed(), recipe_amp.speed()

    if PROCESSES > 1:
        alone = {"NPROC": 1, "OMP_NUM_THREADS": 1}
        several = run_04(**alone | {"NPROC": PROCESSES})
        one = run_04(**alone)
        with ThreadPoolExecutor(PROCESSES) as pool:
            jobs = [
                pool.submit(run_04, f"--output={job}.pt", CUDA_VISIBLE_DEVICES=job, **alone)
                for job in range(PROCESSES)
            ]
        apart = [job.result() for job in jobs]
        yield "processes", several.speed(), PROCESSES * one.speed()
        yield "apart", sum(each.speed() for each in apart), PROCESSES * one.speed()

    several = run_in_turns(PROCESSES)
    yield "evaluation", *several["evaluation"]
    yield "step", *[1000 * seconds for seconds in several["step"]]
    if PROCESSES > 1:
        one = run_in_turns(1)
        yield "single step", *[1000 * seconds for seconds in one["step"]]

    script = run_04(stop_after_first_step=True)
    statement = "import torch; print('torch is imported', flush=True)"
    only_import = torchrun(PROCESSES, "--no-python", sys.executable, "-c", statement)
    yield "start", script.first_step, only_import.first_step


def compare(data_dir, rounds):
    results = {name: [] for name in ROWS}  # pairs: 04's figure, the other one
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data").symlink_to(data_dir.resolve())
        for number in range(1, rounds + 1):
            for name, ours, other in one_round(folder):
                results[name].append([ours, other])
                message = f"round {number}: {name} {ours:.4g} against {other:.4g}"
                print(message, file=sys.stderr, flush=True)
    machine = f"{PROCESSES} × {torch.cuda.get_device_name()}" if CUDA else cpu_name()
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}; "
          f"{PROCESSES} processes, medians of {rounds} rounds:\n")
    print_table(results)


def print_table(results):
    print("| | 04 | compared with | | times better |")
    print("| --- | ---: | --- | ---: | ---: |")
    for name, (what, compared_with, more_is_better) in ROWS.items():
        pairs = results[name]
        if not pairs:
            continue
        ratios = []
        for ours, other in pairs:
            ratios.append(ours / other if more_is_better else other / ours)
        ours, other = [three_digits(number) for number in medians(pairs)]
        ratio = statistics.median(ratios)
        print(f"| {what} | {ours} | {compared_with} | {other} | {ratio:.2f} |")


def three_digits(number):
    """Format a number with three significant digits; a goal that was not reached is infinite."""
    if math.isinf(number):
        return "not reached"
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.10g}"


def cpu_name():
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores of {name}"


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", type=Path, default="data", help="MNIST directory; common: bundled digits")
    add("--rounds", type=int, default=3, help="how often everything is timed")
    sides = ("recipe", "in-turns")  # started by one_round()
    add("--network", action="store_true", help="measure slow links and many processes instead")
    add("--side", choices=sides, help=argparse.SUPPRESS)
    add("--epochs", type=int, help=argparse.SUPPRESS)  # of the recipe
    add("--amp", action="store_true", help=argparse.SUPPRESS)  # of the recipe
    return parser.parse_args()


def main():
    args = parse_args()
    if args.side == "recipe":
        train_recipe(args.data_dir, args.epochs, args.amp)
        gc.collect()  # free the model before destroying the group, or the exit may abort
        dist.destroy_process_group()
    elif args.side == "in-turns":
        train_in_turns()
    elif args.network:
        network.measure_links(args.rounds)
        print()
        network.measure_processes()
    else:
        compare(args.data_dir, args.rounds)


if __name__ == "__main__":
    main()
