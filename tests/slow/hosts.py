"""Two separate hosts on one machine: network namespaces and a bridge.

Each has its own address and host name. They end with the process of the tests.
"""

import os
import shutil
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest
from helpers import clean_environment

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where ip may be
HOSTS = "h0", "h1"
UNSHARE = "unshare --net --mount --uts --pid --fork --kill-child --mount-proc bash"
ENTER = (
    "nsenter --target {} --net --mount --uts --pid nsenter --net=/run/netns/{} "
    "unshare --uts --mount bash -c"
)
BECOME = 'hostname "$1" && cd "$2" && shift 2 && exec "$@"'


def require(*tools):
    """Skip the test if it does not run as root or if a tool is missing."""
    for tool in tools:
        if not shutil.which(tool, path=PATH):
            pytest.skip(f"{tool} is not installed")
    if os.geteuid() != 0:
        pytest.skip("it needs root")


class Hosts:
    def __init__(self):
        """Set the hosts up, or skip the test with the reason why it is impossible."""
        require("ip", "unshare", "nsenter")
        self.first = subprocess.Popen(
            [*UNSHARE.split(), Path(__file__).with_suffix(".sh")],
            stdin=PIPE,
            stdout=PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": PATH},
        )
        line = self.first.stdout.readline()
        if line != b"ready\n":
            pytest.skip(f"no hosts on this machine: {line}")
        pid = self.first.pid
        self.inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()

    def on(self, host, folder, *command):
        """The command that runs a command on a host."""
        enter = ENTER.format(self.inside, host).split()
        return [*enter, BECOME, "_", host, folder, *map(str, command)]

    def end(self):
        self.first.communicate()  # closes its standard input, which ends all in it


class Daemons:
    """Daemons on the hosts, with all files in one folder; they end with the hosts."""

    def __init__(self, hosts, folder, tools, **settings):
        require(*tools.split())
        self.hosts, self.folder = hosts, folder
        self.environment = clean_environment() | {"PATH": PATH} | settings
        folder.chmod(0o755)

    def start(self, host, *command):
        with open(self.folder / "daemons.log", "a") as log:
            subprocess.Popen(
                self.hosts.on(host, self.folder, *command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def run(self, *command, folder=None, **settings):
        """Run a command on h0, which must succeed; return what it prints."""
        return subprocess.check_output(
            self.hosts.on("h0", folder or self.folder, *command),
            env=self.environment | settings,
            text=True,
            timeout=600,
        )

    def wait_until_up(self, condition):
        """Wait until a shell command succeeds: it fails while the daemons start."""
        loop = f"until {condition}; do sleep 0.2; done"
        self.run("timeout", 100, "bash", "-c", loop)
