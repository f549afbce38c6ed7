"""The READMEs are true: commands, options, defaults, diffs, links and expected output.

Diffs, patches and line counts are generated. After a change, write them into the READMEs with

    REWRITE_DOCS=1 python -m pytest tests/test_docs.py
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections import Counter

import network
import pytest
import torch
from helpers import (
    EPOCH,
    FOLDERS,
    ROOT,
    Running,
    copy_repository,
    edit,
    free_port,
    label,
    parse,
    run,
    run_ranks,
)
from test_markers import SHOWN, code, marks
from torch.distributed.run import get_args_parser

MAIN = ROOT / "README.md"
READMES = [MAIN, *(ROOT / folder / "README.md" for folder in FOLDERS), ROOT / "tests/README.md"]
PROSE = [*READMES, *(path for kind in ("py", "sh", "yaml") for path in ROOT.glob(f"0*/*.{kind}"))]
PROSE += [*ROOT.glob("common/*.py"), ROOT / "08_docker/Dockerfile"]
COPIES = {"04_ddp_torchrun": "04_resnet18.patch", "06_checkpointing": "06_language_model.patch"}
CHANGES = "What changes, step by step"
SECTIONS = ["Run", "Expected output", CHANGES, "Pitfalls", "Copy it"]
LAUNCHERS = ("python ", "torchrun ", "export TORCH_", "sbatch ", "salloc ", "docker ")
LEARNED = 1.5  # a loss: it begins at 2.3, and label smoothing keeps it above 0.5
OPTION = re.compile("--[a-z-]+")
HUNK = re.compile(r"^@@ \S+ \+(\d+),?(\d*) @@.*\n((?:[-+].*\n)*)", re.M)
NOT_ENGLISH = (  # what nobody says, or what programs do not do
    r"\bshall\b|\bgo(es|ing)? on\b|\banew\b|\bfor nothing\b|\bwho is who\b|\bbut for\b"
    r"|\bof (its|their|one's) own\b(?! [-\w])|\bbeside\b|\b(that|those) of\b"
    r"|\balone\b(?! =|\W*[()])"
    r"|\b(speaks?|says?|carr(y|ies)|refuses?|meets?) |\b(batch|images|steps?) a (step|process)\b"
    r"|\b(one|each|per) process a GPU\b|\bstands? (in|on|for)\b|\bshares? out\b"
)
NOT_RUN = {  # a pattern of commands, and why test_every_command_runs leaves them out
    r"pip install": "CI runs both in a fresh clone",
    r"10\.0\.0\.1|/shared/": "needs a second machine; see test_the_commands_for_two_machines",
    r"cuda:0,cuda:1": "needs two GPUs",
    r"--compile": "needs a C++ compiler",
    r"pkill|python tests/": "is for a run of the reader's, or takes many minutes",
    r"sbatch|salloc|srun|scontrol|scancel|sinfo": "needs Slurm",
    r"docker": "needs a container engine",
    r"pytest": "runs the tests",
}


def sections(path):
    """The text of each section of a README by its heading."""
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text, language):
    """The code blocks in a language."""
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


def hold(path, shown, generated):
    """Compare what a README shows with what was generated; with REWRITE_DOCS, write it there."""
    text = path.read_text()
    assert text.count(shown) == 1, shown
    if "REWRITE_DOCS" in os.environ:
        path.write_text(text.replace(shown, generated))
    else:
        assert shown == generated, "run REWRITE_DOCS=1 python -m pytest tests/test_docs.py"


def git_diff(*arguments):
    command = ["git", "diff", "--no-index", "-w", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout


# The form of the READMEs


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_sections_the_plain_command_the_expected_output_and_what_is_copied(folder):
    path = ROOT / folder / "README.md"
    found = [name.split(":")[0] for name in sections(path)]  # Copy it: 04 with your own model
    expected = [name for name in SECTIONS if name != CHANGES or not folder.startswith("05")]
    assert [name for name in found if name in expected] == expected
    assert found[-1] == "Copy it"
    assert commands(path)[0].startswith(LAUNCHERS)
    shown = blocks(sections(path)["Expected output"], "text")[0]
    lines = [line for line in shown.splitlines() if not line.startswith("job ")]
    epochs = [EPOCH.fullmatch(line).groupdict() for line in lines]
    assert [line["epoch"] for line in epochs] == ["1"]
    assert float(epochs[-1]["accuracy"]) >= 0.99
    for line in epochs:  # the speed is that of MNIST's 60,000 images, within the rounded seconds
        seconds, speed = float(line["seconds"]), float(line["speed"])
        assert abs(seconds * speed - 60_000) <= 0.05 * speed + seconds
    (copied,) = [command.split()[2:-1] for command in commands(path) if command.startswith("cp -r")]
    script = "fsdp.py" if folder.startswith("05") else "train.py"
    own = {folder} if folder.startswith("08") else {f"{folder}/run.sh", f"{folder}/{script}"}
    assert {*own, "common", "requirements.txt"} <= set(copied)


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


# What the scripts and the READMEs say about the same thing


def test_the_releases_to_install():
    required = (ROOT / "requirements.txt").read_text().split()
    named = re.findall(r"torch\w*==[\d.]+", MAIN.read_text())
    assert len(named) == 2 and set(named) <= set(required)


def test_the_prose_is_plain_english():
    found = []
    for path in PROSE:
        text = re.sub(r"(?ms)^```diff\n.*?^```$", "", path.read_text())  # scripts' own lines
        text = " ".join(text.split())
        found += [f"{label(path)}: {match[0]}" for match in re.finditer(NOT_ENGLISH, text)]
    assert not found


def diff_of(folder, tmp_path):
    """git's hunks between a script and the one that its README compares it with, no docstrings."""
    for name in (SHOWN[folder], folder):
        text = (ROOT / name / "train.py").read_text()
        (tmp_path / name).write_text(text.split('"""', 2)[2])
    text = git_diff("--unified=0", tmp_path / SHOWN[folder], tmp_path / folder)
    return text[text.index("@@ ") :]


