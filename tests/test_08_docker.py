"""08: in real containers, on one node and on two, stopped and resumed; and what run.sh does without an engine."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from engine import USER, Engine
from helpers import ROOT, Running, bare_accuracy, equal, run, wait_until
from test_shell import bare_tools, fake_tools

FOLDER = ROOT / "08_docker"
RUN = FOLDER / "run.sh"
DIGITS = ["--data-dir", "/app/common"]  # those in the image


@pytest.fixture(scope="module")
def engine(hosts):
    """A real engine; where that cannot be, what needs it is skipped."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # pytest's own folders are root's alone
        try:
            engine = Engine(hosts, Path(name))
        except OSError as error:
            pytest.skip(f"no Docker on this machine: {error}")
        yield engine
        engine.end()


@pytest.fixture
def place():
    """A folder of the user who runs run.sh."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, USER, USER)
        yield Path(name)


@pytest.fixture(scope="module")
def project():
    """A copy of what the README says to copy, with things around it that no image may hold."""
    with tempfile.TemporaryDirectory() as name:
        project = Path(name, "a project")
        for folder in ("08_docker", "common"):
            shutil.copytree(ROOT / folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("requirements.txt", ".dockerignore"):
            shutil.copy(ROOT / file, project)
        for junk in ("checkpoint.pt", "data/train-images-idx3-ubyte", ".git/config", "08_docker/mnist.pt", "pip.conf"):
            (project / junk).parent.mkdir(exist_ok=True)
            (project / junk).write_text("a-secret")
        Path(name).chmod(0o755)
        yield project


def train(engine, project, place, *options, **settings):
    """Start run.sh in a folder, as a user who is not root."""
    command = engine.on(place, "bash", project / "08_docker/run.sh", *DIGITS, *options)
    return Running(command, place, **engine.environment(**settings))


@pytest.fixture(scope="module")
def built(engine, project):
    """What building the image has printed: on a base made here, with a pip.conf that is needed and secret."""
    (base,) = re.findall(r"^ARG BASE_IMAGE=(.*)", (FOLDER / "Dockerfile").read_text(), re.M)
    engine.make_base(base)
    options = f"--secret=id=pip.conf,src={engine.offer_wheels()}"
    with tempfile.TemporaryDirectory() as name:
        result = Running(
            engine.hosts.on("h0", name, "bash", project / "08_docker/run.sh", "--epochs=0"),
            name,
            **engine.environment(BUILD_OPTIONS=options),
        ).finish(300)
    assert result.code == 2 and "train.py: error: --epochs must be above 0" in result.errors, result
    return result.errors


@pytest.fixture(scope="module")
def undisturbed(engine, project, built):
    """A training that nothing disturbs: its result, and the folder that is its volume."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, USER, USER)
        yield train(engine, project, Path(name)).finish(), Path(name)


def test_one_container_trains_in_two_processes(undisturbed):
    result, place = undisturbed
    assert result.code == 0, result
    epochs = result.epochs()
    assert [epoch["epoch"] for epoch in epochs] == ["1", "2", "3"] and float(epochs[-1]["accuracy"]) >= 0.95
    assert f"{bare_accuracy(place / 'mnist.pt'):.4f}" == epochs[-1]["accuracy"]
    owners = {path.name: path.stat().st_uid for path in place.iterdir()}
    assert owners == dict.fromkeys(("checkpoint.pt", "checkpoint.pt.previous", "mnist.pt"), USER)


def test_the_image_holds_the_code_and_no_secret_and_no_data(engine, built):
    history = engine.ask("docker", "history", "--no-trunc", "mnist-ddp")
    assert "a-password" not in history and "28080" not in history and "pip install" in history
    look = "find /app -type f; grep -rl -e a-password -e a-secret /app /etc /home /root /tmp; "
    look += "find / -xdev -name '*ubyte*' -o -xdev -name 'checkpoint.pt*' -o -xdev -name mnist.pt"
    found = engine.call("docker", "run", "--rm", "--entrypoint=bash", "mnist-ddp", "-c", look).stdout.split()
    code = ["train.py", "checkpoint.py", "join.py", "entrypoint.sh", "requirements.txt"]
    code += [f"common/{name}" for name in ("__init__.py", "data.py", "digits.bin", "gather.py", "model.py")]
    assert sorted(found) == sorted(f"/app/{name}" for name in code)
    (image,) = json.loads(engine.ask("docker", "image", "inspect", "mnist-ddp"))
    assert image["Config"]["User"] == "1000"
    assert image["Size"] < 1.4e9


