"""08 on a real engine: one container, two by compose, two by run.sh, stopped and resumed.

There is no registry: the base image is made from Debian's packages, and its /etc/pip.conf names a
server on this machine with wheels that this machine's pip has downloaded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.checks import check_trained, equal
from helpers.commands import Running, wait_until
from helpers.paths import ROOT
from helpers.projects import IGNORED, fewer_digits
from hosts import ADDRESSES, Daemons

FOLDER = ROOT / "08_docker"
TOOLS = ("dockerd", "docker", "docker-compose", "mmdebstrap")
OPTIONS = "--data-dir /app/common --epochs 16 --batch-size 16 --save-every 5".split()  # 640 steps
USER = 1234  # who runs run.sh
ADDRESS, PORT = "172.30.0.1", 28080  # where containers and builds reach the wheels
MAKE_BASE = """
. /etc/os-release
mmdebstrap --variant=minbase --include=python3,python3-pip "$VERSION_CODENAME" "$1" >&2
ln -s python3 "$1/usr/bin/python"
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED  # as in the official images
cp "$3" "$1/etc/pip.conf"
tar --create --directory "$1" . | docker import - "$2"
"""


@pytest.fixture(scope="module")
def place():
    """A folder that not only root may enter, which pytest's folders are not."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def engine(hosts, place):
    """A real dockerd on host h0; this machine's own Docker is neither read nor changed."""
    folder = place / "engine"
    folder.mkdir()
    socket = f"unix://{folder}/socket"
    files = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    network = [f"--bip={ADDRESS}/24", "--dns=127.0.0.1"]  # no name server: fails at once
    (folder / "config").mkdir()
    (folder / "config").chmod(0o777)  # for root and for USER
    try:
        engine = Daemons(hosts, folder, TOOLS, DOCKER_HOST=socket, DOCKER_CONFIG=f"{folder}/config")
        engine.start("h0", "dockerd", *files, *network, f"--host={socket}")
        engine.wait_until_up("docker info")
    except OSError as error:
        pytest.skip(f"no Docker on this machine: {error}")
    (folder / "socket").chmod(0o666)
    yield engine
    engine.run("bash", "-c", f"kill $(cat {folder}/pid)")
    wait_until(lambda: not (folder / "pid").exists())


@pytest.fixture(scope="module")
def project(place):
    """A copied project with few digits, and with files that must not get into the image."""
    project = place / "a project"
    for folder in ("08_docker", "common"):
        shutil.copytree(ROOT / folder, project / folder, ignore=IGNORED)
    fewer_digits(project)
    for file in ("requirements.txt", ".dockerignore"):
        shutil.copy(ROOT / file, project)
    for other in ("checkpoint.pt", "data/train-images-idx3-ubyte", "08_docker/mnist.pt", ".git/a"):
        (project / other).parent.mkdir(exist_ok=True)
        (project / other).write_text("a-secret")
    return project


def make_base(engine, name):
    """Make the image that the Dockerfile starts from, and serve the wheels for its Python."""
    base, wheels, configuration = [engine.folder / name for name in ("base", "wheels", "pip.conf")]
    settings = f"find-links = http://{ADDRESS}:{PORT}/\ntrusted-host = {ADDRESS}\n"
    configuration.write_text(f"[global]\nno-index = true\n{settings}")
    make = ["bash", "-euo", "pipefail", "-c", MAKE_BASE, "_", base, name, configuration]
    subprocess.run(make, env=engine.environment, check=True)
    python = (base / "usr/bin/python3").resolve().name.removeprefix("python")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    download += ["--dest", wheels, f"--python-version={python}"]
    subprocess.run([*download, "--requirement", ROOT / "requirements.txt"], check=True)
    server = ["http.server", PORT, "--bind", ADDRESS, "--directory", wheels]
    engine.start("h0", sys.executable, "-m", *server)


@pytest.fixture(scope="module")
def image(engine, project):
    """Build the image by the Dockerfile's command."""
    dockerfile = (FOLDER / "Dockerfile").read_text()
    make_base(engine, re.search("^ARG BASE_IMAGE=(.*)", dockerfile, re.M)[1])
    build = re.match("# .*: (docker build .*)\n", dockerfile)[1].split()
    engine.run(*build, folder=project)
    return "mnist-ddp"


def start(engine, volume, *command, **settings):
    """Start a command on h0 in a folder, as a user who is not root, whose folder it is."""
    volume.mkdir(exist_ok=True)
    os.chown(volume, USER, USER)
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    command = engine.hosts.on("h0", volume, *user, *command)
    return Running(command, volume, **(engine.environment | settings | {"OMP_NUM_THREADS": "1"}))


def train(engine, project, volume, **settings):
    """Start run.sh on the digits in the image."""
    return start(engine, volume, "bash", project / "08_docker/run.sh", *OPTIONS, **settings)


