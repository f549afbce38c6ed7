"""08 without an engine: run.sh with a fake docker that runs the command on this machine."""

import json
import re

import pytest
from helpers.commands import bare_tools, fake_tools, run
from helpers.paths import ROOT

FOLDER = ROOT / "08_docker"
DOCKER = """
printf '%s\\n' "$*" >> "${0%/*}/calls"
if [ "$1" = build ]; then exit; fi
while [ "$1" != mnist-ddp ]; do shift; done
shift
for word in "$@"; do
  shift
  if [ "$word" = /app/train.py ]; then word="$(readlink data)/../08_docker/train.py"; fi
  set -- "$@" "$word"
done
exec "$@"
"""


def fake_docker(folder):
    """A PATH with a fake docker, which writes the commands that it receives to a file."""
    return fake_tools(folder / "fake", docker=DOCKER)


def docker_run(folder, *options, tools=(), **settings):
    """The options and the command of run.sh's `docker run`, on a machine with these tools."""
    scripts = {"docker": 'echo "$*"', "id": "echo 7", **dict.fromkeys(tools, "")}
    path = bare_tools(folder / "bare", **scripts)
    result = run(["bash", FOLDER / "run.sh", *options], folder, PATH=path, **settings)
    assert result.code == 0, result
    build, start = result.output.splitlines()
    assert build.startswith("build --tag mnist-ddp --file ")
    return start.split(" mnist-ddp ")


@pytest.mark.launch("08_docker", "--epochs", 3, tools=fake_docker, NPROC="2")
def test_both_ranks_train_evaluate_and_save(launched):
    launched.check()
    build, train = (launched.place / "fake/calls").read_text().splitlines()
    here = launched.repository / "08_docker"
    assert build == f"build --tag mnist-ddp --file {here}/Dockerfile {here}/.."
    assert train.endswith(" --max-restarts=3 /app/train.py --epochs 3")


def test_gpus_and_two_machines(tmp_path):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    options, command = docker_run(tmp_path, "--amp", tools=["nvidia-smi"], **nodes)
    assert {"--gpus=all", "--network=host", "GLOO_SOCKET_IFNAME"} <= set(options.split())
    assert f"--user 7:7 --volume {tmp_path}:/work" in options
    words = {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--nproc-per-node=gpu"}
    assert words <= set(command.split()) and command.endswith(" /app/train.py --amp")
    options, command = docker_run(tmp_path / "none of them")
    assert not re.search("--gpus|--network", options)
    assert "--nproc-per-node=2" in command and command.endswith(" /app/train.py")


def test_the_dockerfile_and_compose_run_the_same_torchrun(tmp_path):
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", "")
    (words,) = re.findall(r"^CMD (.*)", text, re.M)
    assert " ".join(json.loads(words)) == docker_run(tmp_path)[1]
    shown = re.findall(r"command: >-\n((?: {6}.*\n)+)", (FOLDER / "compose.yaml").read_text())
    for rank in (0, 1):
        settings = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "node0", "NODE_RANK": str(rank)}
        _, command = docker_run(tmp_path / str(rank), **settings)
        assert " ".join(shown.pop(0).split()) == command + " ${OPTIONS:-}"
    assert not shown
