"""The READMEs have one form, working links and plain English."""

import re

import pytest
from helpers.commands import EPOCH
from helpers.paths import FOLDERS, ROOT, label
from helpers.readmes import CHANGES, MAIN, READMES, blocks, commands, rows, sections

PROSE = [*READMES, *(path for kind in ("py", "sh", "yaml") for path in ROOT.glob(f"0*/*.{kind}"))]
PROSE += [*ROOT.glob("common/*.py"), ROOT / "08_docker/Dockerfile"]
SECTIONS = ["Run", "Expected output", CHANGES, "Pitfalls", "Copy it"]
LAUNCHERS = ("python ", "torchrun ", "export TORCH_", "sbatch ", "salloc ", "docker ")
NOT_ENGLISH = (  # what nobody says, or what programs do not do
    r"\bshall\b|\bgo(es|ing)? on\b|\banew\b|\bfor nothing\b|\bwho is who\b|\bbut for\b"
    r"|\bof (its|their|one's) own\b(?! [-\w])|\bbeside\b|\b(that|those) of\b"
    r"|\balone\b(?! =|\W*[()])"
    r"|\b(speaks?|says?|carr(y|ies)|refuses?|meets?) |\b(batch|images|steps?) a (step|process)\b"
    r"|\b(one|each|per) process a GPU\b|\bstands? (in|on|for)\b|\bshares? out\b"
)


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


def test_every_mark_is_in_the_index():
    text = sections(MAIN)["Read two scripts side by side"]
    scripts = "".join(path.read_text() for path in ROOT.glob("*/*.py"))
    listed = re.findall(r"(?:^-|·)\s+([A-Z]+-\d)\s", text, re.M)
    assert sorted(set(listed)) == sorted(listed)
    assert set(listed) == set(re.findall(r"\b[A-Z]+-\d\b", scripts))


def test_each_promise_names_a_test():
    table = sections(ROOT / "tests/README.md")["Promises"]
    for row in rows(table):
        names = re.findall(r"`([\w/]+\.py)::(\w+)`", row["test"])
        assert names, row
        for file, name in names:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"
