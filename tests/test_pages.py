"""The pages are true: their commands run, and what they show of the code is so."""

import difflib
import html
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
NOT_RUN = re.compile(r"pip install|pytest|10\.0\.0\.1|--compile|sbatch|bash 08")


def name(path):
    return str(path.relative_to(ROOT))


def blocks(text, language):
    """The code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


# of real logs
LOG = [
    "failed (exitcode: -11) local_rank: 0 (pid: 3304209) of binary: /v/bin/python",
    "Sending process 1430 closing signal SIGTERM",
    "the rendezvous 101 due to an error of type RendezvousConnectionError.",
    "torch/distributed/elastic/agent/server/api.py:719] Received 1 death signal",
    "init.cc:904 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on",
    "alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'",
    "Loss.cu:245: nll_loss: block: [0,0,0] Assertion `t >= 0 && t < n_classes` failed.",
    "NCCL WARN socketStartConnect: Connect failed : Software caused connection abort",
    "ProcessGroupNCCL.cpp:1316] Heartbeat monitor timed out! Process will be",
    "message truncated : receiving 501760 bytes instead of 65536. If you believe",
    "RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch "
    "installation.",
    "RuntimeError: No backend type associated with device type cpu",
    "RuntimeError: Expected to have finished reduction in the prior iteration before",
    "RuntimeError: Expected to mark a variable ready only once. This error is caused",
    "PytorchStreamWriter failed writing file data/0: file write failed",
    "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded",
    "OSError: [Errno 5] Input/output error",
    "Missing key in checkpoint state_dict: optimizer.state.unused.weight.step.",
    "ValueError: a.ckpt has {'seed': 0}, not {'seed': 1}",
]


@pytest.mark.parametrize("line", LOG)
def test_a_line_of_a_log_has_a_row(line):
    page = (ROOT / "04_ddp_torchrun/errors.md").read_text()
    symptoms = re.findall(
        "`([^`]+)`", " ".join(re.findall(r"^\| (.*?) \|", page, re.M))
    )
    words = [re.escape(each).replace("PATH", ".*") for each in symptoms]
    assert any(re.search(each.replace(r"\.\.\.", ".*"), line) for each in words)


@pytest.mark.slow
def test_the_page_of_two_scripts(tmp_path):
    """Each new script is there as a whole, and each link to a note or a page leads."""
    pytest.importorskip("markdown_it")
    copy = copy_repository(tmp_path / "a copy")
    assert run([sys.executable, copy / ".pages/build.py"], tmp_path).code == 0
    site = {path.name: path.read_text() for path in copy.glob(".pages/site/*.html")}
    for text in site.values():
        old, new = re.findall("<b>(0.*?py)</b>", text)
        right = re.findall("<code [^>]*>((?:(?!<code).)*)</code></div>", text)
        shown = html.unescape(re.sub("<.*?>", "", "\n".join(right)))
        assert shown == (ROOT / new).read_text().rstrip()
        for file, anchor in re.findall(r'href="(\w[^"#]*)?#?([^"]*)"', text):
            assert f'id="{anchor}"' in text if anchor else file in site, (file, anchor)
    assert len(site) == 13


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


@pytest.mark.parametrize("folder", sorted(ROOT.glob("0[2-7]*")), ids=name)
def test_a_step_shows_lines_of_the_scripts(folder):
    new, old = [
        "".join("".join(path.read_text() for path in scripts).split())
        for scripts in (folder.glob("*.py"), ROOT.glob("0*/*.py"))
    ]
    page = (folder / "README.md").read_text()
    for step in re.findall(r"^### [A-Z]+-\d: (.*?)(?=^#|\Z)", page, re.M | re.S):
        for line in "".join(blocks(step, "(?:diff|python)")).splitlines():
            words = "".join(line.lstrip("+-").split())
            found = words in (old if line[:1] == "-" else new)
            assert found, line


SMALL = "04_ddp_torchrun/small.py"
DDP = "04_ddp_torchrun/small_ddp.py"


@pytest.mark.parametrize(
    ("page", "old", "new", "context", "most"),
    [
        ("README.md", SMALL, DDP, 99, 16),
        ("06_checkpointing/README.md", DDP, "06_checkpointing/small_resume.py", 1, 34),
    ],
)
def test_a_page_shows_the_difference_of_two_scripts(page, old, new, context, most):
    """It adds at most this many lines."""
    old, new = [(ROOT / path).read_text().splitlines() for path in (old, new)]
    expected = [*difflib.unified_diff(old, new, n=context, lineterm="")][2:]
    [shown] = blocks((ROOT / page).read_text(), "diff")
    assert shown.splitlines() == expected[context == 99 :]  # without @@
    assert sum(line.startswith("+") for line in expected) <= most


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