def hunks(folder, tmp_path):
    """The same as pairs of a mark and a text: a hunk of several marks is divided.

    A line without a mark has the one of the nearest line above it. If the last line opens a block,
    the line below it is shown as well, as -w hides that it is indented.
    """
    diff = diff_of(folder, tmp_path)
    script = (tmp_path / folder).read_text().splitlines()
    mark, place, of_line = None, "", []
    for line in script:
        mark = (marks(line, folder) or [mark])[0]
        if line.startswith(("def ", "class ")):
            place = f" {line.split('  #')[0]}"
        of_line.append((mark, place if line.startswith(" ") else ""))
    for first, length, body in HUNK.findall(diff):
        removed = [line for line in body.splitlines() if line.startswith("-")]
        first = int(first) - 1
        added = range(first, first + int(length or 1))
        assert added, f"only removed: {removed}"
        for mark, numbers in itertools.groupby(added, lambda number: of_line[number][0]):
            numbers = list(numbers)
            lines = [f"@@{of_line[numbers[0]][1]}", *removed]
            lines += [f"+{script[number]}" for number in numbers]
            removed = []
            below = script[numbers[-1] + 1]
            opens = lines[-1].split("  #")[0].endswith(":") and numbers[-1] == added[-1]
            if opens and not below.lstrip().startswith("#"):
                lines.append(f" {below}")
            yield mark, re.sub(r"(\n\+)+\n$", "\n", "\n".join([*lines, ""]))


def changes(lines):
    """How often each line that is not empty is added or removed."""
    return Counter(line for line in lines if line[0] in "+-" and line[1:].strip())


@pytest.mark.parametrize("folder", SHOWN)
def test_each_mark_shows_its_own_hunks(folder, tmp_path):
    """A heading names one mark or several, as "DDP-1: join" or "DDP-2 to DDP-5: as in 04"."""
    readme = ROOT / folder / "README.md"
    text = sections(readme)[CHANGES]
    generated = list(hunks(folder, tmp_path))
    named = []
    for heading, part in re.findall(r"^### (.*?): .*\n((?:(?!### ).*\n)*)", text, re.M):
        family, numbers = heading.split("-")[0], list(map(int, re.findall(r"-(\d)", heading)))
        numbers = range(numbers[0], numbers[-1] + 1) if " to " in heading else numbers
        of_heading = [f"{family}-{number}" for number in numbers]
        named += of_heading
        (shown,) = blocks(part, "diff")
        hold(readme, shown, "".join(hunk for mark, hunk in generated if mark in of_heading))
        prose = re.sub(r"(?s)<details>.*?</details>|```diff.*?```", "", part)
        assert prose.strip(), f"no sentence about {heading}"
    assert sorted(set(named)) == sorted({mark for mark, _ in generated})
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("folder", SHOWN)
def test_the_hunks_together_are_the_whole_diff(folder, tmp_path):
    """No page drops a line: counted in what git prints, without the code above."""
    shown = "".join(blocks(sections(ROOT / folder / "README.md")[CHANGES], "diff"))
    assert changes(shown.splitlines()) == changes(diff_of(folder, tmp_path).splitlines())


