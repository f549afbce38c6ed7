"""The pages are true: links, marks, options, what they show of the code; and their commands run."""

import ast
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
from helpers import (COPIES, FOLDERS, ROOT, copy_project, copy_repository, free_port,
    module, run, run_ranks)

MAIN = ROOT / "README.md"
PAGES = [MAIN, *(ROOT / folder / "README.md" for folder in FOLDERS), ROOT / "tests/README.md"]
PAGES += [ROOT / "tests/benchmark.md", COPIES / "README.md", ROOT / ".github/CONTRIBUTING.md"]
PAGES += [ROOT / "tests/errors.md"]
SCRIPTS = sorted(ROOT.glob("0*/*.py"))
BASES = {"02": "01", "03": "02", "04": "01", "06": "04", "07": "06"}
FOLDER = {folder[:2]: folder for folder in FOLDERS}
CHANGES = "What changes, step by step"
MARK = re.compile(r"# .*?\b([A-Z]{2,5}-\d)\b(: \S)?")
HUNK = re.compile(r"^@@ .*\n((?:[-+].*\n)*)", re.M)
OPTION = re.compile("--[a-z-]+")
SCRIPT = r"\s(\S*(?:0\S+|app)/\w+\.(?:py|sh))\b"  # where a command has its script


def name(path):
    return str(path.relative_to(ROOT))


def sections(path):
    """The text of each section of a page by its heading."""
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text, language):
    """The code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def commands(path):
    """The commands of a page in order, each in one line, without comments."""
    text = "".join(blocks(path.read_text(), "bash")).replace("\\\n", "")
    return [re.sub(" +", " ", line) for line in text.splitlines() if line[:1] not in ("", "#")]


def rows(text):
    """The rows of all tables, as dictionaries from the head of a column to the cell."""
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        head, _, *body = [re.split(r" *(?<!\\)\| *", line[1:-1].strip())
                          for line in table.splitlines()]
        yield from (dict(zip(head, line, strict=True)) for line in body)


# Scripts differ where a mark says so


def below_the_imports(number):
    """A script without its docstring and imports, which have no marks."""
    text = (ROOT / FOLDER[number] / "train.py").read_text().split('"""', 2)[2]
    return re.sub(r"^(import|from) .*\n", "", text, flags=re.M)


def hunks(number, folder):
    """What `git diff -w` shows against the base: of each hunk the old lines and the new lines."""
    for each in (BASES[number], number):
        (folder / each).write_text(below_the_imports(each))
    command = ["git", "diff", "--no-index", "-w", "--unified=0", BASES[number], number]
    diff = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    for body in HUNK.findall(diff):
        lines = body.splitlines()
        yield [[line for line in lines if line[0] == sign] for sign in "-+"]


@pytest.mark.parametrize("number", BASES)
def test_each_added_block_opens_with_a_mark_that_has_words(number, tmp_path):
    """A block of more lines than it replaces; a mark stands once per block, or function."""
    for old, new in hunks(number, tmp_path):
        lines = [line[1:].strip() for line in new if line[1:].strip()]
        marks = [MARK.search(line) for line in lines]
        assert len(lines) <= len(old) or marks[0], f"no mark on the first of {lines}"
        found = [mark[1] for mark in marks if mark and not mark.string.startswith("def ")]
        assert all(map(str.__ne__, found, found[1:])), f"twice the same mark in {lines}"


def test_a_mark_means_the_same_in_every_script():
    """Each has words; and a line of 06 that has one has it in fsdp.py, too. 08 is 06."""
    bare = [line for path in SCRIPTS for line in path.read_text().splitlines()
            if (mark := MARK.search(line)) and not mark[2]]
    assert not bare, "a mark without words"
    of_06, of_08, fsdp = ((ROOT / path).read_text() for path in (
        "06_checkpointing/train.py", "08_docker/train.py", "05_model_parallel/fsdp.py"))
    assert of_06 == of_08
    for line in filter(MARK.search, of_06.splitlines()):
        code = line.split("  # ")[0]
        if of_06.count(f"{code}\n") + of_06.count(f"{code}  #") == 1:
            assert fsdp.count(f"{code}\n") + fsdp.count(f"{code}  #") == fsdp.count(line), line


def test_each_script_is_one_file_without_private_names():
    """No name of torch that begins with an underscore."""
    for path in SCRIPTS:
        text = path.read_text()
        imported = re.findall(r"^\s*(?:import|from) +(\w*)", text, re.M)
        assert imported and not {"", *(other.stem for other in SCRIPTS)} & set(imported)
        assert set(re.findall(r"\._[a-z]\w*", text)) <= {"._exit"}, path
        if "init_process_group(" in text:  # imports of torch.distributed.nn, or the exit may abort
            assert re.search(r"common\.gather|distributed\.(checkpoint|pipelining)", text), path
    assert sum(len(file.read_text().splitlines()) for file in ROOT.glob("common/*.py")) < 180


