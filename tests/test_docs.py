"""The READMEs are true: commands, options, defaults, diffs, steps, links and expected output.

Diffs, line counts and rank figures are generated. After a change, write them into the READMEs with

    REWRITE_DOCS=1 python -m pytest tests/test_docs.py
"""

import os
import re
import shlex
import subprocess

import pytest
from helpers import (
    EPOCH,
    FOLDERS,
    ROOT,
    Running,
    copy_repository,
    edit,
    fake_tools,
    free_port,
    label,
    parse,
    run,
    run_ranks,
)
from test_markers import BASES, SHOWN, code, marks
from torch.distributed.run import get_args_parser

MAIN = ROOT / "README.md"
READMES = [MAIN, *(ROOT / folder / "README.md" for folder in FOLDERS), ROOT / "tests/README.md"]
SCRIPTS = [path for path in sorted(ROOT.glob("0*/*.py")) if "def parse_args(" in path.read_text()]
PROSE = [*READMES, *ROOT.glob("0*/*.*"), *ROOT.glob("common/*.py"), ROOT / "08_docker/Dockerfile"]
SECTIONS = ["Run", "Expected output", "What changed", "Steps", "Pitfalls", "Copy it"]
SETUP = "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"
LAUNCHERS = ("python ", "torchrun ", "export TORCH_", "salloc ", "docker ")
NOT_ENGLISH = (  # what nobody says, or what programs do not do
    r"\bshall\b|\bgo(es|ing)? on\b|\banew\b|\bfor nothing\b|\bwho is who\b|\bbut for\b"
    r"|\bof (its|their|one's) own\b(?! \w)|\bbeside\b|\b(that|those) of\b|\balone\b(?! =|\W*[()])"
    r"|\b(speaks?|says?|carr(y|ies)|refuses?|meets?) |\b(batch|images|steps?) a (step|process)\b"
    r"|\b(one|each|per) process a GPU\b|\bstands? (in|on|for)\b|\bshares? out\b"
)
NOT_RUN = {  # a pattern of commands, and why test_every_command_runs leaves them out
    r"pip install": "CI runs both in a fresh clone",
    r"10\.0\.0\.1|/shared/": "needs a second machine; see test_the_commands_for_two_machines",
    r"cuda:0,cuda:1": "needs two GPUs",
    r"--compile": "needs a C++ compiler",
    r"-g 8": "needs the memory of eight processes",
    r" &$|kill \$!|tour\.pt": "runs in test_the_tour",
    r"pkill|python tests/": "kills a run of the reader's, or takes many minutes",
    r"sbatch|salloc|srun|scontrol": "needs Slurm",
    r"docker": "needs a container engine",
    r"pytest": "runs the tests",
}


def sections(path):
    """The text of each section of a README by its heading."""
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text, language):
    """The code blocks in a language, also those in a list."""
    text = re.sub(r"(?m)^   (?=\S)", "", text)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def commands(path):
    """The commands of a README in order, each in one line, without comments."""
    text = "".join(blocks(path.read_text(), "bash")).replace("\\\n", "")
    return [re.sub(" +", " ", line) for line in text.splitlines() if line[:1] not in ("", "#")]


def rows(text):
    """The rows of all tables, as dictionaries from the head of a column to the cell."""
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        head, _, *body = [re.split(r" *\| *", line[1:-1].strip()) for line in table.splitlines()]
        yield from (dict(zip(head, line, strict=True)) for line in body)


def hold(path, pattern, generated):
    """Compare what a README shows with what was generated; with REWRITE_DOCS, write it there."""
    text = path.read_text()
    (shown,) = re.findall(pattern, text, re.M | re.S)
    if "REWRITE_DOCS" in os.environ:
        path.write_text(text.replace(shown, generated))
    else:
        assert shown == generated, "run REWRITE_DOCS=1 python -m pytest tests/test_docs.py"