@pytest.mark.parametrize("folder", COPIES)
def test_the_patch_of_a_copy(folder):
    """The one that test_copies.py applies and runs."""
    readme = ROOT / folder / "README.md"
    (section,) = [text for name, text in sections(readme).items() if name.startswith("Copy it:")]
    (shown,) = blocks(section, "diff")
    patch = (ROOT / "tests/copies" / COPIES[folder]).read_text()
    hold(readme, shown, patch[patch.index("--- a/") :])


def test_the_score_of_a_regression():
    """Also where the labels are [N], from which [N, 1] would subtract to a matrix."""
    readme = ROOT / "04_ddp_torchrun/README.md"
    (line,) = re.findall(r"`(correct\.append\(.*\*\* 2\))`", readme.read_text())
    images = torch.tensor([[1.0], [2.0], [4.0]])
    for labels in (torch.tensor([1.0, 0.0, 1.0]), torch.tensor([[1.0], [0.0], [1.0]])):
        exec(line, {"net": lambda images: images, "device": "cpu", "correct": (scores := []),
                    "images": images, "labels": labels})
        assert scores[0].tolist() == [0, 4, 9]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_number_of_added_lines(folder):
    added = git_diff("--numstat", f"{FOLDERS[0]}/train.py", f"{folder}/train.py").split("\t")[0]
    (row,) = re.findall(rf"^\| \[{folder}\].*", MAIN.read_text(), re.M)
    hold(MAIN, row, re.sub(r"\d+ \|$", f"{added or 0} |", row))


def test_the_steps_of_05():
    """Which has no base, so its table names the lines."""
    folder = "05_model_parallel"
    script = (ROOT / folder / "train.py").read_text()
    listed = [(row["mark"], row["line"].strip("`"))
              for row in rows(sections(ROOT / folder / "README.md")["Steps"])]
    assert {mark for mark, _ in listed} == {mark for line in code(folder)
                                            for mark in marks(line, folder)}
    for _, line in listed:
        assert line in script, line


def test_the_batch_script():
    readme = ROOT / "07_slurm/README.md"
    hold(readme, blocks(sections(readme)["Run"], "sh")[0], (ROOT / "07_slurm/run.sh").read_text())


def test_the_lines_of_dataparallel():
    (shown,) = blocks(sections(ROOT / "01_dataparallel/README.md")[CHANGES], "python")
    assert textwrap.indent(shown, "    ") in (ROOT / "01_dataparallel/train.py").read_text()


def test_the_smallest_form_of_02(tmp_path):
    (program,) = blocks(sections(ROOT / "02_ddp_spawn/README.md")["The smallest form"], "python")
    (shown,) = blocks(sections(ROOT / "02_ddp_spawn/README.md")["The smallest form"], "text")
    (tmp_path / "small.py").write_text(program.replace("29500", str(free_port())))
    result = run([sys.executable, "small.py"], tmp_path, PYTHONUNBUFFERED="")  # whole lines
    assert result.code == 0 and sorted(result.output.splitlines()) == shown.splitlines(), result


def test_the_predicted_seconds_per_all_reduce():
    readme = ROOT / "04_ddp_torchrun/README.md"
    (function,) = blocks(sections(readme)["When does it stop scaling"], "python")
    exec(function, namespace := {})
    seconds = namespace["all_reduce_seconds"]
    assert seconds(9, 7, 5, 3, 2) == network.all_reduce_seconds(9, 7, 5, 3, 2)
    models = {"25.6 M in float32 (ResNet-50)": (25.6e6, 4), "7 B in bfloat16": (7e9, 2)}
    table = ""
    for name, (gradients, size) in models.items():
        for ranks in (8, 64, 1024):
            times = [seconds(gradients, ranks, rate, 20e-6, size) for rate in (25, 100, 400)]
            cells = [f"{time:.3g}" for time in times]
            table += f"| {name} | {ranks:,} | {' | '.join(cells)} |\n"
    (shown,) = re.findall(r"(?:^\| (?:25\.6 M|7 B) in .*\n)+", readme.read_text(), re.M)
    hold(readme, shown, table)