# What the pages show of the code


@pytest.mark.parametrize("number", BASES)
def test_a_page_has_a_section_for_each_mark(number, tmp_path):
    """With sentences; 02 to 04 also show each line that is added or replaced, but 02 not 04's."""
    changes, named = sections(ROOT / FOLDER[number] / "README.md")[CHANGES], []
    for heading, text in re.findall(r"^### (.*?): .*\n((?:(?!### ).*\n)*)", changes, re.M):
        family, numbers = heading.split("-")[0], [int(n) for n in re.findall(r"-(\d)", heading)]
        numbers = range(numbers[0], numbers[-1] + 1) if " to " in heading else numbers
        named += [f"{family}-{n}" for n in numbers]
        assert re.sub(r"(?s)<details>.*?</details>|```diff.*?```", "", text).strip(), heading
    lines = [line for old, new in hunks(number, tmp_path) for line in old + new if line[1:]]
    assert sorted(named) == sorted({mark[1] for line in lines if line[0] == "+"
                                    for mark in MARK.finditer(line)})
    if number < "05":
        shown, of_04 = [re.findall(r"^[-+].+", "".join(blocks(text, "diff")), re.M)
                        for text in (changes, (ROOT / FOLDER["04"] / "README.md").read_text())]
        assert sorted(shown) == sorted(line for line in lines if number != "02" or line in shown
                                       or line not in of_04)


def test_what_else_the_pages_show_of_the_code():
    """DDP for an own script, the batch script, DataParallel's lines, the steps of 05."""
    patch = (COPIES / "own_ddp.patch").read_text()
    shown = MAIN.read_text().split("<!-- tests/copies/own_ddp.patch -->\n\n")[1]
    assert shown.startswith(f"```diff\n{patch[patch.index('@@ '):].rstrip()}\n```\n")
    [shown, *_] = blocks(sections(ROOT / "07_slurm/README.md")["Run"], "sh")
    assert shown == (ROOT / "07_slurm/run.sh").read_text()
    [shown] = blocks(sections(ROOT / "01_dataparallel/README.md")[CHANGES], "python")
    assert textwrap.indent(shown, "    ") in (ROOT / "01_dataparallel/train.py").read_text()
    shown = {each[6:13]: each for each in blocks((COPIES / "README.md").read_text(), "python")}
    assert textwrap.indent(shown["PerRank"], "+", len) in (COPIES / "06_ppo.patch").read_text()
    page = ROOT / "05_model_parallel/README.md"
    for row in rows(sections(page)["Steps"]):
        assert row["line"].strip("`") in (page.parent / "train.py").read_text(), row
    fsdp = re.findall(r"^### (FSDP-\d): ", page.read_text(), re.M)
    assert {*fsdp} == {*re.findall(r"# (FSDP-\d): ", (page.parent / "fsdp.py").read_text())}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_files_and_releases_exist(path):
    text = path.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        target = (path.parent / target) if target else path
        if "https:" in str(target):
            continue
        assert target.exists(), target
        if anchor:
            page = target / "README.md" if target.is_dir() else target
            headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
            assert anchor in anchors, anchor
    for file in re.findall(r"\b(?:0\d_\w+|common|tests)/[\w/]+\.\w+", text):
        assert (ROOT / file).exists(), file
    required = (ROOT / "requirements.txt").read_text().split()
    assert set(re.findall(r"torch\w*==[\d.]+", text)) <= set(required)


