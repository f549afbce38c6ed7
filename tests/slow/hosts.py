"""Two hosts that are really separate, on one machine: network namespaces joined by a bridge.

Each has its own address, host name and /etc/hosts. All of it is gone when the first process ends,
at the latest with the tests' own process. It needs root, iproute2 and util-linux.
"""

import os
import shutil
import subprocess
from pathlib import Path

from helpers.commands import clean_environment

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where ip may be
ADDRESSES = {"h0": "10.78.0.1", "h1": "10.78.0.2"}
SETUP = """
mount -t tmpfs none /run
mkdir /run/netns
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
for host in h0 h1; do
  ip netns add $host
  ip link add to-$host type veth peer name eth0 netns $host
  ip link set to-$host master bridge up
  ip -n $host link set lo up
  ip -n $host link set eth0 up
done
ip -n h0 addr add "$1/24" dev eth0
ip -n h1 addr add "$2/24" dev eth0
echo ready
read -r _
"""


def require(*tools, path=PATH):
    """Raise OSError with the reason if the tests are not root's, or if a tool is missing."""
    if os.geteuid() != 0:
        raise OSError("it needs root")
    for tool in tools:
        if not shutil.which(tool, path=path):
            raise OSError(f"{tool} is not installed")


class Hosts:
    def __init__(self, folder):
        """Set the hosts up; raises OSError with the reason if this machine does not allow it."""
        require("ip", "unshare", "nsenter")
        self.folder = folder
        unshare = "unshare --net --mount --uts --pid --fork --kill-child --mount-proc".split()
        self.first = subprocess.Popen(
            [*unshare, "bash", "-euc", SETUP, "_", *ADDRESSES.values()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": PATH},
        )
        if self.first.stdout.readline() != "ready\n":
            raise OSError(self.first.communicate(timeout=10)[1].strip())
        children = Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children")
        self.enter = ["nsenter", "--target", children.read_text().strip()]
        self.enter += ["--net", "--mount", "--uts", "--pid"]
        self.write_hosts("hosts", ADDRESSES)

    def write_hosts(self, file, addresses):
        """Write a file that on() can use as a host's /etc/hosts."""
        names = {"localhost": "127.0.0.1", **addresses}
        lines = [f"{address} {host}\n" for host, address in names.items()]
        (self.folder / file).write_text("".join(lines))

    def on(self, host, folder, *command, hosts="hosts"):
        """The command that runs another one on a host, in this folder, with this /etc/hosts."""
        become = 'hostname "$1" && mount --bind "$2" /etc/hosts && cd "$3" && shift 3 && exec "$@"'
        enter = [*self.enter, "nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount"]
        return [*enter, "bash", "-c", become, "_", host, self.folder / hosts, folder, *command]

    def link(self, host, state):
        """Cut the cable of a host ("down"), or mend it ("up")."""
        command = [*self.enter, "ip", "link", "set", f"to-{host}", state]
        subprocess.run(command, check=True, timeout=10)

    def end(self):
        self.first.communicate(timeout=10)  # closes its standard input: all that runs in it ends


class Daemons:
    """Daemons on the hosts, with all their files in one folder; they end with the hosts."""

    def __init__(self, hosts, folder, tools, **settings):
        """Prepare them; raises OSError with the reason if they cannot be started here."""
        self.hosts, self.folder = hosts, folder
        self.settings = {"PATH": PATH} | settings  # in the environment of daemons and commands
        require(*tools, path=self.settings["PATH"])
        folder.chmod(0o755)
        self.output = open(folder / "daemons.log", "w")

    def environment(self, **settings):
        return clean_environment() | self.settings | settings

    def start(self, host, *command):
        command = self.hosts.on(host, self.folder, *command)
        output = {"stdin": subprocess.DEVNULL, "stdout": self.output, "stderr": self.output}
        subprocess.Popen(command, env=self.environment(), **output)

    def run(self, *command, folder=None, limit=60, **settings):
        """Run a command on h0, which must succeed; return what it prints."""
        command = self.hosts.on("h0", folder or self.folder, *map(str, command))
        result = subprocess.run(
            command, env=self.environment(**settings), capture_output=True, text=True, timeout=limit
        )
        assert result.returncode == 0, result
        return result.stdout

    def wait_until_up(self, condition):
        """Wait until a shell command succeeds, which fails as long as the daemons start."""
        try:
            self.run("timeout", 30, "bash", "-c", f"until {condition}; do sleep 0.2; done")
        except AssertionError:
            log = (self.folder / "daemons.log").read_text()
            raise OSError(f"it did not start: {log[-2000:]}") from None
