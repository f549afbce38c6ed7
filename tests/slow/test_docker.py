"""08 on a real engine: a container that is stopped, and resumes.

Without a registry: the base image is of Debian's packages, and pip gets wheels from
this machine.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import ROOT, Running, copy_repository, equal, wait_until
from hosts import Daemons

# 400 steps
OPTIONS = "--data-dir /app/common --epochs 10 --batch-size 16 --save-every 5"
USER = 1234  # who runs run.sh
ADDRESS, PORT = "172.30.0.1", 28080  # where containers and builds reach the wheels
PIP = r"[global]\nno-index = true\nfind-links = http://{0}:{1}/\ntrusted-host = {0}\n"


@pytest.fixture
def engine(hosts):
    """A real dockerd on host h0, which does not touch the one of this machine.

    In a folder that all users may enter, unlike those of pytest.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        socket = f"unix://{folder}/socket"
        settings = {"DOCKER_HOST": socket, "DOCKER_CONFIG": f"{folder}/config"}
        tools = "dockerd docker mmdebstrap"
        engine = Daemons(hosts, Path(folder), tools, **settings)
        (engine.folder / "config").mkdir()
        (engine.folder / "config").chmod(0o777)  # for root and for USER
        # no name server: it fails at once
        command = (
            f"dockerd --data-root={folder}/data --exec-root={folder}/exec "
            f"--host={socket} --pidfile={folder}/pid --bip={ADDRESS}/24 --dns=127.0.0.1"
        )
        engine.start("h0", *command.split())
        engine.wait_until_up("docker info")
        (engine.folder / "socket").chmod(0o666)
        yield engine
        engine.run("bash", "-c", f"kill $(cat {folder}/pid)")
        wait_until(lambda: not (engine.folder / "pid").exists())


@pytest.fixture
def project(engine):
    """A copy with few digits, and what its image is built from."""
    project = copy_repository(engine.folder / "a project")
    dockerfile = (project / "08_docker/Dockerfile").read_text()
    base = re.search("^ARG BASE_IMAGE=(.*)", dockerfile, re.M)[1]
    script = ROOT / "tests/slow/base_image.sh"
    make = ["bash", script, base, PIP.format(ADDRESS, PORT)]
    subprocess.run(make, cwd=engine.folder, env=engine.environment, check=True)
    python = (engine.folder / "base/usr/bin/python3").resolve().name
    options = "--quiet --only-binary=:all: --dest=wheels --python-version"
    download = [sys.executable, "-m", "pip", "download", *options.split()]
    download += [python.removeprefix("python"), "-r", project / "requirements.txt"]
    subprocess.run(download, cwd=engine.folder, check=True)
    server = f"-m http.server {PORT} --bind {ADDRESS} --directory wheels"
    engine.start("h0", sys.executable, *server.split())
    return project


def test_docker_stop_and_the_same_command_resumes(project, engine):
    """It resumes from the last checkpoint. All files belong to the folder's owner."""
    user = f"setpriv --reuid={USER} --regid={USER} --clear-groups bash -c".split()
    command = [*user, f'bash "{project}/08_docker/run.sh" {OPTIONS}']

    def start(name):
        (volume := engine.folder / name).mkdir(exist_ok=True)
        os.chown(volume, USER, USER)
        there = engine.hosts.on("h0", volume, *command)
        return Running(there, volume, **engine.environment, OMP_NUM_THREADS=1)

    whole = start("whole").finish()
    first = start("stopped")
    wait_until(lambda: first.output.count("%  loss") > 2, first)
    engine.run("bash", "-c", "docker stop $(docker ps --quiet)")
    assert first.finish().code == 1, first  # torchrun's
    rest = start("stopped").finish()
    assert whole.code == rest.code == 0, (whole, rest)
    assert "starting at {'epoch': 1, 'done': 0}" not in rest.output, rest
    stopped = engine.folder / "stopped"
    assert {path.stat().st_uid for path in stopped.iterdir()} == {USER}
    assert equal(stopped / "mnist.pt", engine.folder / "whole/mnist.pt")