def test_each_error_of_the_scripts_has_a_row_or_names_an_option():
    """In a row `...` and PATH stand for anything."""
    symptoms = [row["symptom"] for page in PAGES for row in rows(page.read_text())
                if "symptom" in row]
    quoted = [re.sub(r"(\\\.){3}|PATH", ".*", re.escape(text))
              for text in re.findall("`([^`]+)`", "".join(symptoms)) if len(text) > 9]
    known = re.compile("|".join(quoted))
    for path in [*SCRIPTS, *ROOT.glob("common/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.Call(func=kind, args=[text])):
                    printed = f"{ast.unparse(kind)}: "
                case ast.Call(func=ast.Attribute(attr="error"), args=[text]):
                    printed = "error: "
                case ast.Assert(msg=text):
                    printed = "AssertionError: "
                case _:
                    continue
            for part in getattr(text, "values", [text]):
                printed += getattr(part, "value", "") if isinstance(part, ast.Constant) else "{1}"
            assert "--" in printed or known.search(printed), f"{path} prints {printed}"


def test_the_pictures_are_what_their_command_draws():
    for path, text in module(ROOT / ".pages/pictures.py").draw().items():
        assert (ROOT / path).read_text() == text, path


# Options and commands


@pytest.mark.parametrize("folder", FOLDERS)
def test_help_and_the_pages_name_the_same_options_and_defaults(folder, monkeypatch, capsys):
    """On a machine with two GPUs."""
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        module(ROOT / folder / "train.py").parse_args()
    lines = re.split(r"\n *(?=-)", capsys.readouterr().out.split("options:")[1])[2:]
    defaults = {OPTION.search(line)[0]: re.search(r"\(default: (.*)\)", line)[1] for line in lines}
    readme, listed = ROOT / folder / "README.md", {}
    common = sections(ROOT / FOLDERS[0] / "README.md")["Options"]
    for row in rows(common + sections(readme)["Run"]):
        if "option" in row and "default" in row:
            values = row["default"].replace("`", "").split(";")[0].replace("off", "False")
            listed |= zip(OPTION.findall(row["option"]), values.split(", "), strict=True)
    shared = listed.keys() & defaults.keys()
    assert len(shared) >= 6 and all(listed[option] == defaults[option] for option in shared)
    assert defaults.keys() - listed.keys() <= set(OPTION.findall(readme.read_text()))


NOT_RUN = "|".join((  # by the next test, as a command
    r"pip install|pytest|ruff|shellcheck", "pkill|pgrep|py-spy|python tests/",  # is for CI or you
    r"10\.0\.0\.1|/shared/",  # needs a second machine
    "--compile",  # needs a compiler
    "sbatch|salloc|srun|scontrol|scancel|sinfo|docker",  # needs Slurm or a container engine
))


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_command_runs(path, tmp_path):
    """Those that other pages show as well are run with the first of them."""
    copy = copy_repository(tmp_path / "a copy", digits=20)
    earlier = [command for each in PAGES[: PAGES.index(path)] for command in commands(each)]
    for command in commands(path):
        if command not in earlier and not re.search(NOT_RUN, command):
            result = run(["bash", "-c", command], copy, limit=300, OMP_NUM_THREADS="1")
            expected = 1 if command.startswith("git diff") else 0  # 1: there are differences
            assert result.code == expected, result
            trains = re.search(rf"^([A-Z_]+=\S+ )*(bash|python|torchrun)\b.*{SCRIPT}", command)
            if trains and "selftest" not in command and "resuming" not in result.output:
                assert result.epochs(), result


# Programs


@pytest.mark.parametrize(("page", "section"), [
    ("02_ddp_spawn", "The smallest form"), ("04_ddp_torchrun", "The smallest form")])
def test_a_program_prints_what_is_shown(page, section, tmp_path):
    text = sections(ROOT / page / "README.md")[section]
    [program], [shown] = blocks(text, "python"), blocks(text, "text")
    (tmp_path / "small.py").write_text(program.replace("29500", str(free_port())))
    if page.startswith("02"):
        result = run([sys.executable, "small.py"], tmp_path)
    else:
        result = run_ranks("small.py", 2, cwd=tmp_path)
    assert sorted(result.output.splitlines()) == sorted(shown.splitlines()), result


@pytest.mark.slow
def test_a_log_as_a_picture(tmp_path, monkeypatch):
    """The program of the page draws each point of a log of two starts once."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / ".pages/run1.log", tmp_path)
    exec(blocks((COPIES / "README.md").read_text().split("A picture of the log\n")[1], "python")[0])
    loss, rate, accuracy = [axes.lines[0].get_xydata().tolist() for axes in pyplot.gcf().axes]
    assert len(loss) == len(rate) == 50 and loss[-1] == [5, 0.5365] and rate[-1] == [5, 0.000226]
    assert [value for _, value in accuracy] == [0.9861, 0.9901, 0.9939, 0.9938, 0.9936]


@pytest.mark.slow
def test_the_unit_of_systemd_is_valid(tmp_path):
    shutil.which("systemd-analyze") or pytest.skip("systemd-analyze is not installed")
    [unit] = blocks((ROOT / "06_checkpointing/README.md").read_text(), "ini")
    (tmp_path / "run1.service").write_text(unit)
    result = run(["systemd-analyze", "verify", "./run1.service"], tmp_path)
    assert result.code == 0 and "run1.service" not in result.errors, result


@pytest.mark.slow
def test_the_memory_of_one_rank(tmp_path):
    """05 shows what the program prints."""
    copy_project(tmp_path, "05_model_parallel", "tests/copies/memory.py")
    for row in rows(sections(ROOT / "05_model_parallel/README.md")["Does it fit"]):
        if "peak" in row:
            way = row["`memory.py`"].strip("`").split()
            printed = run_ranks("memory.py", 1, *way, cwd=tmp_path).output
            assert f"peak {row['peak']} GB\n" in printed, printed
