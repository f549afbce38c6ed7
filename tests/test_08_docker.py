"""08 without an engine: run.sh with a fake docker that runs the command on this machine."""

import json
import re

from helpers.checks import check_trained, launch
from helpers.commands import bare_tools, fake_tools, run
from helpers.paths import ROOT

FOLDER = ROOT / "08_docker"
DOCKER = """
printf '%s\\n' "$*" >> calls
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
ENGINE = "run --rm --init --stop-timeout=120 --shm-size=1g"


def docker_run(folder, *options, tools=(), **settings):
    """The options and the command of run.sh's `docker run`, on a machine with these tools."""
    scripts = {"docker": 'echo "$*"', "id": "echo 7", **dict.fromkeys(tools, "")}
    path = bare_tools(folder / "bare", **scripts)
    result = run(["bash", FOLDER / "run.sh", *options], folder, PATH=path, **settings)
    assert result.code == 0, result
    build, start = result.output.splitlines()
    assert build == f"build --tag mnist-ddp --file {FOLDER}/Dockerfile {FOLDER}/.."
    return start.split(" mnist-ddp ")


def test_both_ranks_train_evaluate_and_save(repository, tmp_path):
    path = fake_tools(tmp_path / "fake", docker=DOCKER)
    result = launch(repository, "08_docker", "--epochs", 1, cwd=tmp_path, PATH=path, NPROC="2")
    check_trained(result, tmp_path, epochs=1, at_least=0.3)
    assert (tmp_path / "calls").read_text().endswith(" /app/train.py --epochs 1\n")


def test_gpus_and_two_machines(tmp_path):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    options, command = docker_run(tmp_path, "--amp", tools=["nvidia-smi"], **nodes)
    network = "--env GLOO_SOCKET_IFNAME --env NCCL_SOCKET_IFNAME --network=host"
    threads, volume = "--env OMP_NUM_THREADS", "--user 7:7 --volume {}:/work"
    assert options == f"{ENGINE} --gpus=all {threads} {network} {volume.format(tmp_path)}"
    assert command == ("torchrun --nnodes=2 --node-rank=1 --nproc-per-node=gpu "
                       "--master-addr=10.0.0.1 --master-port=29500 /app/train.py --amp")
    for folder, tools, gpus in (("one", ["nvidia-smi"], "--gpus=all "), ("without", [], "")):
        options, _ = docker_run(folder := tmp_path / folder, tools=tools)
        assert options == f"{ENGINE} {gpus}{threads} {volume.format(folder)}"


def test_the_dockerfile_and_compose_run_the_same_torchrun(tmp_path):
    """With the same time to save after a signal, which process 1 forwards."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", "")
    (words,) = re.findall(r"^CMD (.*)", text, re.M)
    assert " ".join(json.loads(words)) == docker_run(tmp_path)[1]
    (variables,) = re.findall(r"^ENV (.*)", text, re.M)
    assert {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110",
            "HOME=/tmp", "USER=trainer"} == set(variables.split())
    text = (FOLDER / "compose.yaml").read_text()
    lines = {line.split("  #")[0].strip() for line in text.splitlines()}
    assert {"init: true", "stop_grace_period: 120s", "shm_size: 1gb", "- ${PWD}:/work",
            "user: ${USER_ID:-1000}:${GROUP_ID:-1000}"} <= lines
    shown = re.findall(r"command: >-\n((?: {6}.*\n)+)", text)
    for rank in (0, 1):
        settings = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "node0", "NODE_RANK": str(rank)}
        _, command = docker_run(tmp_path / str(rank), **settings)
        assert " ".join(shown.pop(0).split()) == command + " ${OPTIONS:-}"
    assert not shown
