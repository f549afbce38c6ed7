"""Copies of scripts and of the repository, with few digits, and changes in them."""

import os
import random
import shutil
import subprocess

from helpers.paths import ROOT
from helpers.ranks import run_ranks

FEW = 140 * 9  # training images in a copy
COPIES = ROOT / "tests/copies"
CLOCK = [("import os\n", "import itertools\nimport os\n"), ("time.perf_counter()", "next(CLOCK)"),
         ("\nfaulthandler.", "\nCLOCK = itertools.count(step=7)\nfaulthandler.")]
IGNORED = shutil.ignore_patterns(".git", ".venv", "*cache*", "data", "*.pt")


def copy_project(folder, script, *others):
    """Copy a script, other files of its folder and common/ as a reader does, with few digits."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (script.name, *others):
        shutil.copy(script.parent / name, folder / name)
    shutil.copytree(ROOT / "common", folder / "common", ignore=IGNORED)
    fewer_digits(folder)
    return folder


def copy_repository(folder):
    """Copy this repository, with few digits and room for a project."""
    shutil.copytree(ROOT, folder, ignore=IGNORED)
    fewer_digits(folder)
    (folder / "data").symlink_to("common")
    (folder / "YOUR_PROJECT").mkdir()
    return folder


def apply(project, patch):
    """Apply a patch of copies/ to a copied project; the error names the hunk that does not fit."""
    command = ["git", "apply", "-p2", "--reject", "--verbose", COPIES / patch]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(project.parent)}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch} does not fit:\n{done.stderr}"


def write_lines(project, train, test=31):
    """Write lines of text that differ, of several lengths, for the language models of copies/."""
    words = "the a small large model step rank node trains reads keeps gradient of with".split()
    numbers = random.Random(0)
    lines = [f"{number} {' '.join(numbers.choices(words, k=numbers.randint(1, 8)))}"
             for number in range(train + test)]
    (project / "train.txt").write_text("\n".join(lines[:train]))
    (project / "test.txt").write_text("\n".join(lines[train:]))


def edit(project, file, *changes):
    """Replace texts, which must be there, in a file of a copied project."""
    path = project / file
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)


def fewer_digits(project, now=1438, digits=140):
    """Let the copy train on few digits, each of them at nine positions."""
    changes = [(f"images[:{now},", f"images[:{digits},"), (f"labels[:{now}]", f"labels[:{digits}]")]
    edit(project, "common/data.py", *changes)


def without_batch_norm(project):
    """Let the copied ConvNet normalise each image separately, and the copy compute in float64.

    Then a batch may be split: float64 leaves a clear gap between rounding and a mistake.
    """
    edit(project, "common/model.py", ("nn.BatchNorm2d(", "nn.GroupNorm(4, "))
    float64 = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
    edit(project, "common/data.py", ("import torch\n", float64))


def clip_at(project, norm, *scripts):
    """Let copied scripts clip the gradients at another norm.

    Clipping may hide a wrong divisor: it gives every large gradient the same norm.
    """
    for script in scripts:
        edit(project, script, ("MAX_GRAD_NORM = 0.7", f"MAX_GRAD_NORM = {norm}"))


def splittable(folder):
    """Copy 04, for a comparison of how its batches are split, without the clipping of gradients."""
    project = copy_project(folder, ROOT / "04_ddp_torchrun/train.py")
    clip_at(project, 1e9, "train.py")
    without_batch_norm(project)
    return project


def trained(project, nproc, *options):
    """The weights of a copied project after an epoch."""
    output = project / f"weights-{len(list(project.glob('*.pt')))}.pt"
    options = ["--data-dir", "common", "--epochs", 1, "--lr", 0.01, "--output", output, *options]
    run_ranks("train.py", nproc, *options, cwd=project)
    return output


def with_dropout(project):
    """Let the copied ConvNet use random numbers in each step."""
    features = "self.layer2(self.layer1(images)).flatten(1)"
    dropout = f"nn.functional.dropout({features}, 0.1, self.training)"
    edit(project, "common/model.py", (features, dropout))
