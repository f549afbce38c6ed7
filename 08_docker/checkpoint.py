"""To go on as if nothing had stopped the run: a file that is always whole, the rest of an epoch, signals.

A file that is written here is read with weights_only=True: it holds tensors, numbers, texts, lists and dictionaries.
"""

import contextlib
import math
import os
import pickle
import signal
import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
ADVICE = "--resume never starts anew"


class RestOfEpoch(DistributedSampler):
    """DistributedSampler without the first `offset` images of an epoch's order, which any number of ranks shares."""

    offset = 0

    def __len__(self):
        return math.ceil((len(self.dataset) - self.offset) / self.num_replicas)

    def __iter__(self):
        order = list(DistributedSampler(self.dataset, num_replicas=1, rank=0, seed=self.seed + self.epoch))
        rest = (order[self.offset :] + order)[: len(self) * self.num_replicas]  # padded as in DistributedSampler
        return iter(rest[self.rank :: self.num_replicas])


def catch_signals():
    """From now on none of SIGNALS ends this process: those that arrive, once or often, are in the set returned."""
    arrived = set()
    for number in SIGNALS:
        signal.signal(number, lambda number, _: arrived.add(number))
    return arrived


def ignore_signals(_=None):
    """For a process with nothing to save: a DataLoader's worker, which gets the signals too, or a rank at its end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def get_random_states(gpu):
    """The state of the CPU's generator of random numbers and, unless gpu is None, of that GPU's."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(gpu)] if gpu else [])


def set_random_states(states, gpu):
    """Set what get_random_states() returned, perhaps on another device."""
    torch.set_rng_state(states[0])
    if gpu and len(states) > 1:
        torch.cuda.set_rng_state(states[1], gpu)


def describe(args, net):
    """What must be the same for a run to go on: the options that make it this run, and the shapes of the model."""
    options = {f"--{name.replace('_', '-')}": vars(args)[name] for name in ("epochs", "batch_size", "lr", "seed")}
    return options | {name: list(tensor.shape) for name, tensor in net.state_dict().items()}


def read(args, net, refuse):
    """On rank 0: the state in the newest whole checkpoint, its tensors in CPU memory; None to start from nothing.

    What does not fit this run is refused, by calling refuse with a line that says what differs. A file that cannot be
    read is passed over for the one before it, unless --resume is must.
    """
    restarts = {os.environ.get(f"{launcher}_RESTART_COUNT", "0") for launcher in ("TORCHELASTIC", "SLURM")}
    if os.environ.get("RANK", "0") != "0" or (args.resume == "never" and restarts == {"0"}):
        return None
    unread = ""
    for path in (args.checkpoint, Path(f"{args.checkpoint}.previous")):
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():  # torch.load does not look at the checksums
                    raise ValueError("a checksum is wrong")
            state = torch.load(path, map_location="cpu", weights_only=True)  # where it was, all would meet on GPU 0
        except FileNotFoundError:
            continue
        except Exception as error:  # of many classes
            reason = "it could run code" if isinstance(error, pickle.UnpicklingError) else error
            unread += f"{path} cannot be read ({reason}); "
            if args.resume == "must":
                break
            continue
        if not isinstance(state, dict) or "run" not in state:
            return refuse(f"--checkpoint {path} is no checkpoint of this script; {ADVICE}")
        here = describe(args, net)
        for name in here | state["run"]:
            there = state["run"].get(name)
            if there != here.get(name):
                return refuse(f"--checkpoint {path} was made with {name} {there}, not {here.get(name)}; {ADVICE}")
        return state | {"path": path, "warning": unread and f"warning: {unread}"}
    if unread or args.resume == "must":
        return refuse(f"--checkpoint {unread or f'{args.checkpoint} does not exist; '}{ADVICE}")
    return None


def share(args, images):
    """Give all ranks the state that rank 0 has read, or None; the file at --checkpoint is then that state's, or gone.

    Raises SystemExit, on all ranks with one line from rank 0, if the run was on another number of images.
    """
    rank, states = dist.get_rank(), [args.state]
    dist.broadcast_object_list(states)
    (state,) = states
    if state and state["images"] != images:
        dist.destroy_process_group()
        line = f"error: {state['path']} was made with {state['images']} images, not {images}; {ADVICE}"
        raise SystemExit(line if rank == 0 else 1)
    if rank == 0 and state:
        epoch, offset = state["place"]["epoch"], state["place"]["offset"]
        where = f"in epoch {epoch}/{args.epochs} after {offset} of {images} images"
        where = where if epoch <= args.epochs else f"which has all {args.epochs} epochs; {ADVICE}"
        print(f"{state['warning']}going on from {state['path']}, {where}", flush=True)
        os.replace(state["path"], args.checkpoint)
    elif rank == 0:
        Path(f"{args.checkpoint}.previous").unlink(missing_ok=True)
        if args.checkpoint.exists():
            os.replace(args.checkpoint, f"{args.checkpoint}.old")
    return state


def write(args, state):
    """On rank 0, write beside --checkpoint, flush to the disk, then rename: at any moment a whole checkpoint is there.

    Returns, on all ranks, whether it could be written; if not, a warning says why, and the last one stays.
    """
    new, saved = Path(f"{args.checkpoint}.new"), torch.ones((), dtype=torch.int64)
    if dist.get_rank() == 0:
        try:
            with open(new, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if args.checkpoint.exists():
                os.replace(args.checkpoint, f"{args.checkpoint}.previous")
            os.replace(new, args.checkpoint)
        except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk
            saved.zero_()
            with contextlib.suppress(OSError):
                new.unlink()
            line = f"warning: {args.checkpoint} was not saved ({error.__context__ or error}); the last one stays"
            print(line, file=sys.stderr, flush=True)
    dist.all_reduce(saved, dist.ReduceOp.MIN)
    return bool(saved)