def git_diff(*arguments):
    command = ["git", "diff", "--no-index", "-w", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout


# The form of the READMEs


def test_the_first_two_commands():
    assert commands(MAIN)[:2] == [
        f"{SETUP} && bash 04_ddp_torchrun/run.sh",
        f"{SETUP} && python -m pytest",
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_sections_and_the_plain_command_first(folder):
    path = ROOT / folder / "README.md"
    found = list(sections(path))
    assert path.read_text().startswith(f"# {folder}\n")
    assert [name for name in found if name in SECTIONS] == SECTIONS
    assert found[0] == "Run" and found[-1] == "Copy it"
    assert commands(path)[0].startswith(LAUNCHERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_expected_output_has_the_form_of_the_output(folder):
    shown = blocks(sections(ROOT / folder / "README.md")["Expected output"], "text")[0]
    lines = [line for line in shown.splitlines() if not line.startswith("job ")]
    epochs = [EPOCH.fullmatch(line).groupdict() for line in lines]
    assert [line["epoch"] for line in epochs] == ["1", "2", "3"]
    assert float(epochs[-1]["accuracy"]) >= 0.985
    for line in epochs:  # the speed is that of MNIST's 60,000 images, within the rounded seconds
        seconds, speed = float(line["seconds"]), float(line["speed"])
        assert abs(seconds * speed - 60_000) <= 0.05 * speed + seconds


@pytest.mark.parametrize("path", READMES, ids=label)
def test_links_and_files_exist(path):
    text = path.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if target.startswith("https://"):
            continue
        target = (path.parent / target) if target else path
        assert target.exists(), target
        if anchor:
            readme = target / "README.md" if target.is_dir() else target
            headings = re.findall(r"^#+ (.*)", readme.read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings]
            assert anchor in anchors, anchor
    for name in re.findall(r"\b(?:0\d_\w+|common|tests)/[\w/]+\.\w+", text):
        assert (ROOT / name).exists(), name


def test_the_prose_is_plain_english():
    found = []
    for path in PROSE:
        text = " ".join(path.read_text().split())
        found += [f"{label(path)}: {match[0]}" for match in re.finditer(NOT_ENGLISH, text)]
    assert not found


# What the scripts and the READMEs say about the same thing


@pytest.mark.parametrize("folder", BASES)
def test_the_diff(folder):
    text = git_diff("--unified=0", f"{SHOWN[folder]}/train.py", f"{folder}/train.py")
    parts = re.split(r"(?m)^@@ .*? @@ ?(.*)\n", text)[1:]
    hunks = list(zip(parts[::2], parts[1::2], strict=True))
    while not re.match(r"[+-](import|from) ", hunks[0][1]) and len(hunks) > 1:  # the docstring
        del hunks[0]
    generated = "".join(f"@@ {place}".rstrip() + f"\n{lines}" for place, lines in hunks)
    hold(ROOT / folder / "README.md", r"(?<=^```diff\n).+?(?=^```$)", generated)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_number_of_added_lines(folder):
    added = git_diff("--numstat", f"{FOLDERS[0]}/train.py", f"{folder}/train.py").split("\t")[0]
    row = re.search(rf"^\| \[{folder}\].*\| ", MAIN.read_text(), re.M)[0]
    hold(MAIN, rf"^\| \[{folder}\]\({folder}/\) \|[^\n]*\| \d+ \|$", f"{row}{added or 0} |")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_steps(folder):
    """The steps are those of the script; the table may leave some of them to 04's, by a link."""
    text = sections(ROOT / folder / "README.md")["Steps"]
    script = (ROOT / folder / "train.py").read_text()
    listed = [(row["mark"], row["line"].strip("`")) for row in rows(text)]
    in_script = {mark for line in code(folder) for mark in marks(line, folder)}
    if "[04's](../04_ddp_torchrun/#steps)" in text:
        others = rows(sections(ROOT / "04_ddp_torchrun/README.md")["Steps"])
        left = in_script - {mark for mark, _ in listed}
        listed += [(row["mark"], row["line"].strip("`")) for row in others if row["mark"] in left]
    assert {mark for mark, _ in listed} == in_script
    for _, line in listed:
        assert line in script, line


def test_every_mark_is_in_the_index():
    text = sections(MAIN)["Read two scripts side by side"]
    scripts = "".join(path.read_text() for path in ROOT.glob("*/*.py"))
    listed = re.findall(r"(?:^-|·)\s+([A-Z]+-\d)\s", text, re.M)
    assert sorted(set(listed)) == sorted(listed)
    assert set(listed) == set(re.findall(r"\b[A-Z]+-\d\b", scripts))


def help_of(script, monkeypatch, capsys):
    """The default of each option, from --help; None for an option without one."""
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, script, "--help")
    assert not end.value.code
    lines = re.split(r"\n *(?=-)", capsys.readouterr().out.split("options:")[1])[1:]
    return {
        re.search(r"--[a-z-]+", line)[0]: (re.findall(r"\(default: (.*)\)", line) or [None])[0]
        for line in lines
    }


def is_listed(folder, text):
    """Is a folder one of "all", "02 to 04, 06", "not in 05"?"""
    spans = re.findall(r"(\d\d)(?: to (\d\d))?", text)
    found = any(first <= folder[:2] <= (last or first) for first, last in spans)
    return text == "all" or found != text.startswith("not ")


@pytest.mark.parametrize("script", SCRIPTS, ids=label)
def test_help_names_defaults_and_the_readmes_the_same(script, monkeypatch, capsys):
    defaults = help_of(script, monkeypatch, capsys)
    without = [name for name, default in defaults.items() if default is None]
    assert without in (["--help"], ["--help", "--checkpoint"]), without
    if script.name != "train.py":
        return
    tables = sections(MAIN)["Options"] + sections(script.with_name("README.md"))["Run"]
    listed = [row for row in rows(tables) if "option" in row and "default" in row]
    assert len(listed) >= 10
    number = script.parent.name[:2]
    for row in listed:
        names = re.findall(r"--[a-z-]+", row["option"])
        values = row["default"].replace("`", "").split(";")[0].replace("off", "False").split(", ")
        for name, value in zip(names, values, strict=True):
            if name in defaults:
                assert defaults[name] == value, name
            expected = is_listed(script.parent.name, row.get("in", "all"))
            assert (name in defaults) == expected or (name, number) == ("--device", "05"), name
    missing = set(defaults) - set(re.findall(r"--[a-z-]+", tables)) - {"--help"}
    assert missing <= set(re.findall(r"--[a-z-]+", script.with_name("README.md").read_text()))


def test_the_defaults_of_torchrun():
    parser = get_args_parser()
    for row in rows(sections(ROOT / "04_ddp_torchrun/README.md")["torchrun's options"]):
        names = re.findall(r"--[a-z-]+", row["option"])
        for name, value in zip(names, row["default"].replace("`", "").split(", "), strict=True):
            (action,) = [each for each in parser._actions if name in each.option_strings]
            assert action.default in (None, "", False) or str(action.default) == value, name


@pytest.mark.parametrize("path", sorted(ROOT.glob("0*/run.sh")), ids=label)
def test_a_launch_file_prints_the_help_once(path, tmp_path):
    tool = ['case "$*" in *--help*) echo help ;; *device_count*) echo 0 ;; esac']
    tools = fake_tools(tmp_path / "tools", python=tool, docker=tool, torchrun=tool)
    result = run(["bash", path, "--epochs", "1", "--help"], tmp_path, PATH=tools)
    assert (result.code, result.output) == (0, "help\n"), result


# The commands


def parts(command):
    """The environment, launcher and its options, script and its options; no script: None."""
    words = shlex.split(command.replace("$(", "").split("&&")[-1].removesuffix(" &"))
    is_script = re.compile(r"(.*/)?(0\d_\w+|my_project|/app)/(train|run|\w+)\.(py|sh)")
    place = next((n for n, word in enumerate(words) if is_script.fullmatch(word)), None)
    if place is None or words[0] in ("git", "cp", "pkill", "grep"):
        return None
    settings = dict(word.split("=", 1) for word in words[:place] if re.match(r"[A-Z_]+=", word))
    folder, name = words[place].rsplit("/", 1)
    folder = {"/app": "06_checkpointing", "my_project": "04_ddp_torchrun"}.get(folder, folder)
    options = words[place + 1 :]
    if name == "run.sh":
        name = options.pop(0) if options and options[0].endswith(".py") else "train.py"
    script = ROOT / settings.get("SCRIPT", f"{folder}/{name}")
    return settings, words[:place], script, options


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


@pytest.mark.parametrize("path", READMES[1:-1], ids=label)
def test_the_copy_command_copies_what_is_needed(path, sandbox):
    (copy,) = [command for command in commands(path) if command.startswith("cp ")]
    subprocess.run(["bash", "-c", copy], cwd=sandbox, check=True, timeout=30)
    project = sandbox / "YOUR_PROJECT"
    project_folder = project / "08_docker" if (project / "08_docker").exists() else project
    names = {each.name for each in project_folder.iterdir()}
    assert names >= {"run.sh"} and names & {"train.py", "fsdp.py"}
    assert (project / "common/digits.bin").exists() and (project / "requirements.txt").exists()


@pytest.fixture
def sandbox(tmp_path):
    """A copy of the repository with few digits, which it also uses for MNIST."""
    return copy_repository(tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        ("04_ddp_torchrun", {"29500": "PORT", "per-node=2": "per-node=1"}),
        ("03_ddp_multinode_spawn", {" -n 2": " -g 1 -n 2"}),
        ("06_checkpointing", {"29400": "PORT", "per-node=2": "per-node=1", "/shared/": ""}),
    ],
)
def test_the_commands_for_two_machines(folder, changes, sandbox):
    """The plain commands as shown, except for the address, for two nodes on this machine."""
    port = str(free_port())
    plain = [line for line in commands(ROOT / folder / "README.md") if "10.0.0.1" in line]
    pair = [line for line in plain if line.startswith(("python", "torchrun"))][:2]
    if len(pair) == 1:  # the same command on both
        pair *= 2
    running = []
    for command in pair:
        for old, new in {**changes, "10.0.0.1": "127.0.0.1"}.items():
            assert old in command
            command = command.replace(old, new.replace("PORT", port))
        settings = {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        running.append(Running(["bash", "-c", command], sandbox, **settings))
    results = [each.finish(limit=120) for each in running]
    assert [result.code for result in results] == [0, 0], results
    (epochs,) = [result.epochs() for result in results if "accuracy" in result.output]
    assert float(epochs[-1]["loss"]) < 1, results


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 3])
def test_the_figure_of_ranks_is_what_torchrun_does(nodes, tmp_path):
    show = ["--no-python", "bash", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE"']
    options = [f"--nnodes={nodes}", "--nproc-per-node=4", f"--master-port={free_port()}"]
    options += ["--master-addr=127.0.0.1"]
    running = [
        Running(["torchrun", *options, f"--node-rank={node}", *show], tmp_path)
        for node in range(nodes)
    ]
    found = [[line.split() for line in each.finish().output.splitlines()] for each in running]
    found = [sorted(node, key=lambda words: int(words[1])) for node in found]
    assert {words[2] for node in found for words in node} == {str(4 * nodes)}
    lines = ["  ".join([" " * 10, *(f"┌──── node {node} ────┐" for node in range(nodes))])]
    for name, column in (("rank", 0), ("local rank", 1), ("GPU", 1)):
        cells = ["".join(f"{words[column]:>4} " for words in node) for node in found]
        lines.append("  ".join([f"{name:10}", *cells]))
    lines[1] += f"  world size {4 * nodes}"
    figure = "".join(f"{line.rstrip()}\n" for line in lines)
    hold(MAIN, rf"(?<=^```text\n) +┌[^`]*world size {4 * nodes}\n[^`]*(?=^```$)", figure)


@pytest.mark.slow
def test_the_tour(sandbox):
    """All of it as one script, as it is pasted; few digits need more epochs and less time."""
    (tour,) = blocks(sections(MAIN)["Ten-minute tour"], "bash")
    assert tour.count("--epochs 10 ") == 2
    tour = tour.replace("--epochs 10 ", "--epochs 60 ")
    result = run(["bash", "-c", tour], sandbox, limit=300, OMP_NUM_THREADS="1")
    seen = ("OK: all checks passed", "stopped after", "resuming from tour.pt, after", "+import gc")
    assert result.code == 0 and all(words in result.output for words in seen), result


def test_the_programs_in_the_readmes(tmp_path):
    """The collectives, the loop over the loader, a numbered print, and one file for two ranks."""
    text = (ROOT / "04_ddp_torchrun/README.md").read_text()
    collectives, loader, numbered_print = blocks(text, "python")
    (save,) = blocks((ROOT / "06_checkpointing/README.md").read_text(), "python")
    given = "import time\ntrain_loader = [(None, [0] * 64)]\nnet = torch.nn.Linear(2, 1)\n"
    given += "net.weight.data.fill_(rank + 5)\n"
    program = collectives + given + loader + numbered_print + save
    program += "print('weights', net.weight.tolist(), flush=True)\ndist.destroy_process_group()\n"
    (tmp_path / "program.py").write_text(program)
    result = run_ranks("program.py", 2, cwd=tmp_path)
    assert result.code == 0, result
    (shown,) = blocks(sections(ROOT / "04_ddp_torchrun/README.md")["Collectives"], "text")
    lines = sorted(result.output.splitlines())
    assert [line for line in lines if re.match(r"rank \d:", line)] == sorted(shown.splitlines())
    others = [line for line in lines if not re.match(r"rank \d:", line)]
    patterns = (r"on \S+ passed point 1", r"on \S+ reached point 1", r"reads \d+ images/s")
    for number in (0, 1):
        for pattern, line in zip(patterns, others[3 * number :], strict=False):
            assert re.fullmatch(f"rank {number} {pattern}", line)
    assert others[6:] == ["weights [[5.0, 5.0]]"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("path", READMES, ids=label)
def test_every_command_runs(path, sandbox):
    """Those that other READMEs show as well are run with the first of them, the tour's above."""
    earlier = [command for each in READMES[: READMES.index(path)] for command in commands(each)]
    earlier += blocks(sections(MAIN)["Ten-minute tour"], "bash")[0].splitlines()
    for command in commands(path):
        if command in earlier or any(re.search(pattern, command) for pattern in NOT_RUN):
            continue
        result = run(["bash", "-c", command], sandbox, limit=300, OMP_NUM_THREADS="1")
        expected = 1 if command.startswith("git") else 0  # 1: there are differences
        assert result.code == expected, result
        if parts(command) and "selftest" not in command:
            # 06 and fsdp.py, a second time
            finished = re.search("after 3 of 3 epochs|epochs done: 3", result.output)
            loss = float(re.findall(r" loss (\S+)", result.output)[-1]) if not finished else 0
            assert loss < (3 if "--epochs 1 " in f"{command} " else 1), result


def test_each_promise_names_a_test():
    table = sections(ROOT / "tests/README.md")["Promises"]
    for row in rows(table):
        names = re.findall(r"`([\w/]+\.py)::(\w+)`", row["test"])
        assert names, row
        for file, name in names:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_each_command_that_is_not_run_has_a_reason():
    shown = [command for path in READMES for command in commands(path)]
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command) for command in shown), pattern


OWN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(4, 10)
    def forward(self, points):
        return self.weights(points)
class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 101
    def __getitem__(self, index):
        point = torch.zeros(4)
        point[index % 4] = 1
        return point, index % 4
"""


@pytest.mark.slow
def test_a_copy_takes_another_model_and_data_set(sandbox):
    """Steps 1 to 3 of README's section, with single samples of another shape."""
    (copy,) = [command for command in commands(MAIN) if command.startswith("cp -r 04")]
    run(["bash", "-c", f"mkdir my_project && {copy}"], sandbox)
    edit(
        sandbox / "my_project",
        "train.py",
        ("\n\ndef parse_args", f"\n{OWN}\n\ndef parse_args"),
        ("ConvNet()", "Net()"),
        ("load_mnist(args.data_dir)", "Points(), Points()"),
        ('"collate_fn": already_batched, ', '"num_workers": 1, '),
    )
    result = run(["bash", "my_project/run.sh", "--epochs", "20", "--lr", "2"], sandbox)
    assert result.code == 0 and result.epochs()[-1]["accuracy"] == "1.0000", result
