"""08 on a real engine: one container, two by compose, two by run.sh, stopped and resumed."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from engine import USER, Engine
from helpers import (
    IGNORED,
    ROOT,
    Running,
    bare_accuracy,
    equal,
    fewer_digits,
    wait_for,
    wait_until,
)

FOLDER = ROOT / "08_docker"
LIMIT = 300  # seconds, for a busy machine
OPTIONS = "--data-dir /app/common --epochs 12 --batch-size 16 --save-every 5".split()  # 480 steps
USAGE = "usage: train.py [options]\n"


@pytest.fixture(scope="module")
def engine(hosts):
    """A real engine; tests that need it are skipped on machines where it cannot run."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # not root's, as tmp_path
        try:
            engine = Engine(hosts, Path(name))
        except OSError as error:
            pytest.skip(f"no Docker on this machine: {error}")
        yield engine
        engine.end()


def to_user(path):
    """Give a path to the user who runs run.sh."""
    os.chown(path, USER, USER)
    return Path(path)


@pytest.fixture
def volume(engine):
    """A folder of the user who runs run.sh; no container is left at the end."""
    with tempfile.TemporaryDirectory() as name:
        yield to_user(name)
        containers = engine.run("docker", "ps", "--all", "--quiet").split()
        if containers:
            engine.run("docker", "rm", "--force", *containers)


@pytest.fixture(scope="module")
def project():
    """A copied project with few digits, and with files that must not get into the image."""
    with tempfile.TemporaryDirectory() as name:
        project = Path(name, "a project")
        for folder in ("08_docker", "common"):
            shutil.copytree(ROOT / folder, project / folder, ignore=IGNORED)
        fewer_digits(project)
        for file in ("requirements.txt", ".dockerignore"):
            shutil.copy(ROOT / file, project)
        others = ("checkpoint.pt", "data/train-images-idx3-ubyte", "08_docker/mnist.pt", "pip.conf")
        for other in (*others, ".git/config"):
            (project / other).parent.mkdir(exist_ok=True)
            (project / other).write_text("a-secret")
        Path(name).chmod(0o755)
        yield project


@pytest.fixture(scope="module")
def image(engine, project):
    """Build the image by run.sh, on a base made here and with a pip.conf that is secret."""
    (base,) = re.findall(r"^ARG BASE_IMAGE=(.*)", (FOLDER / "Dockerfile").read_text(), re.M)
    secret = f"--secret=id=pip.conf,src={engine.make_base(base)}"
    command = engine.hosts.on("h0", project, "bash", project / "08_docker/run.sh", "--help")
    result = Running(command, project, **engine.environment(BUILD_OPTIONS=secret)).finish(LIMIT)
    assert result.code == 0 and result.output.startswith(USAGE), result
    return "mnist-ddp"


def train(engine, project, volume, *options, **settings):
    """Start run.sh in a folder, as a user who is not root, on the digits in the image."""
    command = ["bash", project / "08_docker/run.sh", *OPTIONS, *options]
    settings = engine.environment(OMP_NUM_THREADS="1", **settings)
    return Running(engine.as_user(volume, *command), volume, **settings)


@pytest.fixture(scope="module")
def undisturbed(engine, project, image):
    """An undisturbed training: its result, and the folder that was its volume."""
    with tempfile.TemporaryDirectory() as name:
        yield train(engine, project, to_user(name)).finish(LIMIT), Path(name)


def test_one_container_trains_in_two_processes(undisturbed):
    result, volume = undisturbed
    assert result.code == 0, result
    epochs = result.epochs()
    assert len(epochs) == 12, result
    assert float(epochs[-1]["accuracy"]) >= 0.8, result
    assert f"{bare_accuracy(volume / 'mnist.pt'):.4f}" == epochs[-1]["accuracy"], result
    owners = {path.name: path.stat().st_uid for path in volume.iterdir()}
    assert owners == {"checkpoint.pt": USER, "mnist.pt": USER}


def test_the_image_holds_the_code_but_no_secret_and_no_data(engine, image):
    history = engine.run("docker", "history", "--no-trunc", image)
    assert "pip install" in history
    assert "a-password" not in history and "28080" not in history
    look = "find /app -type f; grep -rl -e a-password -e a-secret /app /etc /home /root /tmp /work;"
    look += "find / -xdev -name '*ubyte*' -o -xdev -name 'checkpoint.pt*' -o -xdev -name mnist.pt"
    found = engine.run("docker", "run", "--rm", "--user=0", image, "bash", "-c", look).split()
    common = [f"common/{path.name}" for path in (ROOT / "common").iterdir() if path.is_file()]
    expected = [f"/app/{name}" for name in ("train.py", "requirements.txt", *common)]
    assert sorted(found) == sorted(expected)
    (facts,) = json.loads(engine.run("docker", "image", "inspect", image))
    assert facts["Config"]["User"].split(":")[0] == "1000"
    assert facts["Size"] < 1.4e9


def test_a_build_with_changed_code_takes_the_dependencies_from_the_cache(engine, project, image):
    script = project / "08_docker/train.py"
    before = script.read_text()
    dockerfile = f"--file={project}/08_docker/Dockerfile"
    command = f'docker build --progress=plain --tag=changed "{dockerfile}" "{project}" 2>&1'
    try:
        script.write_text(before + "\n")
        output = engine.run("bash", "-c", command, DOCKER_BUILDKIT="1")
    finally:
        script.write_text(before)
    steps = dict(re.findall(r"^#(\d+) \[\d/\d\] (.*)", output, re.M))
    cached = [steps.get(number, "") for number in re.findall(r"^#(\d+) CACHED", output, re.M)]
    assert any("pip install" in step for step in cached), output
    assert not any("train.py" in step for step in cached), output


