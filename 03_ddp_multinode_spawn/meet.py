"""For nodes that are started by hand: all meet before any of them starts a process, or each says in a line why not."""

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def counts(text):
    """Read numbers of processes: "8,2" to [8, 2]; "all" to one process a GPU, or to [2] where there is none."""
    numbers = [torch.cuda.device_count() or 2] if text == "all" else [int(number) for number in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"each number of processes must be above 0, not {text}")
    return numbers


@contextlib.contextmanager
def meet(args):
    """Wait for all nodes at node 0's TCPStore, and keep it open for their processes while the block runs.

    Raises SystemExit with a last line that says what did not happen, in the time limit of --start-timeout or later in
    a process that the block has spawned, and what to check.
    """
    node, where, processes = args.node_rank, f"{args.master_addr}:{args.master_port}", ",".join(map(str, args.gpus))
    me, missing, reason = f"node {node} of {args.nodes}", node, ""

    def give_up():
        line = f"error: node {missing} of {args.nodes} did not reach {where} within {args.start_timeout} s{reason}: is "
        check = f"nc -zv {args.master_addr} {args.master_port}"
        line += f"the address right, the port open (`{check}`), the other node started?\n"
        os.write(sys.stderr.fileno(), line.encode())
        os._exit(1)  # from a thread, as some waits have no limit: for another program, for a name server

    limit = threading.Timer(args.start_timeout, give_up)
    limit.start()
    try:
        connected = node == 0
        while not connected:
            try:  # a plain socket first: it says why it fails, where TCPStore fills the screen
                socket.create_connection((args.master_addr, args.master_port), timeout=5).close()
                connected, reason = True, " (no answer from what listens there)"
            except OSError as error:
                reason = f" ({error.strerror or error})"
                time.sleep(0.5)
        timeout = timedelta(seconds=args.start_timeout + 60)
        addr = args.master_addr if node > 0 else "localhost"  # node 0 listens at all of its addresses
        store = dist.TCPStore(addr, args.master_port, is_master=node == 0, timeout=timeout)
        reason = ""
        if store.add(f"nodes {node}", 1) > 1:
            sys.exit(f"error: there are two of {me}: give each its own --node-rank")
        store.set(f"processes of node {node}", processes)
        for missing in range(args.nodes):
            while not store.check([f"processes of node {missing}"]):
                time.sleep(0.1)
        said = [store.get(f"processes of node {other}").decode() for other in range(args.nodes)]
        store.add("ready", 1)
        while node == 0 and store.add("ready", 0) < args.nodes:
            time.sleep(0.1)
    except dist.DistError as error:
        line = str(error).splitlines()[0]
        sys.exit(f"error: {me} cannot use {where}: {line} (another --master-port, the same on all nodes, may be free)")
    finally:
        limit.cancel()
    if len(set(said)) > 1:
        sys.exit(f"error: the nodes disagree on --gpus: {'; '.join(f'node {k} has {v}' for k, v in enumerate(said))}")
    first = sum(args.gpus[:node])
    print(f"{me}: {args.gpus[node]} of {sum(args.gpus)} processes, from rank {first} on\n", end="", flush=True)
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # or it has the last word
    try:
        yield
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"{error}\nerror: {me} has stopped because of the error above; if that is only a lost or silent rank, "
                 "look for the reason on the other nodes, and at the network between them")
