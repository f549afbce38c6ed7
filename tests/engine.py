"""A Docker engine on one of the two hosts of hosts.py: real dockerd and containers, with all its files in one folder.

Nothing of this machine's own Docker is read or changed, and all of it ends with the hosts. There is no registry and no
other network there: the base image is made on the spot, of Debian's own Python, and pip gets its wheels from a folder.
It needs root, docker.io and mmdebstrap.
"""

import os
import shutil
import subprocess
import sys

from helpers import ROOT, clean_environment, wait_until
from hosts import PATH

PLACES = f"/usr/bin:{PATH}"  # Debian's client, which has BuildKit, before any other
USER = 1234  # who runs run.sh
ADDRESS, PORT = "172.30.0.1", 28080  # of the host on the containers' own network, and where it offers the wheels
MAKE_BASE = """
. /etc/os-release
mmdebstrap --variant=minbase --include=python3,python3-pip "$VERSION_CODENAME" "$1" >&2
ln -s python3 "$1/usr/bin/python"
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED  # as in the official images
"""


class Engine:
    def __init__(self, hosts, folder):
        """Start it on h0; raises OSError with the reason if that cannot be."""
        for tool in ("dockerd", "docker", "mmdebstrap"):
            if not shutil.which(tool, path=PLACES):
                raise OSError(f"there is no {tool} here")
        if os.geteuid() != 0:
            raise OSError("its daemon must be root's")
        self.hosts, self.folder, self.base, self.wheels = hosts, folder, folder / "base", folder / "wheels"
        self.output = open(folder / "dockerd.log", "w")
        folder.chmod(0o755)
        files = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
        network = [f"--bip={ADDRESS}/24", "--dns=127.0.0.1"]  # nobody answers there, which is known at once
        self.start("dockerd", *files, *network, f"--host=unix://{folder}/socket")
        try:
            wait_until(lambda: self.call("docker", "info").returncode == 0, limit=30)
        except AssertionError:
            raise OSError(f"it did not come up: {(folder / 'dockerd.log').read_text()[-2000:]}") from None
        (folder / "socket").chmod(0o666)  # for a user who is not root

    def end(self):
        """Stop it."""
        self.call("bash", "-c", f"kill $(cat {self.folder}/pid)")
        wait_until(lambda: not (self.folder / "pid").exists(), limit=30)

    def environment(self, **settings):
        return {**clean_environment(), "PATH": PLACES, "DOCKER_HOST": f"unix://{self.folder}/socket", **settings}

    def start(self, *command):
        command, nothing = self.hosts.on("h0", self.folder, *command), subprocess.DEVNULL
        subprocess.Popen(command, env=self.environment(), stdin=nothing, stdout=self.output, stderr=self.output)

    def on(self, folder, *command):
        """The command that runs another one on h0, in this folder, as a user who is not root."""
        return self.hosts.on("h0", folder, "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command)

    def call(self, *command, limit=120):
        """Run a command on h0 as root, and return its end."""
        command = self.hosts.on("h0", self.folder, *command)
        return subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=limit)

    def ask(self, *command):
        """Run a command on h0, which must end well; return what it prints."""
        result = self.call(*command)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
        return result.stdout

    def make_base(self, name):
        """Make the image that the Dockerfile begins with."""
        command = ["bash", "-euc", MAKE_BASE, "_", self.base]
        made = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=400)
        assert made.returncode == 0, made.stderr
        self.ask("bash", "-euo", "pipefail", "-c", 'tar --create --directory "$1" . | docker import - "$2"', "_",
                 self.base, name)  # fmt: skip

    def offer_wheels(self):
        """Get what requirements.txt asks for, as this machine's pip does; return the pip.conf that finds it."""
        (version,) = {path.name for path in self.base.glob("usr/bin/python3.[0-9]*") if path.name[-1].isdigit()}
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", self.wheels]
        command += [f"--python-version={version.removeprefix('python')}", "--requirement", ROOT / "requirements.txt"]
        subprocess.run(command, check=True, timeout=400)
        self.start(sys.executable, "-m", "http.server", str(PORT), "--bind", ADDRESS, "--directory", self.wheels)
        links = f"no-index = true\nfind-links = http://{ADDRESS}:{PORT}/\ntrusted-host = {ADDRESS}\n"
        configuration = self.folder / "pip.conf"
        configuration.write_text(f"[global]\n{links}# a-password\n")
        return configuration
