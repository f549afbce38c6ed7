"""The pages are true: links, marks, options, the code they show, their commands."""

import ast
import itertools
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
from helpers import (
    COPIES,
    FOLDERS,
    ROOT,
    copy_project,
    copy_repository,
    free_port,
    module,
    run,
    run_ranks,
)

MAIN = ROOT / "README.md"
UNATTENDED = ROOT / "06_checkpointing/unattended.md"
PAGES = [
    MAIN,
    *(ROOT / folder / "README.md" for folder in FOLDERS),
    UNATTENDED,
    ROOT / "tests/README.md",
    ROOT / "tests/benchmark.md",
    COPIES / "README.md",
    ROOT / ".github/CONTRIBUTING.md",
    ROOT / "tests/errors.md",
]
SCRIPTS = sorted(ROOT.glob("0*/*.py"))
BASES = {"02": "01", "03": "02", "04": "01", "06": "04", "07": "06"}
FOLDER = {folder[:2]: folder for folder in FOLDERS}
CHANGES = "What changes, step by step"
# in a comment, `# DDP-3: words`, or at the end of a sentence of a docstring
MARK = re.compile(r"(?:# .*?\b|\()([A-Z]{2,5}-\d)\b(: \S|\)\.)?")
HUNK = re.compile(r"^@@ .*\+(\d+).*\n((?:[-+].*\n)*)", re.M)
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
    return [
        re.sub(" +", " ", line)
        for line in text.splitlines()
        if line[:1] not in ("", "#")
    ]


def rows(text):
    """The rows of all tables, as dictionaries from the head of a column to the cell."""
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        head, _, *body = [
            re.split(r" *(?<!\\)\| *", line[1:-1].strip())
            for line in table.splitlines()
        ]
        yield from (dict(zip(head, line, strict=True)) for line in body)


# Scripts differ where a mark says so


def below_the_imports(number):
    """A script without its docstring and imports, which have no marks."""
    text = (ROOT / FOLDER[number] / "train.py").read_text().split('"""', 2)[2]
    return re.sub(r"^(import|from) .*\n", "", text, flags=re.M)


def hunks(number, folder):
    """The hunks of `git diff -w` against the base.

    Of each: the number of its first line in the new file, its old lines, its new ones.
    """
    for each in (BASES[number], number):
        (folder / each).write_text(below_the_imports(each))
    command = ["git", "diff", "--no-index", "-w", "--unified=0", BASES[number], number]
    diff = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    for first, body in HUNK.findall(diff):
        lines = body.splitlines()
        old, new = [[line for line in lines if line[0] == sign] for sign in "-+"]
        yield int(first), old, new


@pytest.mark.parametrize("number", BASES)
def test_each_added_block_opens_with_a_mark_that_has_words(number, tmp_path):
    """A block of more lines than it replaces. It has no mark twice in a row.

    The mark is on the line above, or on the first line that replaces none, or, where
    that opens an `if` or a loop, below it; or in the docstring of a function. A block
    goes on after one line that is unchanged.
    """
    script = below_the_imports(number).splitlines()
    end_of_marked = 0
    for first, old, new in hunks(number, tmp_path):
        lines = [line[1:].strip() for line in new if line[1:].strip()]
        opening = [script[first - 2], *lines[: len(old) + 1]]
        if opening[-1].endswith(":"):
            opening += lines[len(old) + 1 :][:1]
        if lines and lines[0].startswith("def "):
            opening = lines
        marked = any(MARK.search(line) for line in opening)
        goes_on = first <= end_of_marked + 2
        assert len(lines) <= len(old) or marked or goes_on, f"no mark opens {lines}"
        if marked or goes_on:
            end_of_marked = first + max(len(new), 1) - 1
        found = [mark[1] for line in lines if (mark := MARK.search(line))]
        assert all(map(str.__ne__, found, found[1:])), f"twice the same mark in {lines}"


def marked_lines(path):
    """The words of the mark of each line of code: behind it, or on a line above it."""
    lines = path.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        code, _, comment = line.strip().partition("# ")
        if code and MARK.match(f"# {comment}"):
            yield code.strip(), comment
        elif code and MARK.match(above.strip()):
            yield code.strip(), above.strip().removeprefix("# ")


def test_a_mark_means_the_same_in_every_script():
    """Each has words, and the same line of code has the same ones in all that share it.

    A line that 06 has once is compared with fsdp.py, for example. 08 is 06.
    """
    bare = [
        line
        for path in SCRIPTS
        for line in path.read_text().splitlines()
        if (mark := MARK.search(line)) and not mark[2]
    ]
    assert not bare, "a mark without words"
    of_04, of_06, of_07, of_08 = (
        ROOT / FOLDER[number] / "train.py" for number in ("04", "06", "07", "08")
    )
    fsdp = ROOT / "05_model_parallel/fsdp.py"
    assert of_06.read_text() == of_08.read_text()
    for old, new in ((of_04, of_06), (of_06, of_07), (of_06, fsdp), (of_07, fsdp)):
        of_old, of_new = [
            [line.strip().partition("# ")[0].strip() for line in text.splitlines()]
            for text in (old.read_text(), new.read_text())
        ]
        found = [*marked_lines(new)]
        for code, words in marked_lines(old):
            if of_old.count(code) == 1:
                in_new = [each for line, each in found if line == code]
                assert in_new == [words] * of_new.count(code), f"{new}: {code}"