def wait_until_saved(volume, *running):
    wait_until((volume / "checkpoint.pt").exists, *running, limit=LIMIT)


STOPPED = r"stopped (after \d+ of 12 epochs and \d+ of 1260 images); rerun the same command to"


def test_docker_stop_saves_and_the_same_command_resumes(engine, project, undisturbed, volume):
    running = train(engine, project, volume)
    wait_until_saved(volume, running)
    engine.run("docker", "stop", *engine.run("docker", "ps", "--quiet").split())
    result = running.finish(LIMIT)
    assert result.code == 1, result  # torchrun's
    stop = re.search(STOPPED, result.output)
    assert stop, result
    rest = train(engine, project, volume).finish(LIMIT)
    assert rest.code == 0, rest
    assert rest.output.startswith(f"resuming from checkpoint.pt, {stop[1]}\n"), rest
    assert equal(volume / "mnist.pt", undisturbed[1] / "mnist.pt")


LOOK = r"""
touch /work/here && rm /work/here
printf '#!/bin/sh\necho executable' > /tmp/program && chmod +x /tmp/program && /tmp/program
df --output=size --block-size=M /dev/shm | tail -n 1
for file in /file /app/file /home/file; do touch $file 2>&1; done
true
"""


def test_what_a_container_may_do(engine, project, image, volume):
    running = train(engine, project, volume, "--epochs", 1000)
    wait_for("epoch 1/", running, limit=LIMIT)
    (container,) = engine.run("docker", "ps", "--quiet").split()
    processes = engine.run("docker", "top", container)
    assert len(re.findall(r"python\S* -u /app/train\.py", processes)) == 2, processes
    (facts,) = json.loads(engine.run("docker", "inspect", container))
    assert facts["Config"]["User"] == f"{USER}:{USER}"
    assert facts["Config"]["StopTimeout"] == 60
    lines = engine.run("docker", "exec", container, "bash", "-c", LOOK).splitlines()
    assert lines[0] == "executable" and lines[1].strip() == "1024M", lines
    assert len(lines) == 5 and all("Read-only file system" in line for line in lines[2:]), lines
    engine.run("docker", "stop", container)
    running.finish(LIMIT)


def test_a_wrong_option_or_checkpoint_is_reported_once(engine, project, image, volume):
    result = train(engine, project, volume, "--epochs", 0).finish(LIMIT)
    assert result.code == 2, result
    error = "train.py: error: argument --epochs: must be above 0, not 0\n"
    assert result.errors.endswith(f"first time\n{USAGE}{error}"), result
    (volume / "checkpoint.pt").write_text("damaged")
    to_user(volume / "checkpoint.pt")
    result = train(engine, project, volume).finish(LIMIT)
    assert result.code == 1, result
    assert result.errors.count("error") == 1 and "Traceback" not in result.errors, result
    assert "\nerror: --checkpoint checkpoint.pt: " in result.errors, result


def test_two_containers_by_compose(engine, project, undisturbed, volume):
    """They train like one with two processes, stop together and resume."""
    user = {"USER_ID": str(USER), "GROUP_ID": str(USER), "PWD": str(volume)}
    settings = engine.environment(OPTIONS=" ".join(OPTIONS), **user)
    compose = ["docker-compose", "--file", project / "08_docker/compose.yaml"]
    if not shutil.which("docker-compose", path=settings["PATH"]):
        pytest.skip("docker-compose is not installed")
    up = engine.as_user(volume, *compose, "up", "--no-color")
    first = Running(up, volume, **settings)
    wait_until_saved(volume, first)
    containers = engine.run("docker", "ps", "--quiet").split()
    assert len(containers) == 2
    engine.run("docker", "stop", *containers)
    result = first.finish(LIMIT)
    assert result.output.count("exited with code 1") == 2, result  # torchrun's
    stop = re.search(STOPPED, result.output)
    assert stop, result
    rest = Running(up, volume, **settings).finish(LIMIT)
    assert f"resuming from checkpoint.pt, {stop[1]}\n" in rest.output, rest
    assert rest.output.count("exited with code 0") == 2, rest
    assert equal(volume / "mnist.pt", undisturbed[1] / "mnist.pt")
    assert {path.stat().st_uid for path in volume.iterdir()} == {USER}


def test_two_machines_by_run_sh(engine, project, undisturbed, volume):
    """The commands of both machines, here on one: its network is the containers' as well."""
    settings = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "10.78.0.1"}
    nodes = []
    for rank in ("0", "1"):
        (volume / rank).mkdir()
        node = to_user(volume / rank)
        nodes.append(train(engine, project, node, NODE_RANK=rank, **settings))
    results = [node.finish(LIMIT) for node in nodes]
    assert [result.code for result in results] == [0, 0], results
    assert results[0].epochs()[-1]["accuracy"] == undisturbed[0].epochs()[-1]["accuracy"]
    assert equal(volume / "0/mnist.pt", undisturbed[1] / "mnist.pt")
    assert not (volume / "1/mnist.pt").exists()
