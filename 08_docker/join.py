"""Run torchrun as one of several nodes: it ends in time, leaves nothing behind, and a last line says what went wrong.

    NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 python join.py --nproc-per-node=2 train.py
    NNODES=1:2 RDZV_ENDPOINT=10.0.0.1 python join.py --nproc-per-node=2 train.py

run.sh does this. Alone, torchrun waits up to half an hour for a node that never comes or that a cut link hides, and
leaves its processes running when it is killed. Here it may be without a process for START_TIMEOUT seconds at most:
before the first one starts, between restarts, and after the last one has ended.
"""

import ctypes
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2), which Linux alone has


def read_settings(env):
    """Return this node's name, where all nodes meet, how many seconds they wait, and torchrun's options for that.

    Raises SystemExit with a line that says which setting is wrong.
    """
    nodes, seconds = env.get("NNODES", "1"), env.get("START_TIMEOUT", "300")
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        sys.exit(f"error: NNODES must be a number of nodes, or the fewest and the most as in 1:2, not '{nodes}'")
    if not re.fullmatch(r"[1-9]\d*", seconds):
        sys.exit(f"error: START_TIMEOUT must be a number of seconds above 0, not '{seconds}'")
    seconds, late = int(seconds), int(seconds) + 60  # torchrun's own limits, which say less in more lines, come later
    if env.get("RDZV_ENDPOINT"):  # the nodes are numbered as they come, and may be more or fewer at a restart
        endpoint = env["RDZV_ENDPOINT"] + ("" if re.search(r":\d+$", env["RDZV_ENDPOINT"]) else ":29400")
        conf = f"join_timeout={late},read_timeout={late}{say_who_hosts(endpoint)}"
        conf += f",last_call_timeout={min(30, 1 + seconds // 10)}"  # for more nodes than the fewest
        options = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={env.get('RDZV_ID', 'train')}"]
        return f"node {socket.gethostname()}", endpoint, seconds, [*options, f"--nnodes={nodes}", f"--rdzv-conf={conf}"]
    for name, what in (("MASTER_ADDR", "the address of node 0"), ("NODE_RANK", "0, 1, ... on the nodes")):
        if not env.get(name):
            sys.exit(f"error: several nodes: set {name} to {what}; or RDZV_ENDPOINT to an address of any of them")
    rank, endpoint = env["NODE_RANK"], f"{env['MASTER_ADDR']}:{env.get('MASTER_PORT', '29500')}"
    if not (nodes.isdecimal() and rank.isdecimal() and int(rank) < int(nodes)):
        sys.exit(f"error: NODE_RANK must be a number below NNODES, not '{rank}' of '{nodes}'; RDZV_ENDPOINT needs none")
    if env.get("MAX_RESTARTS", "0") != "0":
        sys.exit("error: MAX_RESTARTS needs RDZV_ENDPOINT: at MASTER_ADDR, processes that start again cannot meet")
    options = [f"--nnodes={nodes}", f"--node-rank={rank}", f"--master-addr={env['MASTER_ADDR']}"]
    options += [f"--master-port={endpoint.rpartition(':')[2]}", f"--rdzv-conf=timeout={late}"]
    return f"node {rank} of {nodes}", endpoint, seconds, options


def say_who_hosts(endpoint):
    """If the endpoint's address is this machine's, say so: torchrun compares it with what the host name leads to."""
    host, _, port = endpoint.rpartition(":")
    if host == "localhost" or host.startswith("127."):
        return ""
    try:
        socket.create_server((host, int(port))).close()
        return ",is_host=true"
    except OSError as error:
        return ",is_host=false" if error.errno == errno.EADDRINUSE else ""


def find_workers(parent):
    """The ids of the training processes, which have a LOCAL_RANK from torchrun, among the children of a process."""
    workers = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        try:
            if b"\0LOCAL_RANK=" in Path(f"/proc/{child}/environ").read_bytes():
                workers.append(int(child))
        except OSError:  # it has ended meanwhile
            continue
    return workers


def run_torchrun(name, endpoint, seconds, options):
    """Run torchrun to its end, or end it; return its exit code and, for one that is not 0, a line that says why."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed torchrun leaves behind becomes a child of this process
    torchrun = subprocess.Popen(
        ["torchrun", *options],
        start_new_session=True,  # Ctrl-C comes here alone, and is passed on
        preexec_fn=lambda: prctl(SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # it ends with this process
    )
    line, started, last = "", False, time.monotonic()

    def pass_on(number, _):
        nonlocal line
        line = f"{name} was stopped by {signal.Signals(number).name}"
        torchrun.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    while torchrun.poll() is None:
        if find_workers(torchrun.pid):
            started, last = True, time.monotonic()
        elif time.monotonic() > last + seconds * (1.1 if started else 1) and not line:  # torchrun's last wait is 300 s
            line = explain_lateness(name, endpoint, seconds, started)
            torchrun.kill()
        time.sleep(0.3)
    for worker in find_workers(os.getpid()):
        os.killpg(worker, signal.SIGKILL)
    return torchrun.returncode, line or explain_end(name, endpoint, torchrun.returncode, started)


def explain_end(name, endpoint, code, started):
    """Why torchrun has ended by itself."""
    if code < 0:
        return f"{name}: torchrun was ended by {signal.Signals(-code).name}, and its processes with it"
    if not started:
        return (f"{name} could not start (see above): is {endpoint} the right address, its port not that of another "
                "program (`ss -ltnp`)?")
    return (f"{name} has stopped because of the error above; if that is only a lost or silent rank, look for the "
            "reason on the other nodes, and at the network between them")


def explain_lateness(name, endpoint, seconds, started):
    """What torchrun waits for, which has not had a process for so many seconds."""
    if started:
        return (f"{name} has no process any more, and torchrun waited for the other nodes for {seconds} s: look at "
                "their output, and at the network between them")
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        failed = f"did not meet the others at {endpoint} within {seconds} s"
    except OSError as error:
        failed = f"did not reach {endpoint} within {seconds} s ({error.strerror or error})"
    return (f"{name} {failed}: is the address right, the port open (`nc -zv {host} {port}`) and not that of another "
            "program, the other node started?")


def main():
    name, endpoint, seconds, options = read_settings(os.environ)
    code, line = run_torchrun(name, endpoint, seconds, [*options, *sys.argv[1:]])
    if code:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(code if code >= 0 else 1)


if __name__ == "__main__":
    main()
