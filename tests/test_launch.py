"""Launch files start what they show, and scripts take the options they are given."""

import re
import shlex
import sys

import pytest
from helpers import FOLDERS, ROOT, copy_project, each_row, module, run, run_ranks, tools

ALONE = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node"
# folder | settings, with GPUS if nvidia-smi is installed | threads | what run.sh starts
LAUNCHES = """
01_dataparallel | | | python HERE/train.py
02_ddp_spawn | | | python HERE/train.py
03_ddp_multinode_spawn | | | python HERE/train.py --nodes 1 --node-rank 0 \
--master-addr 127.0.0.1 --master-port 29500
03_ddp_multinode_spawn | NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 | | \
python HERE/train.py --nodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500
04_ddp_torchrun | | 6 | ALONE=2 HERE/train.py
04_ddp_torchrun | GPUS=1 | | ALONE=gpu HERE/train.py
04_ddp_torchrun | GPUS=1 NPROC=5 | 3 | ALONE=5 HERE/train.py
04_ddp_torchrun | NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 OMP_NUM_THREADS=7 | 7 | \
torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=10.0.0.1 \
--master-port=29500 HERE/train.py
05_model_parallel | SCRIPT=fsdp.py | 6 | ALONE=2 HERE/fsdp.py
05_model_parallel | GPUS=1 SCRIPT=fsdp.py | | ALONE=gpu HERE/fsdp.py
05_model_parallel | GPUS=1 | 6 | ALONE=2 HERE/train.py
05_model_parallel | GPUS=1 SCRIPT=pipeline.py | 6 | ALONE=2 HERE/pipeline.py
06_checkpointing | GPUS=1 | | ALONE=gpu --max-restarts=3 HERE/train.py
06_checkpointing | RDZV_ENDPOINT=h:29400 'RDZV_ID=a run' | 6 | torchrun --nnodes=1:2 \
--nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=a run \
--rdzv-endpoint=h:29400 HERE/train.py
"""


@each_row(LAUNCHES)
def test_run_sh_starts(row, tmp_path):
    """With 12 cores, in another folder; threads per process are rounded up."""
    folder, settings, threads, launch = row
    settings = dict(each.split("=") for each in shlex.split(settings))
    echo = 'echo "%s $OMP_NUM_THREADS" "$@"'
    fake = {name: echo % name for name in ("python", "torchrun")}
    if "GPUS" in settings:
        fake["nvidia-smi"] = "exit 1"
    script = ROOT / folder / "run.sh"
    path = tools(tmp_path / "fake", bare=True, nproc="echo 12", **fake)
    result = run(["bash", script, "--lr", "a b"], tmp_path, PATH=path, **settings)
    launch = launch.replace("ALONE", ALONE).replace("HERE", str(script.parent))
    launcher, arguments = launch.split(" ", 1)
    assert result.output == f"{launcher} {threads} {arguments} --lr a b\n", result


WRONG = {  # options that a script rejects, each of them alone
    "01_dataparallel/train.py": "--epochs 0; --batch-size 0; --output .; --epoch 3",
    "02_ddp_spawn/train.py": "--epochs 0; --nprocs 0; --output .; --epoch 3",
    "03_ddp_multinode_spawn/train.py": "--epochs 0; -n 2 -g 2,0; -n 2 -g 1,1,1; "
    "--output .; -n 2 --node-rank 2; --master 1",
    "04_ddp_torchrun/train.py": "--epochs -1; --batch-size 0; --output .; "
    "--device cuda; --device cpu --sync-bn; --sync",
    "05_model_parallel/train.py": "--epochs 0; --chunks 0; --output .; --devices cpu; "
    "--device cpu",
    "05_model_parallel/pipeline.py": "--epochs 0; --batch-size 5; --output .; "
    "--chunks 0; --schedule 1f1b --chunks 1; --chunk 2",
    "05_model_parallel/tensor_parallel.py": "--epochs 0; --hidden 0; --hidden 511; "
    "--output .; --hid 2",
    "05_model_parallel/fsdp.py": "--epochs 0; --accumulate 0; --save-every 0; "
    "--shards 0; --shards 3; --best mnist.pt; --output .; --best .; --width 6; "
    "--width 0; --device cuda; --check a",
    "06_checkpointing/train.py": "--epochs -1; --accumulate 0; --save-every 0; "
    "--output .; --best mnist.pt; --output a.pt --checkpoint b/../a.pt; "
    "--device cpu --sync-bn; --check a.pt",
}
WRONG = {script: given.split("; ") for script, given in WRONG.items()}


def error_of(script, options, monkeypatch, capsys, **launch):
    """What argparse prints below its usage if a script rejects these options."""
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [script, *options.split()])
    with pytest.raises(SystemExit, match="^2$"):
        module(ROOT / script).parse_args()
    last = capsys.readouterr().err.splitlines()[-1]
    return re.fullmatch(r"\S+: error: (.*)", last)[1]