def test_other_code_takes_the_dependencies_from_the_cache(engine, project, built):
    """What is asked for is in a layer of its own, before the code."""
    script = project / "08_docker/train.py"
    before = script.read_text()
    try:
        script.write_text(before + "\n")
        build = [
            "docker",
            "build",
            "--progress=plain",
            "--tag=other",
            f"--file={project}/08_docker/Dockerfile",
            project,
        ]
        result = engine.call("env", "DOCKER_BUILDKIT=1", *build)
    finally:
        script.write_text(before)
    assert result.returncode == 0, result.stderr
    steps = dict(re.findall(r"^#(\d+) \[\d/\d\] (.*)", result.stderr, re.M))
    cached = {steps.get(number) for number in re.findall(r"^#(\d+) CACHED", result.stderr, re.M)}
    assert any("pip install" in step for step in cached if step), result.stderr
    assert not any("train.py" in step for step in cached if step), result.stderr


def wait_until_saved(running, place):
    wait_until((place / "checkpoint.pt.previous").exists, running)


def test_stopped_it_saves_and_goes_on(engine, project, undisturbed, place):
    running = train(engine, project, place, "--save-every", 5)
    wait_until_saved(running, place)
    (container,) = engine.ask("docker", "ps", "--quiet").split()
    processes = engine.ask("docker", "top", container)
    assert len(re.findall(r"python\S* -u /app/train\.py", processes)) == 2, processes
    (state,) = json.loads(engine.ask("docker", "inspect", container))
    assert state["Config"]["User"] == f"{USER}:{USER}" and state["HostConfig"]["Init"]
    look = "touch /x /app/x /home/x; touch /work/x /tmp/x && rm /work/x && df --output=size -m /dev/shm"
    inside = engine.call("docker", "exec", container, "bash", "-c", look)
    assert inside.stderr.count("Read-only file system") == 3 and inside.stdout.split()[-1] == "1024", inside
    engine.ask("docker", "stop", container)
    result = running.finish()
    assert result.code == 75, result
    stop = re.search(r"^stopped in (epoch \d/3 after \d+ of 12942 images): the same", result.output, re.M)
    rest = train(engine, project, place).finish()
    assert rest.code == 0, rest
    assert rest.output.startswith(f"going on from checkpoint.pt, in {stop[1]}\n"), rest
    assert equal(place / "mnist.pt", undisturbed[1] / "mnist.pt")


def test_a_bad_option_is_refused_in_a_line(engine, project, undisturbed, place):
    result = train(engine, project, place, "--epochs", 0).finish()
    assert result.code == 2, result
    assert result.errors.endswith("\ntrain.py: error: --epochs must be above 0\n"), result


