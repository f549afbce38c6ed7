"""The pages are true: their commands run, and what they show of the code is so."""

import difflib
import re
import sys

import pytest
from helpers import ROOT, copy_repository, run, train

PAGES = [
    path
    for pattern in ("*.md", "0*/*.md", "tests/**/*.md", ".github/*.md")
    for path in sorted(ROOT.glob(pattern))
]
# a second machine, a compiler, Slurm or containers are needed, or it takes too long
NOT_RUN = re.compile(
    r"pip install|pytest|10\.0\.0\.1|--compile|sbatch|salloc|srun|scontrol|scancel|"
    r"docker (build|run)|bash 08"
)


def name(path):
    return str(path.relative_to(ROOT))


def blocks(text, language):
    """The code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_command_runs(path, tmp_path):
    copy = copy_repository(tmp_path / "a copy", digits=20)
    text = "".join(blocks(path.read_text(), "bash")).replace("\\\n", "")
    for command in text.splitlines():
        if not NOT_RUN.search(command):
            result = run(["bash", "-c", command], copy, OMP_NUM_THREADS=1)
            # 1: there are differences
            assert result.code == (1 if command.startswith("git diff") else 0), result


def hunks(old, new, folder):
    """Those of `git diff -w` between scripts, without docstrings and imports."""
    for name, script in (("old", old), ("new", new)):
        text = (ROOT / script).read_text().split('"""', 2)[2]
        text = re.sub(r"^(import|from) .*\n", "", text, flags=re.M)
        (folder / name).write_text(text)
    diff = run(["git", "diff", "--no-index", "-w", "-U1", "old", "new"], folder).output
    return re.split(r"^@@.*\n", diff, flags=re.M)[1:]


BASES = [
    ("01_dataparallel/train.py", "02_ddp_spawn/train.py"),
    ("02_ddp_spawn/train.py", "03_ddp_multinode_spawn/train.py"),
    ("01_dataparallel/train.py", "04_ddp_torchrun/train.py"),
    ("04_ddp_torchrun/train.py", "05_model_parallel/fsdp.py"),
    ("04_ddp_torchrun/train.py", "06_checkpointing/train.py"),
    ("06_checkpointing/train.py", "07_slurm/train.py"),
    ("07_slurm/train.py", "07_slurm/fsdp.py"),
]


@pytest.mark.parametrize(("old", "new"), BASES)
def test_an_added_block_has_a_mark(old, new, tmp_path):
    """If it has at least two lines more than it replaces."""
    for hunk in hunks(old, new, tmp_path):
        added, removed = [re.findall(rf"^\{sign}.+", hunk, re.M) for sign in "+-"]
        marked = re.search(r"^[+ ].*# .*[A-Z]+-\d", hunk, re.M)
        assert marked or len(added) < len(removed) + 2, hunk


@pytest.mark.parametrize(("old", "new"), BASES[:3])
def test_a_page_shows_each_line_that_changes(old, new, tmp_path):
    """But 02 does not show again what 04 shows."""
    expected = re.findall("^[-+].+", "".join(hunks(old, new, tmp_path)), re.M)
    shown, shown_by_04 = [
        re.findall("^[-+].+", "".join(blocks(page.read_text(), "diff")), re.M)
        for page in (
            (ROOT / new).with_name("README.md"),
            ROOT / "04_ddp_torchrun/README.md",
        )
    ]
    if "02" in new:
        again = {*shown_by_04} - {*shown}
        expected = [line for line in expected if line not in again]
    assert sorted(shown) == sorted(expected)


SMALL = ["04_ddp_torchrun/small.py", "04_ddp_torchrun/small_ddp.py"]
SMALL.append("06_checkpointing/small_resume.py")


@pytest.mark.parametrize(
    ("page", "old", "new", "most"),
    [
        ("README.md", *SMALL[:2], 16),
        ("06_checkpointing/README.md", *SMALL[1:], 34),
    ],
)
def test_a_page_shows_the_difference_of_two_scripts(page, old, new, most):
    """It adds at most this many lines."""
    old, new = [(ROOT / path).read_text().splitlines() for path in (old, new)]
    shown = "".join(blocks((ROOT / page).read_text(), "diff"))
    shown = [line for line in shown.splitlines() if not line.startswith("@@")]
    # the whole scripts, or the lines next to a change
    expected = [
        [*difflib.unified_diff(old, new, n=context, lineterm="")][2:]
        for context in (99, 1)
    ]
    assert shown in [
        [line for line in lines if not line.startswith("@@")] for lines in expected
    ]
    assert sum(line.startswith("+") for line in shown) <= most


@pytest.mark.parametrize("folder", ["02_ddp_spawn", "04_ddp_torchrun"])
def test_a_program_prints_what_is_shown(folder, tmp_path):
    page = (ROOT / folder / "README.md").read_text()
    [program, *_], [shown, *_] = blocks(page, "python"), blocks(page, "text")
    (tmp_path / "small.py").write_text(program)
    if folder.startswith("02"):
        result = run([sys.executable, "small.py"], tmp_path)
    else:
        result = train("small.py", 2, cwd=tmp_path)
    # the processes may mix their lines
    assert sorted(result.output) == sorted(shown), result


def test_git_ignores_what_the_commands_of_the_pages_write():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    names = ["mnist.pt", "run1.ckpt", "run1.ckpt.tmp", "text.rows", "logs/0/stdout.log"]
    names += ["checkpoint/epoch-000001/.metadata", "tuned/a", "tuned.tmp/a"]
    result = run(["git", "check-ignore", *names], ROOT)
    assert result.output.split() == names, result


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    text = path.read_text()
    for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        page = path.parent / file if file else path
        assert page.exists(), file
        if anchor:
            page = page / "README.md" if page.is_dir() else page
            headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
            anchors = [
                re.sub(r"[^\w -]", "", each).lower().replace(" ", "-")
                for each in headings
            ]
            assert anchor in anchors, anchor
