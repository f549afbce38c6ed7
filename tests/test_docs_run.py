"""Commands and programs in the READMEs run, and print what is shown."""

import re
import shlex
import sys

import pytest
from helpers.commands import free_port, run
from helpers.paths import ROOT, label
from helpers.projects import copy_repository, edit
from helpers.ranks import run_ranks
from helpers.readmes import COPIED, READMES, blocks, commands, sections
from helpers.scripts import parse
from torch.distributed.run import get_args_parser

LEARNED = 1.5  # a loss: it begins at 2.3, and label smoothing keeps it above 0.5
NOT_RUN = {  # a pattern of commands, and why test_every_command_runs leaves them out
    r"pip install": "CI runs both in a fresh clone",
    r"10\.0\.0\.1|/shared/": "needs a second machine, as slow/test_hosts.py has",
    r"cuda:0,cuda:1": "needs two GPUs",
    r"--compile": "needs a C++ compiler",
    r"pkill|python tests/": "is for a run of the reader's, or takes many minutes",
    r"sbatch|salloc|srun|scontrol|scancel|sinfo": "needs Slurm",
    r"docker": "needs a container engine",
    r"pytest": "runs the tests",
}


@pytest.mark.parametrize("folder", ["02_ddp_spawn", "04_ddp_torchrun"])
def test_the_smallest_form_prints_what_is_shown(folder, tmp_path):
    text = sections(ROOT / folder / "README.md")["The smallest form"]
    (program,), (shown,) = blocks(text, "python"), blocks(text, "text")
    (tmp_path / "small.py").write_text(program.replace("29500", str(free_port())))
    if folder.startswith("02"):
        result = run([sys.executable, "small.py"], tmp_path, PYTHONUNBUFFERED="")  # whole lines
    else:
        result = run_ranks("small.py", 2, cwd=tmp_path)
    assert sorted(result.output.splitlines()) == shown.splitlines(), result


def parts(command):
    """The environment, launcher and its options, script and its options; no script: None."""
    words = shlex.split(command.replace("$(", "").split("&&")[-1].removesuffix(" &"))
    is_script = re.compile(r"(.*/)?(0\d_\w+|my_project|/app)/(train|run|\w+)\.(py|sh)")
    place = next((n for n, word in enumerate(words) if is_script.fullmatch(word)), None)
    if place is None or words[0] in ("git", "diff", "cp", "patch", "pkill", "grep"):
        return None
    settings = dict(word.split("=", 1) for word in words[:place] if re.match(r"[A-Z_]+=", word))
    folder, name = words[place].rsplit("/", 1)
    folder = {"/app": "06_checkpointing", "my_project": "04_ddp_torchrun"}.get(folder, folder)
    if name == "run.sh":
        name = settings.get("SCRIPT", "train.py")
    script = ROOT / name if "/" in name else ROOT / folder / name
    return settings, words[:place], script, words[place + 1 :]


@pytest.mark.parametrize("path", READMES, ids=label)
def test_scripts_and_torchrun_accept_the_options_shown(path, tmp_path, monkeypatch):
    """Those in README, in the docstrings of its folder's scripts and in run.sh's comments."""
    monkeypatch.chdir(tmp_path)
    docstrings = "".join(script.read_text() for script in path.parent.glob("*.py"))
    comments = "".join(script.read_text() for script in path.parent.glob("run.sh"))
    shown = re.findall(r"^ {4}((?:python|torchrun|bash|sbatch) (?:.*\\\n)*.*)", docstrings, re.M)
    shown += re.findall(r"^#.*?((?:[A-Z_]+=\S+ )*s?ba(?:sh|tch) 0\d_.*)", comments, re.M)
    for command in [*commands(path), *(command.replace("\\\n", "") for command in shown)]:
        if not parts(command):
            continue
        settings, launcher, script, options = parts(command)
        assert script.exists(), command
        is_split = label(script) == "05_model_parallel/train.py"  # one process for two devices
        nodes, processes = 1, int(settings.get("NPROC", 1 if is_split else 2))
        if "torchrun" in launcher:
            words = launcher[launcher.index("torchrun") + 1 :]
            arguments = get_args_parser().parse_args([*words, str(script)])
            nodes = int(arguments.nnodes.split(":")[-1])
            processes = int(arguments.nproc_per_node)
        launch = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": processes}
        options = [option.replace("/shared/", "") for option in options]
        gpus = 1 if "CUDA_VISIBLE_DEVICES" in settings else 8
        parse(monkeypatch, script, *options, gpus=gpus, WORLD_SIZE=nodes * processes, **launch)