def test_two_containers_train_as_one_with_two_processes_stopped_and_resumed(engine, project, undisturbed, place):
    compose = next((tool for tool in (["docker-compose"], ["docker", "compose"]) if works(engine, tool)), None)
    if compose is None:
        pytest.skip("no docker compose on this machine")
    settings = {"USER_ID": str(USER), "GROUP_ID": str(USER), "OPTIONS": " ".join([*DIGITS, "--save-every", "5"])}
    up = engine.on(place, *compose, "--file", project / "08_docker/compose.yaml", "up", "--no-color")
    first = Running(up, place, **engine.environment(PWD=str(place), **settings))
    wait_until_saved(first, place)
    containers = engine.ask("docker", "ps", "--quiet").split()
    assert len(containers) == 2
    engine.ask("docker", "stop", *containers)
    codes = engine.ask("docker", "inspect", "--format={{.State.ExitCode}}", *containers).split()
    assert codes == ["1", "1"], first.printed()  # of torchrun on several nodes, as the README says
    result = first.finish()
    stop = re.search(r"stopped in (epoch \d/3 after \d+ of 12942 images): the same", result.output)
    rest = Running(up, place, **engine.environment(PWD=str(place), **settings)).finish()
    assert f"going on from checkpoint.pt, in {stop[1]}\n" in rest.output, rest
    assert rest.output.count("exited with code 0") == 2, rest
    assert equal(place / "mnist.pt", undisturbed[1] / "mnist.pt")
    owners = {path.stat().st_uid for path in place.iterdir()}
    assert owners == {USER}


def works(engine, tool):
    return engine.call("bash", "-c", f"{' '.join(tool)} version").returncode == 0


# Without an engine


@pytest.mark.parametrize("docker", [None, ["exit 1"]])
def test_without_an_engine_it_says_so(docker, tmp_path):
    tools = {"docker": docker} if docker else {}
    result = run(["bash", RUN], tmp_path, PATH=bare_tools(tmp_path / "bare", **tools))
    assert result.code == 1, result
    line = "run.sh: no container engine answers (`docker info`): install Docker, start it, join its group"
    assert result.errors == f"{line}\n", result


def docker_run(folder, *options, tools=None, **settings):
    """The arguments of `docker run` that run.sh ends in."""
    docker = ['case "$1" in', '  run) shift; printf "%s\\n" "$@" ;;', "esac"]
    path = fake_tools(folder / "fake", docker=docker, **tools or {})
    result = run(["bash", RUN, *options], folder, PATH=path, **settings)
    assert result.code == 0, result
    return result.output.splitlines()


def test_several_machines_meet_on_their_own_network(tmp_path):
    arguments = docker_run(tmp_path, NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert arguments[arguments.index("--network") + 1] == "host"
    passed = {arguments[place + 1] for place, argument in enumerate(arguments) if argument == "--env"}
    assert {"NNODES", "NODE_RANK", "MASTER_ADDR", "NPROC", "OMP_NUM_THREADS"} <= passed


def test_gpus_and_data_go_in_if_there_are_any(tmp_path):
    (tmp_path / "data set").mkdir()
    arguments = docker_run(tmp_path, "--amp", tools={"nvidia-smi": []}, DATA_DIR="data set")
    assert arguments[arguments.index("--gpus") + 1] == "all"
    assert f"type=bind,source={tmp_path}/data set,target=/data,readonly" in arguments
    assert arguments[-4:] == ["mnist-ddp", "--data-dir", "/data", "--amp"]
    (tmp_path / "without").mkdir()
    arguments = docker_run(tmp_path / "without")
    assert "--network" not in arguments and not any("/data" in argument for argument in arguments)


def test_hadolint_finds_nothing():
    if not shutil.which("hadolint"):
        pytest.skip("hadolint is not installed")
    check = subprocess.run(["hadolint", FOLDER / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert check.returncode == 0 and not check.stdout, check.stdout


def test_compose_reads_the_file(tmp_path):
    """The two nodes differ in their rank alone."""
    tools = [tool for tool in (["docker", "compose"], ["docker-compose"]) if shutil.which(tool[0])]
    for tool in tools:
        command = [*tool, "--file", FOLDER / "compose.yaml", "config"]
        check = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PWD": "/a/b"})
        if check.returncode == 0:
            break
    else:
        pytest.skip("no docker compose on this machine")
    node0, node1 = re.split(r"^  node1:$", check.stdout.split("  node0:\n")[1], flags=re.M)
    lines = [[line.strip() for line in node.splitlines() if line.startswith("    ")] for node in (node0, node1)]
    differing = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert len(differing) == 1 and all("NODE_RANK" in line for line in differing[0]), differing
    assert "/a/b:/work" in check.stdout or "source: /a/b" in check.stdout
