"""A Docker engine on host h0 of hosts.py: real dockerd and containers.

All its files are in one folder, and this machine's own Docker is neither read nor changed. There is
no registry: the base image is made from Debian's packages, and pip installs wheels that this
machine's pip has downloaded. It needs root, docker.io and mmdebstrap.
"""

import subprocess
import sys

from helpers import ROOT, wait_until
from hosts import PATH, Daemons

TOOLS = ("dockerd", "docker", "mmdebstrap")
USER = 1234  # who runs run.sh
ADDRESS, PORT = "172.30.0.1", 28080  # where containers and builds reach the wheels
MAKE_BASE = """
. /etc/os-release
mmdebstrap --variant=minbase --include=python3,python3-pip "$VERSION_CODENAME" "$1" >&2
ln -s python3 "$1/usr/bin/python"
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED  # as in the official images
tar --create --directory "$1" . | docker import - "$2"
"""


class Engine(Daemons):
    def __init__(self, hosts, folder):
        """Start it; raises OSError with the reason if that is not possible here."""
        settings = {"DOCKER_HOST": f"unix://{folder}/socket", "DOCKER_CONFIG": f"{folder}/config"}
        settings["PATH"] = f"/usr/bin:{PATH}"  # Debian's client, which has BuildKit
        super().__init__(hosts, folder, TOOLS, **settings)
        (folder / "config").mkdir()
        (folder / "config").chmod(0o777)  # for root and for USER
        files = [f"--data-root={folder}/data", f"--exec-root={folder}/exec"]
        files += [f"--pidfile={folder}/pid", f"--host=unix://{folder}/socket"]
        network = [f"--bip={ADDRESS}/24", "--dns=127.0.0.1"]  # no name server: fails at once
        self.start("h0", "dockerd", *files, *network)
        self.wait_until_up(lambda: self.run("docker", "info"))
        (folder / "socket").chmod(0o666)  # for a user who is not root

    def end(self):
        self.run("bash", "-c", f"kill $(cat {self.folder}/pid)")
        wait_until(lambda: not (self.folder / "pid").exists(), limit=30)

    def as_user(self, folder, *command):
        """The command that runs another one on h0, in this folder, as a user who is not root."""
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        return self.hosts.on("h0", folder, *user, *command)

    def make_base(self, name):
        """Make the image that the Dockerfile starts from, and the wheels for its Python.

        Return a pip.conf with which pip installs these wheels, and which holds a password.
        """
        base, wheels = self.folder / "base", self.folder / "wheels"
        make = ["bash", "-euo", "pipefail", "-c", MAKE_BASE, "_", base, name]
        options = {"capture_output": True, "text": True, "timeout": 400}
        made = subprocess.run(make, env=self.environment(), **options)
        assert made.returncode == 0, made.stderr
        python = (base / "usr/bin/python3").resolve().name.removeprefix("python")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        command += ["--dest", wheels, f"--python-version={python}"]
        command += ["--requirement", ROOT / "requirements.txt"]
        subprocess.run(command, check=True, timeout=400)
        server = ["http.server", str(PORT), "--bind", ADDRESS, "--directory", wheels]
        self.start("h0", sys.executable, "-m", *server)
        settings = f"find-links = http://{ADDRESS}:{PORT}/\ntrusted-host = {ADDRESS}\n"
        configuration = self.folder / "pip.conf"
        configuration.write_text(f"[global]\nno-index = true\n{settings}# a-password\n")
        return configuration
