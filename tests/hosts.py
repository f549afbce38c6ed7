"""Two hosts that are really separate, on one machine: network namespaces that a bridge joins.

Each has its own address, host name and /etc/hosts. All of it is gone when the first process ends, at the latest with
the tests' own process. It needs root, or a kernel that lets users make namespaces, and iproute2 and util-linux.
"""

import os
import shutil
import subprocess
from pathlib import Path

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where ip may be
ADDRESSES = {"h0": "10.78.0.1", "h1": "10.78.0.2"}
SETUP = """
mount -t tmpfs none /run
mkdir /run/netns
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
while read -r host address; do
  [ -n "$host" ] || break
  ip netns add "$host"
  ip link add "to-$host" type veth peer name eth0 netns "$host"
  ip link set "to-$host" master bridge up
  ip -n "$host" link set lo up
  ip -n "$host" addr add "$address/24" dev eth0
  ip -n "$host" link set eth0 up
done
echo ready
read -r _ || true
"""


class Hosts:
    def __init__(self, folder):
        """Set the hosts up; raises OSError with the reason if this machine does not allow it."""
        for tool in ("ip", "unshare", "nsenter"):
            if not shutil.which(tool, path=PATH):
                raise OSError(f"there is no {tool} here")
        self.folder = folder
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        namespaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.first = subprocess.Popen(
            ["unshare", *user, *namespaces, "bash", "-euc", SETUP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": PATH},
        )
        self.first.stdin.write("".join(f"{host} {address}\n" for host, address in ADDRESSES.items()) + "\n")
        self.first.stdin.flush()
        if self.first.stdout.readline() != "ready\n":
            raise OSError(self.first.communicate(timeout=10)[1].strip())
        (inside,) = Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children").read_text().split()
        self.enter = ["nsenter", "--target", inside, "--net", "--mount", "--uts", "--pid"]
        self.enter += ["--user", "--preserve-credentials"] if user else []
        self.write_hosts("hosts", ADDRESSES)

    def write_hosts(self, file, addresses):
        lines = [f"{address} {host}\n" for host, address in {"localhost": "127.0.0.1", **addresses}.items()]
        (self.folder / file).write_text("".join(lines))

    def on(self, host, folder, *command, hosts="hosts"):
        """The command that runs another one on a host, in this folder, with a file of this name as /etc/hosts."""
        become = 'hostname "$1" && mount --bind "$2" /etc/hosts && cd "$3" && shift 3 && exec "$@"'
        enter = [*self.enter, "nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount"]
        return [*enter, "bash", "-c", become, "_", host, self.folder / hosts, folder, *command]

    def link(self, host, state):
        """Cut the cable of a host ("down"), or mend it ("up")."""
        subprocess.run([*self.enter, "ip", "link", "set", f"to-{host}", state], check=True, timeout=10)

    def end(self):
        self.first.communicate(timeout=10)  # closes its standard input: it ends, and all that runs in it
