"""Launch files start what they show, and scripts take the devices and options they are given."""

import errno
import re

import pytest
from helpers import FOLDERS, ROOT, STARTED, copy_project, module, run, run_ranks, tools

STANDALONE = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="
SPAWN = "python {{}}/train.py --nodes {} --node-rank {} --master-addr"
GPUS = {"GPUS": "1"}  # for the test: nvidia-smi is installed
STATIC = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
MASTER = "--master-addr=10.0.0.1 --master-port=29500"


@pytest.mark.parametrize(("folder", "settings", "threads", "launch"), [
    ("01_dataparallel", {}, "", "python {}/train.py"),
    ("02_ddp_spawn", {}, "", "python {}/train.py"),
    ("03_ddp_multinode_spawn", {}, "", f"{SPAWN.format(1, 0)} 127.0.0.1 --master-port 29500"),
    ("03_ddp_multinode_spawn", STATIC, "", f"{SPAWN.format(2, 1)} 10.0.0.1 --master-port 29500"),
    ("04_ddp_torchrun", {}, "6", f"{STANDALONE}2 {{}}/train.py"),
    ("04_ddp_torchrun", GPUS, "", f"{STANDALONE}gpu {{}}/train.py"),
    ("04_ddp_torchrun", {**GPUS, "NPROC": "5"}, "3", f"{STANDALONE}5 {{}}/train.py"),
    ("04_ddp_torchrun", {**STATIC, "OMP_NUM_THREADS": "7"}, "7",
     f"torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 {MASTER} {{}}/train.py"),
    ("05_model_parallel", {"SCRIPT": "fsdp.py"}, "6", f"{STANDALONE}2 {{}}/fsdp.py"),
    ("05_model_parallel", GPUS | {"SCRIPT": "fsdp.py"}, "", f"{STANDALONE}gpu {{}}/fsdp.py"),
    ("05_model_parallel", GPUS, "6", f"{STANDALONE}2 {{}}/train.py"),
    ("05_model_parallel", GPUS | {"SCRIPT": "pipeline.py"}, "6", f"{STANDALONE}2 {{}}/pipeline.py"),
    ("06_checkpointing", GPUS, "", f"{STANDALONE}gpu --max-restarts=3 {{}}/train.py"),
    ("06_checkpointing", {"RDZV_ENDPOINT": "h:29400", "RDZV_ID": "a run"}, "6",
     "torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d "
     "--rdzv-id=a run --rdzv-endpoint=h:29400 {}/train.py"),
])
def test_run_sh_starts(folder, settings, threads, launch, tmp_path):
    """With 12 cores, in another folder; threads per process are rounded up."""
    fake = {name: f'echo "{name} $OMP_NUM_THREADS" "$@"' for name in ("python", "torchrun")}
    fake |= {"nproc": "echo 12"} | ({"nvidia-smi": "exit 1"} if "GPUS" in settings else {})
    script = ROOT / folder / "run.sh"
    path = tools(tmp_path / "fake", bare=True, **fake)
    result = run(["bash", script, "--lr", "a b"], tmp_path, PATH=path, **settings)
    launcher, arguments = launch.format(script.parent).split(" ", 1)
    assert result.output == f"{launcher} {threads} {arguments} --lr a b\n", result


WRONG = {
    "01_dataparallel/train.py": ["--epochs 0", "--batch-size 0", "--output ."],
    "02_ddp_spawn/train.py": ["--epochs 0", "--nprocs 0", "--output ."],
    "03_ddp_multinode_spawn/train.py": ["--epochs 0", "-n 2 -g 2,0", "-n 2 -g 1,1,1", "--output .",
                                        "-n 2 --node-rank 2"],
    "04_ddp_torchrun/train.py": ["--epochs -1", "--batch-size 0", "--output ."],
    "05_model_parallel/train.py": ["--epochs 0", "--chunks 0", "--output .", "--devices cpu"],
    "05_model_parallel/pipeline.py": ["--epochs 0", "--batch-size 5", "--output .", "--chunks 0",
                                      "--schedule 1f1b --chunks 1"],
    "05_model_parallel/tensor_parallel.py": ["--epochs 0", "--hidden 0", "--output ."],
    "05_model_parallel/fsdp.py": ["--epochs 0", "--accumulate 0", "--save-every 0", "--shards 0",
                                  "--shards 3", "--best mnist.pt", "--output .", "--best ."],
    "06_checkpointing/train.py": ["--epochs -1", "--accumulate 0", "--save-every 0", "--output .",
                                  "--best mnist.pt", "--output a.pt --checkpoint b/../a.pt"],
}