def test_each_script_is_one_file_without_private_names():
    """No name of torch that begins with an underscore."""
    for path in SCRIPTS:
        text = path.read_text()
        imported = re.findall(r"^\s*(?:import|from) +(\w*)", text, re.M)
        assert imported and not {"", *(other.stem for other in SCRIPTS)} & set(imported)
        assert set(re.findall(r"\._[a-z]\w*", text)) <= {"._exit"}, path
        # one of these imports torch.distributed.nn, or the exit may abort
        early = re.search(r"common\.gather|distributed\.(checkpoint|pipelining)", text)
        assert early or "init_process_group(" not in text, path
    lines = [file.read_text().splitlines() for file in ROOT.glob("common/*.py")]
    assert sum(map(len, lines)) < 330


# What the pages show of the code


@pytest.mark.parametrize("number", BASES)
def test_a_page_has_a_section_for_each_mark(number, tmp_path):
    """With sentences, but the marks that the base has, too, may do without.

    02 to 04 also show each line that is added or replaced, but 02 not 04's.
    """
    changes = sections(ROOT / FOLDER[number] / "README.md")[CHANGES]
    named = []
    for heading, text in re.findall(
        r"^### (.*?): .*\n((?:(?!### ).*\n)*)", changes, re.M
    ):
        family = heading.split("-")[0]
        numbers = [int(n) for n in re.findall(r"-(\d)", heading)]
        if " to " in heading:
            numbers = range(numbers[0], numbers[-1] + 1)
        named += [f"{family}-{n}" for n in numbers]
        sentences = re.sub(r"(?s)<details>.*?</details>|```diff.*?```", "", text)
        assert sentences.strip(), heading
    lines = [
        line
        for _, old, new in hunks(number, tmp_path)
        for line in old + new
        if line[1:]
    ]
    added = "\n".join(line for line in lines if line[0] == "+")
    marks, of_base = [
        {mark[1] for mark in MARK.finditer(text)}
        for text in (added, below_the_imports(BASES[number]))
    ]
    assert len(named) == len({*named}) and marks - of_base <= {*named} <= marks
    if number < "05":
        shown, of_04 = [
            re.findall(r"^[-+].+", "".join(blocks(text, "diff")), re.M)
            for text in (changes, (ROOT / FOLDER["04"] / "README.md").read_text())
        ]
        assert sorted(shown) == sorted(
            line
            for line in lines
            if number != "02" or line in shown or line not in of_04
        )


def test_what_else_the_pages_show_of_the_code():
    """DDP for an own script, the batch script, DataParallel, the steps of 05."""
    for file, folder in (("own_ddp.patch", ""), ("own_resume.diff", FOLDER["06"])):
        page = (ROOT / folder / "README.md").read_text()
        shown = page.split(f"<!-- tests/copies/{file} -->\n\n")[1]
        patch = "@@ " + (COPIES / file).read_text().split("@@ ", 1)[1].rstrip()
        assert shown.startswith(f"```diff\n{patch}\n```\n"), file
    [shown, *_] = blocks(sections(ROOT / "07_slurm/README.md")["Run"], "sh")
    assert shown == (ROOT / "07_slurm/run.sh").read_text()
    [shown] = blocks(sections(ROOT / "01_dataparallel/README.md")[CHANGES], "python")
    # the formatter breaks its lines elsewhere, as they are not indented
    script = (ROOT / "01_dataparallel/train.py").read_text()
    assert "".join(shown.split()) in "".join(script.split())
    shown = {
        each[6:13]: each
        for each in blocks((COPIES / "README.md").read_text(), "python")
    }
    assert (
        textwrap.indent(shown["PerRank"], "+", len)
        in (COPIES / "06_ppo.patch").read_text()
    )
    page = ROOT / "05_model_parallel/README.md"
    for row in rows(sections(page)["Steps"]):
        assert row["line"].strip("`") in (page.parent / "train.py").read_text(), row
    fsdp = re.findall(r"^### (FSDP-\d): ", page.read_text(), re.M)
    marks = [mark[1] for mark in MARK.finditer((page.parent / "fsdp.py").read_text())]
    assert sorted(fsdp) == sorted({mark for mark in marks if "FSDP" in mark})


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
            anchors = [
                re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-")
                for each in headings
            ]
            assert anchor in anchors, anchor
    for file in re.findall(r"\b(?:0\d_\w+|common|tests)/[\w/]+\.\w+", text):
        assert (ROOT / file).exists(), file
    required = (ROOT / "requirements.txt").read_text().split()
    assert set(re.findall(r"torch\w*==[\d.]+", text)) <= set(required)


