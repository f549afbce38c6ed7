"""The launch files: their form, and what they start."""

import os
import re
import shutil
import subprocess

import pytest
from helpers.commands import bare_tools, fake_tools, run
from helpers.paths import ROOT, label

LAUNCHERS = sorted(ROOT.glob("0*/run.sh"))
STANDALONE = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="
SPAWN = "python {{}}/train.py --nodes {} --node-rank {} --master-addr"
GPUS = {"GPUS": "1"}  # for the test: nvidia-smi is installed
STATIC = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize("path", LAUNCHERS, ids=label)
def test_form(path):
    lines = path.read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")][0] == "set -eu"
    assert max(map(len, lines)) <= 100
    launches = [number for number, line in enumerate(lines) if re.match(" *(exec|srun) ", line)]
    assert launches and launches[-1] < 20  # within the first screen
    if shutil.which("shellcheck"):
        check = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=60)
        assert check.returncode == 0, check.stdout


@pytest.mark.parametrize(("folder", "settings", "threads", "launch"), [
    ("01_dataparallel", {}, "", "python {}/train.py"),
    ("02_ddp_spawn", {}, "", "python {}/train.py"),
    ("03_ddp_multinode_spawn", {}, "", f"{SPAWN.format(1, 0)} 127.0.0.1 --master-port 29500"),
    ("03_ddp_multinode_spawn", STATIC, "", f"{SPAWN.format(2, 1)} 10.0.0.1 --master-port 29500"),
    ("04_ddp_torchrun", {}, "6", f"{STANDALONE}2 {{}}/train.py"),
    ("04_ddp_torchrun", GPUS, "", f"{STANDALONE}gpu {{}}/train.py"),
    ("04_ddp_torchrun", {**GPUS, "NPROC": "5"}, "3", f"{STANDALONE}5 {{}}/train.py"),
    ("04_ddp_torchrun", {"NPROC": "30"}, "1", f"{STANDALONE}30 {{}}/train.py"),
    ("04_ddp_torchrun", {**STATIC, "OMP_NUM_THREADS": "7"}, "7",
     "torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=10.0.0.1 "
     "--master-port=29500 {}/train.py"),
    ("05_model_parallel", {"SCRIPT": "fsdp.py"}, "6", f"{STANDALONE}2 {{}}/fsdp.py"),
    ("06_checkpointing", {"NNODES": "1"}, "6", f"{STANDALONE}2 --max-restarts=3 {{}}/train.py"),
    ("06_checkpointing", GPUS, "", f"{STANDALONE}gpu --max-restarts=3 {{}}/train.py"),
    ("06_checkpointing", {"RDZV_ENDPOINT": "h:29400"}, "6",
     "torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d "
     "--rdzv-id=train --rdzv-endpoint=h:29400 {}/train.py"),
])
def test_launches(folder, settings, threads, launch, tmp_path):
    """With 12 cores, in another folder; threads are rounded up."""
    echo = '$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $OMP_NUM_THREADS" "$@"'
    tools = {name: f'echo "{name} {echo}' for name in ("python", "torchrun")}
    tools |= {"getconf": "echo 12"} | ({"nvidia-smi": "exit 1"} if "GPUS" in settings else {})
    path = bare_tools(tmp_path / "fake", **tools)
    script = ROOT / folder / "run.sh"
    result = run(["bash", script, "--lr", "a b"], tmp_path, PATH=path, **settings)
    launcher, arguments = launch.format(script.parent).split(" ", 1)
    assert (result.code, result.errors) == (0, ""), result
    limit = "120" if folder[:2] in ("05", "06") else ""  # seconds to save after a signal
    assert result.output == f"{launcher} {limit} {threads} {arguments} --lr a b\n", result


def test_06_starts_no_separate_job_on_each_of_several_nodes(tmp_path):
    path = fake_tools(tmp_path / "fake", python="echo 2", torchrun="echo started")
    result = run(["bash", ROOT / "06_checkpointing/run.sh"], tmp_path, PATH=path, NNODES="2")
    assert result.code and not result.output, result
    assert "RDZV_ENDPOINT: unbound variable" in result.errors, result


def test_any_script_can_be_launched(tmp_path):
    """One that prints when it is imported, and has no options."""
    shutil.copy(ROOT / "04_ddp_torchrun/run.sh", tmp_path)
    show = "'my script {LOCAL_WORLD_SIZE} {OMP_NUM_THREADS}\\n'.format(**os.environ).encode()"
    (tmp_path / "train.py").write_text(f"import os\nos.write(1, {show})  # in one piece\n")
    result = run(["bash", "run.sh"], tmp_path)
    threads = (os.cpu_count() + 1) // 2
    assert (result.code, result.output) == (0, f"my script 2 {threads}\n" * 2), result