@pytest.mark.parametrize(
    ("script", "options"),
    [(script, options) for script, given in WRONG.items() for options in given],
)
def test_a_wrong_option_is_rejected_and_named(
    script, options, tmp_path, monkeypatch, capsys
):
    """Before a group is made, data are loaded, or a file is touched."""
    monkeypatch.chdir(tmp_path)
    launch = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2") | {"RANK": "0"}
    error = error_of(script, options, monkeypatch, capsys, **launch)
    name = re.findall("--?[a-z][a-z-]*", options)[-1]  # options are not shortened
    assert name.replace("-g", "--nprocs") in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "script", [path for path, given in WRONG.items() if "--save-every 0" not in given]
)
def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(script, monkeypatch):
    """06 and fsdp.py write a checkpoint there, and soon."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("sys.argv", [script, "--output", "/sys/mnist.pt"])
    with pytest.raises(OSError, match="not permitted|denied|Read-only"):
        module(ROOT / script).parse_args()


@pytest.mark.parametrize("script", [path for path in WRONG if path > "04"])
def test_without_a_launcher_a_script_says_so(script, monkeypatch, capsys):
    assert "start it with torchrun" in error_of(script, "", monkeypatch, capsys)


@each_row("""
    01_dataparallel        |
    02_ddp_spawn           | --nprocs 2
    03_ddp_multinode_spawn | -n 1 -g 2
    04_ddp_torchrun        |
    06_checkpointing       |
""")
def test_random_numbers_differ_between_ranks_and_options_are_for_the_training(
    row, tmp_path
):
    """02 and 03 divide main()'s 7 threads by two, rounded up; the others have one."""
    folder, more = row[0], row[1].split()
    project = copy_project(
        tmp_path / "project", f"{folder}/train.py", small=("data", "model")
    )
    ranks = 1 if folder < "04" else 2
    options = ["--batch-size", 16, "--seed", 7, "--amp", "--compile", *more]
    given = {"CHANGES": "started", "FLOAT32": 1, "TEST_THREADS": 7}
    result = run_ranks("train.py", ranks, *options, cwd=project, **given)
    line = (
        r"^(\w+) on cpu in torch\.(\w+), gradients (\w+), seed (\d+), (\d+) threads, "
    )
    found = re.findall(f"{line}compiled (\\w+)$", result.output, re.M)
    evaluations = [each for each in found if each[0] == "evaluation"]
    numbers = sorted(int(seed) for _, _, _, seed, _, _ in evaluations)
    if folder[:2] == "06":  # others in each step
        assert len({*numbers}) == 2, result
    else:
        assert numbers == [7, 8][: 1 if folder[:2] == "01" else 2], result
    for what, dtype, gradients, _, threads, compiled in found:
        trains = what == "training"
        assert gradients == compiled == str(trains), result
        assert threads == ("4" if "spawn" in folder else "1"), result
        assert dtype == ("bfloat16" if trains else "float32"), result


@pytest.mark.parametrize("above", [False, True])
def test_a_file_above_a_project_is_not_imported_in_place_of_pythons(above, tmp_path):
    """profile.py, which torch needs: above a copy, and in the folder with common/."""
    folder = tmp_path / "a project"
    copy_project(folder if above else folder / "copy", FOLDERS[0])
    if above:
        (folder / "scripts").mkdir()
        (folder / "train.py").rename(folder / "scripts/train.py")
    (folder / "profile.py").write_text("raise SystemExit('imported')")
    script = "scripts/train.py" if above else "copy/train.py"
    result = run([sys.executable, script, "--help"], folder)
    assert result.code == 0 and "--batch-size" in result.output, result


HERE = (
    "script.tempfile.tempdir = 'a ?b #c'; torch.save = lambda *_: print("
    "'modes', [oct(each.stat().st_mode) for each in os.scandir('a ?b #c')])"
)


def test_02_connects_through_a_file_of_its_user(tmp_path):
    """In a folder that only they may read, and that is gone at the end."""
    project = copy_project(tmp_path, f"{FOLDERS[1]}/train.py", small=("data", "model"))
    (temporary := project / "a ?b #c").mkdir()
    given = {"CHANGES": "started", "CHANGE": HERE}
    result = run_ranks("train.py", 1, "--nprocs", 2, cwd=project, **given)
    assert "modes ['0o40700']\n" in result.output, result
    assert not list(temporary.iterdir())


def test_03_only_this_machine_reaches_the_store(tmp_path):
    """As long as the address is its own: the default one, and ::1 if it has IPv6."""
    project = copy_project(tmp_path, f"{FOLDERS[2]}/train.py")
    result = run_ranks("train.py", 1, cwd=project, CHANGES="reached")
    assert {*result.output.split("\n")} == {"ECONNREFUSED", ""}, result