def test_each_error_of_the_scripts_has_a_row_or_names_an_option():
    """In a row `...` and PATH stand for anything."""
    symptoms = [
        row["symptom"]
        for page in PAGES
        for row in rows(page.read_text())
        if "symptom" in row
    ]
    quoted = [
        re.sub(r"(\\\.){3}|PATH", ".*", re.escape(text))
        for text in re.findall("`([^`]+)`", "".join(symptoms))
        if len(text) > 9
    ]
    known = re.compile("|".join(quoted))
    for path in [*SCRIPTS, *ROOT.glob("common/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"an assert in {path}"
            match node:
                case ast.Raise(exc=ast.Call(func=kind, args=[text])):
                    printed = f"{ast.unparse(kind)}: "
                case ast.Call(func=ast.Attribute(attr="error"), args=[text]):
                    printed = "error: "
                case _:
                    continue
            for part in getattr(text, "values", [text]):
                printed += part.value if isinstance(part, ast.Constant) else "{1}"
            assert "--" in printed or known.search(printed), f"{path} prints {printed}"


def test_the_pictures_are_what_their_command_draws():
    for path, text in module(ROOT / ".pages/pictures.py").draw().items():
        assert (ROOT / path).read_text() == text, path


# Options and commands


@pytest.mark.parametrize("folder", FOLDERS)
def test_help_and_the_pages_name_the_same_options_and_defaults(
    folder, monkeypatch, capsys
):
    """On a machine with two GPUs."""
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        module(ROOT / folder / "train.py").parse_args()
    lines = re.split(r"\n *(?=-)", capsys.readouterr().out.split("options:")[1])[2:]
    defaults = {
        OPTION.search(line)[0]: re.search(r"\(default: (.*)\)", line)[1]
        for line in lines
    }
    readme, listed = ROOT / folder / "README.md", {}
    common = sections(ROOT / FOLDERS[0] / "README.md")["Options"]
    for row in rows(common + sections(readme)["Run"]):
        if "option" in row and "default" in row:
            values = (
                row["default"].replace("`", "").split(";")[0].replace("off", "False")
            )
            listed |= zip(
                OPTION.findall(row["option"]), values.split(", "), strict=True
            )
    shared = listed.keys() & defaults.keys()
    assert len(shared) >= 6 and all(
        listed[option] == defaults[option] for option in shared
    )
    assert defaults.keys() - listed.keys() <= set(OPTION.findall(readme.read_text()))


NOT_RUN = "|".join(
    (  # by the next test, as a command
        r"pip install|pytest|ruff|shellcheck",
        "pkill|pgrep|py-spy|python tests/",  # is for CI or you
        r"10\.0\.0\.1|/shared/",  # needs a second machine
        "--compile",  # needs a compiler
        # needs Slurm or a container engine
        "sbatch|salloc|srun|scontrol|scancel|sinfo|docker",
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_command_runs(path, tmp_path):
    """Those that other pages show as well are run with the first of them."""
    copy = copy_repository(tmp_path / "a copy", digits=20)
    earlier = [
        command for each in PAGES[: PAGES.index(path)] for command in commands(each)
    ]
    for command in commands(path):
        if command not in earlier and not re.search(NOT_RUN, command):
            result = run(["bash", "-c", command], copy, limit=300, OMP_NUM_THREADS="1")
            # 1: there are differences
            expected = 1 if command.startswith("git diff") else 0
            assert result.code == expected, result
            trains = re.search(
                rf"^([A-Z_]+=\S+ )*(bash|python|torchrun)\b.*{SCRIPT}", command
            )
            if trains and "selftest" not in command and "resuming" not in result.output:
                assert result.epochs(), result


# Programs


@pytest.mark.parametrize("page", [FOLDER["02"], FOLDER["04"]])
def test_a_program_prints_what_is_shown(page, tmp_path):
    text = sections(ROOT / page / "README.md")["The smallest form"]
    [program], [shown] = blocks(text, "python"), blocks(text, "text")
    (tmp_path / "small.py").write_text(program.replace("29500", str(free_port())))
    if page.startswith("02"):
        result = run([sys.executable, "small.py"], tmp_path)
    else:
        result = run_ranks("small.py", 2, cwd=tmp_path)
    assert sorted(result.output.splitlines()) == sorted(shown.splitlines()), result


@pytest.mark.slow
def test_the_unit_of_systemd_is_valid(tmp_path):
    shutil.which("systemd-analyze") or pytest.skip("systemd-analyze is not installed")
    [unit] = blocks(UNATTENDED.read_text(), "ini")
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