def error_of(script, options, monkeypatch, capsys, **launch):
    """What argparse prints below its usage if a script rejects these options."""
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [script, *options.split()])
    with pytest.raises(SystemExit, match="^2$"):
        module(ROOT / script).parse_args()
    return re.fullmatch(r"\S+: error: (.*)", capsys.readouterr().err.splitlines()[-1])[1]


@pytest.mark.parametrize(("script", "options"), [
    (script, options) for script, given in WRONG.items() for options in given])
def test_a_wrong_option_is_rejected_and_named(script, options, tmp_path, monkeypatch, capsys):
    """Before a process group is made or data are loaded, and before a file is touched."""
    monkeypatch.chdir(tmp_path)
    launch = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2") | {"RANK": "0"}
    error = error_of(script, options, monkeypatch, capsys, **launch)
    assert options.split()[-2].replace("-g", "--nprocs") in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [
    path for path, given in WRONG.items() if "--save-every 0" not in given])
def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(script, monkeypatch):
    """06 and fsdp.py write a checkpoint there, and soon."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("sys.argv", [script, "--output", "/sys/mnist.pt"])
    with pytest.raises(OSError, match="not permitted|denied|Read-only"):
        module(ROOT / script).parse_args()


@pytest.mark.parametrize("script", [path for path in WRONG if path > "04"])
def test_without_a_launcher_a_script_says_so(script, monkeypatch, capsys):
    assert "start it with torchrun" in error_of(script, "", monkeypatch, capsys)


@pytest.mark.parametrize(("folder", "more"), [
    (FOLDERS[0], []), (FOLDERS[1], ["--nprocs", 2]), (FOLDERS[2], ["-n", 1, "-g", 2]),
    (FOLDERS[3], []), (FOLDERS[5], [])])
def test_random_numbers_differ_between_ranks_and_options_are_for_the_training(
        folder, more, tmp_path):
    """02 and 03 divide main()'s 7 threads by their two processes; the others have one."""
    project = copy_project(tmp_path / "project", f"{folder}/train.py", small=("data", "model"))
    result = run_ranks("train.py", 1 if folder < "04" else 2, "--batch-size", 16, "--seed", 7,
                       "--amp", "--compile", *more, cwd=project, CHANGE=STARTED, FLOAT32=1,
                       TEST_THREADS=7)
    line = r"^(\w+) on cpu in torch\.(\w+), gradients (\w+), seed (\d+), (\d+) threads, compiled "
    found = re.findall(f"{line}(\\w+)$", result.output, re.M)
    numbers = sorted(int(seed) for what, *_, seed, _, _ in found if what == "evaluation")
    if folder[:2] == "06":  # others in each step
        assert len({*numbers}) == 2, result
    else:
        assert numbers == [7, 8][: 1 if folder[:2] == "01" else 2], result
    for what, dtype, gradients, _, threads, compiled in found:
        trains = what == "training"
        assert (gradients, threads) == (str(trains), "3" if "spawn" in folder else "1"), result
        assert (dtype, compiled) == ("bfloat16" if trains else "float32", str(trains)), result


HERE = ("script.tempfile.tempdir = 'a ?b #c'; torch.save = lambda *_: print("
        "'modes', [oct(each.stat().st_mode) for each in os.scandir('a ?b #c')])")


def test_02_connects_through_a_file_of_its_user(tmp_path):
    """In a folder that nobody else may read, and that is gone at the end, whatever TMPDIR is."""
    project = copy_project(tmp_path, f"{FOLDERS[1]}/train.py", small=("data", "model"))
    (temporary := project / "a ?b #c").mkdir()
    result = run_ranks("train.py", 1, "--nprocs", 2, cwd=project, CHANGE=STARTED + HERE)
    assert "modes ['0o40700']\n" in result.output and not list(temporary.iterdir()), result


STORE = ("multiprocessing.spawn = lambda *_: print([script.socket.socket().connect_ex((host, int("
         "os.environ['MASTER_PORT']))) for host in ('127.0.0.1', '127.0.0.2')])")


def test_03_only_this_machine_reaches_the_store(tmp_path):
    """As long as the address is the default one; 127.0.0.2 is another one."""
    project = copy_project(tmp_path, f"{FOLDERS[2]}/train.py")
    result = run_ranks("train.py", 1, "-n", 1, cwd=project, CHANGE=STARTED + STORE)
    assert f"[0, {errno.ECONNREFUSED}]\n" in result.output, result
