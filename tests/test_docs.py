"""The READMEs say what is so: commands, what the scripts add, who is who, steps and links.

REWRITE_DOCS=1 python -m pytest tests/test_docs.py writes into them what is made from the scripts and from runs.
"""

import os
import re
import shutil
import subprocess
import time

import pytest
from helpers import EPOCH, FOLDERS, ROOT, Running, edit, fewer_digits, free_port, label, run
from test_markers import BASES, SHOWN, code, marks

READMES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in FOLDERS)]
SETUP = "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"
DIFF = r"(?<=^```diff\n).+?(?=^```$)"
NOT_RUN = {  # what a command has in it: why it is not run by test_commands_run
    r"pip install -r requirements.txt": "CI runs both, in a fresh clone and a new environment",
    r"10\.0\.0\.1": "needs a second machine; test_hosts.py makes one",
    r"cuda:0,cuda:1": "needs two GPUs",
    r"pkill -9": "needs a run to kill; test_06_checkpointing.py kills processes of one",
    r"sbatch|07_slurm/run\.sh": "needs Slurm; test_07_slurm.py makes a cluster",
    r"docker|BUILD_OPTIONS": "needs an engine; test_08_docker.py starts one",
}


def sections(text):
    """The text of each section by its heading."""
    parts = re.split(r"^## (.*)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def hold(path, pattern, made):
    """A README must have what is made now in the place of this pattern; with REWRITE_DOCS it gets it."""
    text = path.read_text()
    (shown,) = re.findall(pattern, text, re.M | re.S)
    if "REWRITE_DOCS" in os.environ:
        path.write_text(text.replace(shown, made))
    else:
        assert shown == made, "write it anew with: REWRITE_DOCS=1 python -m pytest tests/test_docs.py"


def diff(folder):
    """What `git diff -w` shows between a script and the one that its README names, without docstrings and context."""
    command = ["git", "diff", "--no-index", "-w", "--unified=0", f"{SHOWN[folder]}/train.py", f"{folder}/train.py"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
    hunks = re.split(r"(?m)^@@ .*? @@ ?(.*)\n", text)[1:]
    pairs = list(zip(hunks[::2], hunks[1::2], strict=True))
    while not re.match(r"[+-](import|from) ", pairs[0][1]):  # the docstring comes first
        del pairs[0]
    return "".join(f"@@ {place}".rstrip() + f"\n{lines}" for place, lines in pairs)


def test_the_first_two_commands_do_it_all():
    commands = "".join(blocks(READMES[0].read_text(), "bash")).splitlines()
    assert commands[:2] == [f"{SETUP} && bash 04_ddp_torchrun/run.sh", f"{SETUP} && python -m pytest"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_sections(folder):
    text = (ROOT / folder / "README.md").read_text()
    assert text.startswith(f"# {folder}\n")
    assert list(sections(text))[-6:] == ["Run", "Expected output", "What changed", "Steps", "Pitfalls", "Copy it"]


@pytest.mark.parametrize("folder", BASES)
def test_the_diff_is_the_diff(folder):
    readme = ROOT / folder / "README.md"
    hold(readme, DIFF, diff(folder))
    assert diff(folder) in sections(readme.read_text())["What changed"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_steps_are_those_of_the_script(folder):
    steps = sections((ROOT / folder / "README.md").read_text())["Steps"]
    rows = re.findall(r"^\| ([A-Z]+-\d+) \| `(.*?)` \|", steps, re.M)
    assert {mark for mark, _ in rows} == {mark for line in code(folder) for mark in marks(line, folder)}
    for _, line in rows:
        assert line in (ROOT / folder / "train.py").read_text(), line


@pytest.mark.parametrize("folder", FOLDERS)
def test_expected_output_has_the_form_of_the_output(folder):
    shown = blocks(sections((ROOT / folder / "README.md").read_text())["Expected output"], "text")[0]
    lines = [EPOCH.fullmatch(line) for line in shown.splitlines() if not re.match(r"node \d of \d: |job \d+, ", line)]
    assert all(lines) and [line["epoch"] for line in lines] == ["1", "2", "3"]
    assert float(lines[-1]["accuracy"]) >= 0.985
    for line in lines:  # the printed seconds are rounded, so the images are those of MNIST within that
        seconds, speed = float(line["seconds"]), float(line["speed"])
        assert abs(seconds * speed - 60_000) <= 0.05 * speed + seconds


@pytest.mark.parametrize("path", READMES, ids=label)
def test_links_lead_somewhere(path):
    for target, place in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        assert (path.parent / target).exists(), target
        if place:
            headings = re.findall(r"^#+ (.*)", (path.parent / target / "README.md").read_text(), re.M)
            assert place in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], place


@pytest.mark.parametrize("path", READMES, ids=label)
def test_files_that_are_named_exist(path):
    names = re.findall(r"\b(?:0\d_\w+|common|tests)/[\w/]+\.\w+", path.read_text())
    assert all((ROOT / name).exists() for name in names), names


@pytest.mark.parametrize("path", READMES, ids=label)
def test_commands_name_what_exists(path):
    for line in "".join(blocks(path.read_text(), "bash")).splitlines():
        for script in re.findall(r"0\d_\w+/[\w.]+", line):
            assert (ROOT / script).exists(), line
        script = re.search(r"(0\d_\w+)/(?:train\.py|run\.sh)(?! \w+\.py)(.*)", line)
        if script:
            for option in re.findall(r"--[a-z-]+", script[2]):
                assert f'"{option}"' in (ROOT / script[1] / "train.py").read_text(), line


@pytest.mark.parametrize("folder", FOLDERS)
def test_lines_added(folder):
    paths = [f"{name}/train.py" for name in (FOLDERS[0], folder)]
    command = ["git", "diff", "--no-index", "-w", "--numstat", *paths]
    added = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout.split("\t")[0]
    hold(READMES[0], rf"^\| \[{folder}\]\({folder}/\) \|[^\n]*\| \d+ \|$", row_with(folder, added or "0"))


def row_with(folder, added):
    row = re.search(rf"^\| \[{folder}\].*\| ", READMES[0].read_text(), re.M)[0]
    return f"{row}{added} |"


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_layout_of_ranks_is_that_of_torchrun(nodes, tmp_path):
    hold(READMES[0], rf"(?<=^```text\n) +┌[^`]*world size {4 * nodes}\n[^`]*(?=^```$)", layout(nodes, tmp_path))


def layout(nodes, folder):
    """Who is who in a job of so many nodes with four processes each, as torchrun starts it here."""
    tell = ["--no-python", "bash", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE"']
    options = [f"--nnodes={nodes}", "--nproc-per-node=4", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    running = [Running(["torchrun", *options, f"--node-rank={node}", *tell], folder) for node in range(nodes)]
    told = [map(str.split, each.finish().output.splitlines()) for each in running]
    told = [sorted(node, key=lambda words: int(words[1])) for node in told]
    assert {words[2] for node in told for words in node} == {str(4 * nodes)}
    head = [f"┌──── node {node} ────┐" for node in range(nodes)]
    rows = [("rank", 0), ("local rank", 1), ("GPU", 1)]
    lines = ["  ".join([" " * 10, *head])]
    for name, column in rows:
        lines.append("  ".join([f"{name:10}", *("".join(f"{words[column]:>4} " for words in node) for node in told)]))
    lines[1] += f"  world size {4 * nodes}"
    return "".join(f"{line.rstrip()}\n" for line in lines)


def commands(path):
    """The commands of a README in order, each with its further lines."""
    text = "".join(blocks(re.sub(r"(?m)^   (?=\S)", "", path.read_text()), "bash"))
    return [command.replace("\\\n", "") for command in re.findall(r"(?:.*\\\n)*.+", text)]


@pytest.fixture
def sandbox(tmp_path):
    """A copy of the repository with few digits, which are its MNIST too."""
    folder = tmp_path / "copy"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".?*", "__pycache__", "data", "*.pt"))
    fewer_digits(folder)
    (folder / "data").symlink_to("common")
    (folder / "YOUR_PROJECT").mkdir()
    return folder


@pytest.mark.parametrize("path", READMES, ids=label)
def test_commands_run(path, sandbox):
    for command in commands(path):
        if any(re.search(pattern, command) for pattern in NOT_RUN):
            continue
        result = run(["bash", "-c", command], sandbox, limit=300)
        assert result.code == (1 if command.startswith("git diff") else 0), result  # 1: there are differences
        if re.search(r"(run\.sh|train\.py)( --.*)?$", command) and not command.startswith(("cp", "git")):
            finished = "which has all 3 epochs" in result.output  # 06, a second time
            assert finished or float(result.epochs()[-1]["loss"]) < 1, result


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


def test_a_copy_takes_a_model_and_a_data_set_of_ones_own(sandbox):
    """Steps 1 to 3 of README's section, with single samples of another shape."""
    (copy,) = [command for command in commands(READMES[0]) if command.startswith("cp -r 04")]
    run(["bash", "-c", f"mkdir my_project && {copy}"], sandbox)
    edit(
        sandbox / "my_project",
        "train.py",
        ("\n\ndef parse_args", f"\n{OWN}\n\ndef parse_args"),
        ("ConvNet()", "Net()"),
        ("load_mnist(args.data_dir)", "Points(), Points()"),
        ('"collate_fn": tuple, ', '"num_workers": 1, '),
    )
    result = run(["bash", "my_project/run.sh", "--epochs", "20", "--lr", "2"], sandbox)
    assert result.code == 0 and result.epochs()[-1]["accuracy"] == "1.0000", result


def test_what_is_not_run_has_a_reason_each():
    everything = [command for path in READMES for command in commands(path)]
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command) for command in everything), pattern


PROGRAMS = [path for path in sorted(ROOT.glob("0*/*.py")) if "def parse_args(" in path.read_text()]
PROGRAMS += sorted(ROOT.glob("0*/run.sh"))


@pytest.mark.parametrize("path", PROGRAMS, ids=label)
def test_help(path, tmp_path):
    start = time.monotonic()
    result = run(["bash" if path.suffix == ".sh" else "python", path, "--help"], tmp_path)
    assert result.code == 0 and time.monotonic() - start < 15, result
    options = re.split(r"\n  (?=-)", result.output.split("options:")[1])[1:]
    assert len(options) > 2
    for option in options:
        if " " in option.splitlines()[0].strip() and re.match(r"--[a-z-]+ [A-Z{]", option):  # it takes a value
            assert "(default: " in " ".join(option.split()), option


def test_every_folder_is_in_the_table():
    text = READMES[0].read_text()
    assert all(f"]({folder}/)" in text for folder in FOLDERS)