@pytest.fixture
def sandbox(tmp_path):
    """A copy of the repository with few digits, also for MNIST, and therefore three epochs."""
    copy = copy_repository(tmp_path / "copy")
    for script in copy.glob("0*/*.py"):
        if script.name in ("selftest.py", "fsdp.py"):  # fsdp.py has three anyway
            continue
        edit(copy, script.relative_to(copy), ('default=1, help="passes', 'default=3, help="passes'))
    return copy


def test_the_programs_in_the_readmes(tmp_path):
    """The collectives, the loop over the loader, a numbered print, and one file for two ranks."""
    shown = sections(COPIED)["Collectives as a program"]
    (collectives,), (printed,) = blocks(shown, "python"), blocks(shown, "text")
    _, loader = blocks((ROOT / "tests/README.md").read_text(), "python")
    page = sections(ROOT / "04_ddp_torchrun/README.md")
    (numbered_print,) = blocks(page["Find a hang"], "python")
    (save,) = [each for each in blocks((ROOT / "06_checkpointing/README.md").read_text(), "python")
               if "dist.barrier()" in each]
    given = "import time\ntrain_loader = [(None, [0] * 64)]\n"
    given += "net = torch.nn.Linear(2, 1)\nnet.weight.data.fill_(rank + 5)\n"
    program = collectives + given + loader + numbered_print + save
    program += "print('weights', net.weight.tolist(), flush=True)\ndist.destroy_process_group()\n"
    (tmp_path / "program.py").write_text(program)
    result = run_ranks("program.py", 2, cwd=tmp_path)
    (figure,) = blocks(page["Collectives"], "text")
    for row in re.findall(r"^[a-z-]+ +│.*", figure, re.M):
        name, *cells, _ = re.split(" *[│→]+ *", row)
        one, other, *after = [[float(number) for number in cell.split(", ")]
                              for cell in cells if cell]
        sums = [sum(pair) for pair in zip(one, other, strict=True)]
        assert after == {"all-reduce": [sums, sums], "broadcast": [one, one],
                         "all-gather": [one + other] * 2,
                         "reduce-scatter": [sums[:1], sums[1:]]}[name]
        assert all(f"rank {rank}: {name} {after[rank]}" in printed for rank in (0, 1))
    expected = printed.splitlines() + ["weights [[5.0, 5.0]]"] * 2
    for rank in ("rank 0", "rank 1"):
        expected += [f"{rank} on HOST reached point 1", f"{rank} on HOST passed point 1"]
        expected += [f"{rank} reads N images/s"]
    found = re.sub(r"(?<= on )\S+", "HOST", re.sub(r"\d+(?= images/s)", "N", result.output))
    assert sorted(found.splitlines()) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("path", READMES, ids=label)
def test_every_command_runs(path, sandbox):
    """Those that other READMEs show as well are run with the first of them."""
    earlier = [command for each in READMES[: READMES.index(path)] for command in commands(each)]
    for command in commands(path):
        if command in earlier or any(re.search(pattern, command) for pattern in NOT_RUN):
            continue
        result = run(["bash", "-c", command], sandbox, limit=300, OMP_NUM_THREADS="1")
        if "terminate called" in result.errors and "05_model_parallel" in command:
            result = run(["bash", "-c", command], sandbox, OMP_NUM_THREADS="1")  # see its Pitfalls
        expected = 1 if command.startswith(("git", "diff")) else 0  # 1: there are differences
        assert result.code == expected, result
        if parts(command) and "selftest" not in command:
            # 06 and fsdp.py, a second time
            finished = re.search("^resuming from .* at {'epoch': 4,", result.output, re.M)
            loss = float(re.findall(r" loss (\S+)", result.output)[-1]) if not finished else 0
            few_steps = "--accumulate 8" in command or "fsdp.py" in command  # a transformer
            assert few_steps or loss < LEARNED, result