def test_every_mark_is_in_the_index():
    text = sections(MAIN)["Read two scripts side by side"]
    scripts = "".join(path.read_text() for path in ROOT.glob("*/*.py"))
    listed = re.findall(r"(?:^-|·)\s+([A-Z]+-\d)\s", text, re.M)
    assert sorted(set(listed)) == sorted(listed)
    assert set(listed) == set(re.findall(r"\b[A-Z]+-\d\b", scripts))


def help_of(folder, monkeypatch, capsys):
    """The default of each option, from --help, on a machine with two GPUs."""
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, ROOT / folder / "train.py", "--help", gpus=2, RANK=0, LOCAL_RANK=0)
    assert not end.value.code
    lines = re.split(r"\n *(?=-)", capsys.readouterr().out.split("options:")[1])[2:]
    return {OPTION.search(line)[0]: re.search(r"\(default: (.*)\)", line)[1] for line in lines}


def is_listed(folder, text):
    """Is a folder one of "all", "02 to 04, 06", "not in 05"?"""
    spans = re.findall(r"(\d\d)(?: to (\d\d))?", text)
    found = any(first <= folder[:2] <= (last or first) for first, last in spans)
    return text == "all" or found != text.startswith("not ")


@pytest.mark.parametrize("folder", FOLDERS)
def test_help_and_the_readmes_name_the_same_options(folder, monkeypatch, capsys):
    defaults = help_of(folder, monkeypatch, capsys)
    readme = ROOT / folder / "README.md"
    listed, absent = {}, set()
    for row in rows(sections(MAIN)["Options"] + sections(readme)["Run"]):
        if "option" in row and "default" in row:
            names = OPTION.findall(row["option"])
            values = row["default"].replace("`", "").split(";")[0].replace("off", "False")
            if is_listed(folder, row.get("in", "all")):
                listed |= zip(names, values.split(", "), strict=True)
            else:
                absent.update(names)
    if folder.startswith("05"):
        del listed["--device"]  # its README names --devices
    assert len(listed) >= 6 and listed.items() <= defaults.items()
    assert not absent & defaults.keys()
    assert defaults.keys() - listed.keys() <= set(OPTION.findall(readme.read_text()))


def test_the_defaults_of_torchrun():
    parser = get_args_parser()
    for row in rows(sections(ROOT / "04_ddp_torchrun/README.md")["torchrun's options"]):
        values = row["default"].replace("`", "").split(", ")
        for name, value in zip(OPTION.findall(row["option"]), values, strict=True):
            (action,) = [each for each in parser._actions if name in each.option_strings]
            assert action.default in (None, "", False) or str(action.default) == value, name


# The commands


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", ["03_ddp_multinode_spawn", "04_ddp_torchrun", "06_checkpointing"]
)
def test_the_commands_for_two_machines(folder, sandbox):
    """The plain commands as shown, except for the address, for two nodes on this machine."""
    plain = [line for line in commands(ROOT / folder / "README.md") if "10.0.0.1" in line]
    plain = [line for line in plain if line.startswith(("python", "torchrun"))]
    if len(plain) == 1:
        plain *= 2  # 06 has the same one for both
    for pair in zip(plain[::2], plain[1::2], strict=True):
        settings, running = {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}, []
        for command in pair:
            command = command.replace("10.0.0.1", "127.0.0.1").replace("/shared/", "")
            command = re.sub("29[45]00", settings["MASTER_PORT"], command)
            running.append(Running(["bash", "-c", command], sandbox, **settings))
        results = [each.finish() for each in running]
        assert [result.code for result in results] == [0, 0], results
        output = "".join(result.output for result in results)
        if "selftest.py" in pair[0]:
            assert "OK: all checks passed on 4 ranks" in output, results
        else:
            assert float(re.findall(r"^epoch 3/3  loss (\S+)", output, re.M)[0]) < LEARNED, results


