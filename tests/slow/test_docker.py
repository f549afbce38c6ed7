"""08 on a real engine: a container that is stopped, and resumes.

Without a registry: the base image is of Debian's packages, and pip gets wheels from
this machine.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import IGNORED, ROOT, Running, edit, equal, wait_until
from hosts import Daemons

# 400 steps
OPTIONS = "--data-dir /app/common --epochs 10 --batch-size 16 --save-every 5"
USER = 1234  # who runs run.sh
ADDRESS, PORT = "172.30.0.1", 28080  # where containers and builds reach the wheels
DOCKERFILE = (ROOT / "08_docker/Dockerfile").read_text()
PIP = r"[global]\nno-index = true\nfind-links = http://{0}:{1}/\ntrusted-host = {0}\n"


@pytest.fixture(scope="module")
def place():
    """A folder that all users may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def engine(hosts, place):
    """A real dockerd on host h0, which does not touch the one of this machine."""
    folder = place / "engine"
    (config := folder / "config").mkdir(parents=True)
    config.chmod(0o777)  # for root and for USER
    tools = "dockerd docker mmdebstrap"
    socket = f"unix://{folder}/socket"
    settings = {"DOCKER_HOST": socket, "DOCKER_CONFIG": f"{config}"}
    engine = Daemons(hosts, folder, tools, **settings)
    # no name server: it fails at once
    command = (
        f"dockerd --data-root={folder}/data --exec-root={folder}/exec --host={socket} "
        f"--pidfile={folder}/pid --bip={ADDRESS}/24 --dns=127.0.0.1"
    )
    engine.start("h0", *command.split())
    engine.wait_until_up("docker info")
    (folder / "socket").chmod(0o666)
    yield engine
    engine.run("bash", "-c", f"kill $(cat {folder}/pid)")
    wait_until(lambda: not (folder / "pid").exists())


@pytest.fixture(scope="module")
def project(engine, place):
    """A copy with few digits, and its image, which is built."""
    project = place / "a project"
    for folder in ("08_docker", "common"):
        shutil.copytree(ROOT / folder, project / folder, ignore=IGNORED)
    for file in ("requirements.txt", ".dockerignore"):
        shutil.copy(ROOT / file, project)
    base = re.search("^ARG BASE_IMAGE=(.*)", DOCKERFILE, re.M)[1]
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
    build = re.match("# .*: (docker build .*)\n", DOCKERFILE)[1].split()
    edit(project / "common/data.py", "[:1438", "[:140")
    engine.run(*build, folder=project)
    return project


@pytest.fixture(scope="module")
def start(engine, project, place):
    """Start run.sh on h0 in a folder, as its owner, who is not root."""
    run = f'bash "{project}/08_docker/run.sh" {OPTIONS}'
    settings = {"OMP_NUM_THREADS": 1} | engine.environment
    user = f"setpriv --reuid={USER} --regid={USER} --clear-groups bash -c".split()

    def start(name):
        volume = place / name
        volume.mkdir(exist_ok=True)
        os.chown(volume, USER, USER)
        command = engine.hosts.on("h0", volume, *user, run)
        return volume, Running(command, volume, **settings)

    return start


def test_packages_of_the_home_of_a_user_are_not_imported(project, engine):
    """Apptainer has this home in the container, too."""
    shown = "import site; print(site.ENABLE_USER_SITE)"
    command = ["docker", "run", "--rm", "mnist-ddp", "python3", "-c", shown]
    assert engine.run(*command) == "False\n"


def test_docker_stop_and_the_same_command_resumes(start, engine):
    """It resumes from the last checkpoint. All files belong to the folder's owner."""
    whole, running = start("undisturbed")
    assert running.finish().code == 0, running
    volume, first = start("stopped")
    wait_until(lambda: first.output.count("%  loss") > 2, first)
    engine.run("bash", "-c", "docker stop $(docker ps --quiet)")
    assert first.finish().code == 1, first  # torchrun's
    _, rest = start("stopped")
    assert rest.finish().code == 0, rest
    assert "starting at {'epoch': 1, 'done': 0}" not in rest.output, rest
    assert {path.stat().st_uid for path in volume.iterdir()} == {USER}
    assert equal(volume / "mnist.pt", whole / "mnist.pt")
