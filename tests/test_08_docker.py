"""08 without an engine: run.sh with a fake docker that runs the command on this machine."""

import json
import re
import sys

import pytest
from helpers import ROOT, bare_tools, fake_tools, run

FOLDER = ROOT / "08_docker"
RUN = FOLDER / "run.sh"
DOCKER = """
printf '%s\\n' "$*" >> "${0%/*}/calls"
case " $* " in
  *" --check --epochs 0 "*) echo wrong >&2; exit 2 ;;
  " info "* | " build "* | *" --check "*) exit ;;
esac
while [ "$1" != mnist-ddp ]; do shift; done
shift
for word in "$@"; do
  shift
  if [ "$word" = /app/train.py ]; then word="$(readlink data)/../08_docker/train.py"; fi
  set -- "$@" "$word"
done
exec "$@"
"""


def fake_docker(folder, **tools):
    """A PATH with a fake docker, which writes the commands that it receives to a file."""
    return fake_tools(folder / "fake", **{"nvidia-smi": "exit 1", "docker": DOCKER, **tools})


def commands(folder):
    return (folder / "fake/calls").read_text().splitlines()


def docker_run(folder, *options, tools=None, **settings):
    """The options and the command of the last `docker run` of run.sh, which starts no training."""
    path = fake_docker(folder, torchrun="", **tools or {})
    result = run(["bash", RUN, *options], folder, PATH=path, **settings)
    assert result.code == 0, result
    return commands(folder)[-1].split(" mnist-ddp ")


@pytest.mark.launch("08_docker", "--epochs", 3, tools=fake_docker)
def test_both_ranks_train_evaluate_and_save(launched):
    launched.check()
    *build, check, train = commands(launched.place)
    assert [line.split()[0] for line in build] == ["info", "build"]
    assert check.endswith(" mnist-ddp python /app/train.py --check --epochs 3")
    assert train.endswith(" --max-restarts=3 /app/train.py --epochs 3")


def test_a_wrong_option_ends_it_before_torchrun(tmp_path):
    result = run(["bash", RUN, "--epochs", 0], tmp_path, PATH=fake_docker(tmp_path))
    assert result.code == 2, result
    assert result.errors.splitlines()[1:] == ["wrong"], result
    assert not any("torchrun" in command for command in commands(tmp_path))


def test_on_a_terminal_the_check_has_none(tmp_path):
    """A container with a terminal writes its errors to standard output, which the check drops."""
    path = fake_docker(tmp_path, torchrun="")
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    result = run([sys.executable, "-c", spawn, "bash", RUN], tmp_path, PATH=path)
    assert result.code == 0, result
    check, train = commands(tmp_path)[-2:]
    assert "--check" in check and "--tty" not in check
    assert "--interactive --tty" in train


@pytest.mark.parametrize("docker", [{}, {"docker": "exit 1"}])
def test_without_an_engine(docker, tmp_path):
    result = run(["bash", RUN], tmp_path, PATH=bare_tools(tmp_path / "bare", **docker))
    assert result.code == 1, result
    (line,) = result.errors.splitlines()
    assert line.startswith("run.sh: no container engine answers (docker info): install"), result


def test_gpus_data_and_two_machines(tmp_path):
    (tmp_path / "data set").mkdir()
    nvidia = {"nvidia-smi": r"printf 'GPU %s\n' 0 1 2"}
    settings = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "DATA_DIR": "data set"}
    options, command = docker_run(tmp_path, "--amp", tools=nvidia, **settings)
    volume = f"--volume {tmp_path}/data set:/data:ro"
    for option in (volume, "--gpus all", "--network=host", "--env GLOO_SOCKET_IFNAME"):
        assert option in options
    nodes = {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--nproc-per-node=3"}
    assert nodes <= set(command.split())
    assert command.endswith(" /app/train.py --data-dir /data --amp")
    options, command = docker_run(tmp_path / "none of them")
    assert not re.search("--gpus|/data|--network", options)
    assert "--nproc-per-node=2" in command and command.endswith(" /app/train.py")


def test_the_dockerfile_and_compose_run_the_same_torchrun(tmp_path):
    (words,) = re.findall(r"^CMD (.*)", (FOLDER / "Dockerfile").read_text(), re.M)
    assert " ".join(json.loads(words)) == docker_run(tmp_path)[1]
    shown = re.findall(r"command: >-\n((?: {6}.*\n)+)", (FOLDER / "compose.yaml").read_text())
    for rank in (0, 1):
        settings = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "node0", "NODE_RANK": str(rank)}
        _, command = docker_run(tmp_path / str(rank), **settings)
        assert " ".join(shown.pop(0).split()) == command + " ${OPTIONS:-}"
    assert not shown