@pytest.mark.slow
def test_the_figure_of_ranks_is_what_torchrun_does(tmp_path):
    command = ["torchrun", "--nnodes=2", "--nproc-per-node=4", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", "--no-python"]
    show = ["bash", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE"']
    started = [Running([*command, f"--node-rank={node}", *show], tmp_path) for node in (0, 1)]
    printed = [[line.split() for line in each.finish().output.splitlines()] for each in started]
    found = [words for lines in printed for words in sorted(lines, key=lambda words: words[1])]
    figure = r"^rank +(\d.*)  world size 8\nlocal rank +(.*)\nGPU +(.*)\n"
    (columns,) = re.findall(figure, MAIN.read_text(), re.M)
    columns = list(zip(*map(str.split, columns), strict=True))
    assert found == [[rank, local, "8"] for rank, local, _ in columns]
    assert all(local == gpu for _, local, gpu in columns)


def test_ddp_in_your_own_script(tmp_path):
    """It prints what the README shows, and that is what DDP promises."""
    text = sections(MAIN)["Add DDP to your own script"]
    (program,), (shown,) = blocks(text, "python"), blocks(text, "text")
    (tmp_path / "ddp.py").write_text(program)
    result = run_ranks("ddp.py", 2, cwd=tmp_path)
    assert result.code == 0 and sorted(result.output.splitlines()) == shown.splitlines(), result
    line = r"epoch (\d), rank \d: inputs (\[.*\]), gradient (\S+), after the all-reduce (\S+)"
    found = [(epoch, json.loads(inputs), float(own), float(averaged))
             for epoch, inputs, own, averaged in re.findall(line, shown)]
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert one[0] == other[0] and sorted(one[1] + other[1]) == [1, 2, 3, 4]
        assert one[3] == other[3] == (one[2] + other[2]) / 2
    weights = [own / (2 * sum(x * x for x in inputs) / len(inputs)) for _, inputs, own, _ in found]
    assert weights == [1, 1, 0.85, 0.85]  # equal on both ranks; 1 - 0.01 * 15
    assert torch.load(tmp_path / "best.pt", weights_only=True).keys() == {"weight"}


def test_the_programs_in_the_readmes(tmp_path):
    """The collectives, the loop over the loader, a numbered print, and one file for two ranks."""
    text = (ROOT / "04_ddp_torchrun/README.md").read_text()
    collectives, _, loader, numbered_print = blocks(text, "python")
    (save,) = [each for each in blocks((ROOT / "06_checkpointing/README.md").read_text(), "python")
               if "dist.barrier()" in each]
    given = "import time\ntrain_loader = [(None, [0] * 64)]\n"
    given += "net = torch.nn.Linear(2, 1)\nnet.weight.data.fill_(rank + 5)\n"
    program = collectives + given + loader + numbered_print + save
    program += "print('weights', net.weight.tolist(), flush=True)\ndist.destroy_process_group()\n"
    (tmp_path / "program.py").write_text(program)
    result = run_ranks("program.py", 2, cwd=tmp_path)
    assert result.code == 0, result
    figure, shown = blocks(sections(ROOT / "04_ddp_torchrun/README.md")["Collectives"], "text")
    for name, *_, after_0, after_1, _ in (re.split(" *[│→]+ *", row) for row in re.findall(
        r"^[a-z-]+ +│.*", figure, re.M)):
        for rank, after in enumerate((after_0, after_1)):
            numbers = [float(number) for number in after.split(", ")]
            assert f"rank {rank}: {name} {numbers}" in shown
    expected = shown.splitlines() + ["weights [[5.0, 5.0]]"] * 2
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
        expected = 1 if command.startswith(("git", "diff")) else 0  # 1: there are differences
        assert result.code == expected, result
        if parts(command) and "selftest" not in command:
            # 06 and fsdp.py, a second time
            finished = "after 3 of 3 epochs" in result.output
            loss = float(re.findall(r" loss (\S+)", result.output)[-1]) if not finished else 0
            few_steps = "--accumulate 8" in command or "fsdp.py" in command  # a transformer
            assert few_steps or loss < LEARNED, result


def test_each_promise_names_a_test():
    table = sections(ROOT / "tests/README.md")["Promises"]
    for row in rows(table):
        names = re.findall(r"`([\w/]+\.py)::(\w+)`", row["test"])
        assert names, row
        for file, name in names:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"
