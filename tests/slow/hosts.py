"""Two hosts that are really separate, on one machine: network namespaces and a bridge.

Each has its own address, host name and /etc/hosts. All of it ends with the process of
the tests.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers import clean_environment

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where ip may be
ADDRESSES = {"h0": "10.78.0.1", "h1": "10.78.0.2"}
SETUP = Path(__file__).with_suffix(".sh")
BECOME = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && cd "$3" && shift 3 && exec "$@"'
)


def require(*tools):
    """Skip the test with the reason if it is not root's, or if a tool is missing."""
    missing = [tool for tool in tools if not shutil.which(tool, path=PATH)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"{missing[0]} is not installed" if missing else "it needs root")


class Hosts:
    def __init__(self, folder):
        """Set the hosts up, or skip the test with the reason that forbids it here."""
        require("ip", "unshare", "nsenter")
        self.folder = folder
        unshare = (
            "unshare --net --mount --uts --pid --fork --kill-child --mount-proc".split()
        )
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.first = subprocess.Popen(
            [*unshare, "bash", SETUP, *ADDRESSES.values()],
            **pipes,
            text=True,
            env={**os.environ, "PATH": PATH},
        )
        if self.first.stdout.readline() != "ready\n":
            pytest.skip(f"no hosts on this machine: {self.first.communicate()[1]}")
        children = Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children")
        self.enter = ["nsenter", "--target", children.read_text().strip()]
        self.enter += ["--net", "--mount", "--uts", "--pid"]

    def on(self, host, folder, *command, names=ADDRESSES):
        """The command that runs another one on a host, which knows these names."""
        file = self.folder / "-".join(names.values())
        if not file.exists():
            names = {"localhost": "127.0.0.1", **names}
            file.write_text(
                "".join(f"{address} {name}\n" for name, address in names.items())
            )
        enter = [
            *self.enter,
            "nsenter",
            f"--net=/run/netns/{host}",
            "unshare",
            "--uts",
            "--mount",
        ]
        return [
            *enter,
            "bash",
            "-c",
            BECOME,
            "_",
            host,
            file,
            folder,
            *map(str, command),
        ]

    def end(self):
        self.first.communicate()  # closes its standard input: all that runs in it ends


class Daemons:
    """Daemons on the hosts, with all files in one folder; they end with the hosts."""

    def __init__(self, hosts, folder, tools, **settings):
        require(*tools)
        self.hosts, self.folder, self.started = hosts, folder, []
        self.environment = clean_environment() | {"PATH": PATH} | settings
        folder.chmod(0o755)

    def start(self, host, *command):
        with open(self.folder / "daemons.log", "a") as log:
            self.started.append(
                subprocess.Popen(
                    self.hosts.on(host, self.folder, *command),
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def run(self, *command, folder=None, **settings):
        """Run a command on h0, which must succeed; return what it prints."""
        command = self.hosts.on("h0", folder or self.folder, *command)
        result = subprocess.run(
            command,
            env=self.environment | settings,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, result
        return result.stdout

    def wait_until_up(self, condition):
        """Wait until a shell command succeeds: it fails while the daemons start."""
        command = self.hosts.on("h0", self.folder, "bash", "-c", condition)
        end = time.monotonic() + 300
        while subprocess.run(
            command, env=self.environment, capture_output=True
        ).returncode:
            if time.monotonic() > end or any(
                each.poll() is not None for each in self.started
            ):
                pytest.skip(
                    f"no start: {(self.folder / 'daemons.log').read_text()[-2000:]}"
                )
            time.sleep(0.2)