@pytest.fixture(scope="module")
def undisturbed(engine, project, image, place):
    """The weights of an undisturbed training by one container with two processes."""
    result = train(engine, project, volume := place / "undisturbed").finish()
    check_trained(result, volume, epochs=16, ranks=1, at_least=0.8)
    return volume / "mnist.pt"


def test_the_image_holds_the_code_but_no_data(engine, project, image):
    """And a build with changed code takes the dependencies from the cache."""
    look = "find /app -type f; grep -rl a-secret /app /etc /home /root /tmp /work;"
    look += "find / -xdev -name '*ubyte*' -o -xdev -name 'checkpoint.pt*' -o -xdev -name mnist.pt"
    found = engine.run("docker", "run", "--rm", "--user=0", image, "bash", "-c", look).split()
    common = [f"common/{path.name}" for path in (ROOT / "common").iterdir() if path.is_file()]
    expected = [f"/app/{name}" for name in ("train.py", "requirements.txt", *common)]
    assert sorted(found) == sorted(expected)
    changed = shutil.copytree(project, project.with_name("changed"))
    (changed / "08_docker/train.py").write_text("changed")
    build = "docker build --tag=changed --file=08_docker/Dockerfile ."
    engine.run(*build.split(), folder=changed)
    facts = json.loads(engine.run("docker", "image", "inspect", image, "changed"))
    assert facts[0]["Config"]["User"].startswith("1000") and facts[0]["Size"] < 1.4e9
    before, after = [each["RootFS"]["Layers"] for each in facts]
    assert before[:-2] == after[:-2] and before[-2] != after[-2]  # of train.py, then WORKDIR


LOOK = "touch /work/here && rm /work/here && df --output=size --block-size=M /dev/shm | tail -n 1"


def stop_and_resume(engine, start, volume):
    """Stop a job's containers, let the same command resume it, and return both results."""
    first = start()
    wait_until((volume / "checkpoint.pt").exists, first)
    containers = engine.run("docker", "ps", "--quiet").split()
    processes = "".join(engine.run("docker", "top", container) for container in containers)
    facts = json.loads(engine.run("docker", "inspect", *containers))
    shared_memory = engine.run("docker", "exec", containers[0], "bash", "-c", LOOK).strip()
    engine.run("docker", "stop", *containers)
    assert len(re.findall(r"python\S* -u /app/train\.py", processes)) == 2, processes
    assert {each["Config"]["User"] for each in facts} == {f"{USER}:{USER}"}
    assert {each["Config"]["StopTimeout"] for each in facts} == {120}
    assert shared_memory == "1024M"
    first, rest = first.finish(), start().finish()
    stop = re.search(r"stopped (at {'epoch': .*}); rerun the same command to", first.output)
    assert stop, first
    assert f"resuming from checkpoint.pt {stop[1]}\n" in rest.output, rest
    assert {path.stat().st_uid for path in volume.iterdir()} == {USER}
    return first, rest


def test_docker_stop_saves_and_the_same_command_resumes(engine, project, undisturbed, place):
    volume = place / "one container"
    first, rest = stop_and_resume(engine, lambda: train(engine, project, volume), volume)
    assert (first.code, rest.code) == (1, 0), (first, rest)  # 1: torchrun's
    assert equal(volume / "mnist.pt", undisturbed)


def test_two_containers_by_compose(engine, project, undisturbed, place):
    """They train like one with two processes, stop together and resume."""
    volume = place / "compose"
    compose = ["docker-compose", "--file", project / "08_docker/compose.yaml"]
    up = [*compose, "up", "--build", "--no-color"]
    settings = {"USER_ID": str(USER), "GROUP_ID": str(USER), "PWD": str(volume)}
    settings["OPTIONS"] = " ".join(OPTIONS)
    first, rest = stop_and_resume(engine, lambda: start(engine, volume, *up, **settings), volume)
    assert first.output.count("exited with code 1") == 2, first  # torchrun's
    assert rest.output.count("exited with code 0") == 2, rest
    assert equal(volume / "mnist.pt", undisturbed)


def test_two_machines_by_run_sh(engine, project, undisturbed, place):
    """The commands of both machines, here on one: its network is the containers' as well."""
    settings = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": ADDRESSES["h0"]}
    volumes = [place / f"machine {rank}" for rank in (0, 1)]
    nodes = [train(engine, project, volume, NODE_RANK=str(rank), **settings)
             for rank, volume in enumerate(volumes)]
    results = [node.finish() for node in nodes]
    assert [result.code for result in results] == [0, 0], results
    assert equal(volumes[0] / "mnist.pt", undisturbed)
    assert not (volumes[1] / "mnist.pt").exists()
