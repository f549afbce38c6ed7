"""08 on a real engine: one container, and two by compose, ended and resumed.

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
from helpers import IGNORED, ROOT, Running, equal, fewer_digits, wait_until
from hosts import Daemons

OPTIONS = (
    "--data-dir /app/common --epochs 16 --batch-size 16 --save-every 5".split()
)  # 640 steps
USER = 1234  # who runs run.sh
ADDRESS, PORT = "172.30.0.1", 28080  # where containers and builds reach the wheels
DOCKERFILE = (ROOT / "08_docker/Dockerfile").read_text()


@pytest.fixture(scope="module")
def place():
    """A folder that not only root may enter, which pytest's folders are not."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def engine(hosts, place):
    """A real dockerd on host h0; this machine's own is neither read nor changed."""
    (folder := place / "engine").mkdir()
    socket = f"unix://{folder}/socket"
    files = [
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/pid",
    ]
    # no name server: it fails at once
    network = [f"--bip={ADDRESS}/24", "--dns=127.0.0.1"]
    (folder / "config").mkdir()
    (folder / "config").chmod(0o777)  # for root and for USER
    tools = ("dockerd", "docker", "docker-compose", "mmdebstrap")
    engine = Daemons(
        hosts, folder, tools, DOCKER_HOST=socket, DOCKER_CONFIG=f"{folder}/config"
    )
    engine.start("h0", "dockerd", *files, *network, f"--host={socket}")
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
    settings = f"[global]\\nno-index = true\\nfind-links = http://{ADDRESS}:{PORT}/\\n"
    settings += f"trusted-host = {ADDRESS}\\n"
    make = ["bash", ROOT / "tests/slow/base_image.sh", base, settings]
    subprocess.run(make, cwd=engine.folder, env=engine.environment, check=True)
    python = (engine.folder / "base/usr/bin/python3").resolve().name
    version = python.removeprefix("python")
    download = [sys.executable, *"-m pip download --quiet --only-binary=:all:".split()]
    download += ["--dest=wheels", f"--python-version={version}"]
    download += ["--requirement", ROOT / "requirements.txt"]
    subprocess.run(download, cwd=engine.folder, check=True)
    server = ["http.server", PORT, "--bind", ADDRESS, "--directory", "wheels"]
    engine.start("h0", sys.executable, "-m", *server)
    build = re.match("# .*: (docker build .*)\n", DOCKERFILE)[1].split()
    engine.run(*build, folder=fewer_digits(project))
    return project


def start(engine, volume, *command, **settings):
    """Start a command on h0 in a folder, as its owner, who is not root."""
    volume.mkdir(exist_ok=True)
    os.chown(volume, USER, USER)
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    command = engine.hosts.on("h0", volume, *user, *command)
    return Running(
        command, volume, **(engine.environment | settings | {"OMP_NUM_THREADS": "1"})
    )


def run_sh(engine, project, volume):
    return start(engine, volume, "bash", project / "08_docker/run.sh", *OPTIONS)


def compose(engine, project, volume):
    file = project / "08_docker/compose.yaml"
    up = ["docker-compose", "--file", file, "up", "--build"]
    settings = {"USER_ID": USER, "GROUP_ID": USER, "PWD": str(volume)}
    return start(engine, volume, *up, OPTIONS=" ".join(OPTIONS), **settings)


@pytest.fixture(scope="module")
def undisturbed(engine, project, place):
    """The weights of an undisturbed training by one container with two processes."""
    result = run_sh(engine, project, volume := place / "undisturbed").finish()
    assert result.code == 0 and len(result.epochs()) == 16, result
    return volume / "mnist.pt"


@pytest.mark.parametrize("way", [run_sh, compose])
def test_docker_stop_and_the_same_command_resumes(
    way, engine, project, undisturbed, place
):
    """As the owner of the folder. Only steps after the last checkpoint are repeated."""
    volume = place / way.__name__
    first = way(engine, project, volume)
    wait_until((volume / "checkpoint.pt").exists, first)
    containers = engine.run("docker", "ps", "--quiet").split()
    look = ["df", "--output=size", "--block-size=M", "/dev/shm"]
    assert engine.run("docker", "exec", containers[0], *look).split()[-1] == "1024M"
    wait_until(lambda: first.printed()[0].count("%  loss") > 2, first)
    engine.run("docker", "stop", *containers)
    first = first.finish()
    assert first.code == 1 or way is compose, first  # 1: torchrun's
    rest = way(engine, project, volume).finish()
    [(epoch, done)] = re.findall(
        r"resuming from .*epoch': (\d+), 'done': (\d+)", rest.output
    )
    [*_, (logged, percent)] = re.findall(r"epoch (\d+)/16  (\d+)%", first.output)
    assert (int(epoch), int(done) / 12.6) >= (int(logged), int(percent) - 1), rest
    assert rest.code == 0, rest
    assert {path.stat().st_uid for path in volume.iterdir()} == {USER}
    assert equal(volume / "mnist.pt", undisturbed)
