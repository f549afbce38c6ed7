"""05's README, "Pretrained weights": a folder of safetensors is read into the shards."""

import re

import pytest
import torch
from helpers.paths import ROOT
from helpers.projects import apply, copy_project, edit
from helpers.ranks import run_ranks
from helpers.readmes import blocks, sections
from helpers.scripts import load_script

pytestmark = pytest.mark.slow
BEFORE = """
    def kilobytes(field):
        return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the highest VmRSS from now on
    before = kilobytes("VmRSS")
"""
AFTER = """
    print("grown by", kilobytes("VmHWM") - before, flush=True)
    save_whole(model, args.output)
    sys.exit()
"""


def test_a_folder_of_safetensors_is_read_into_the_shards(tmp_path):
    """In two files, of which each rank reads about half: 201 MB are never on one rank."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    project = copy_project(tmp_path / "project", ROOT / "05_model_parallel/fsdp.py")
    apply(project, "05_fsdp_llama.patch")
    for name in ("train.txt", "test.txt"):
        (project / name).write_text("a line\n" * 4)
    model = load_script(project / "fsdp.py").Llama(1024, 4)
    weights = dict(model.named_parameters())
    folder = tmp_path / "FOLDER"
    folder.mkdir()
    for number in (0, 1):
        part = {name: weights[name].detach() for name in sorted(weights)[number::2]}
        safetensors.save_file(part, folder / f"model-0000{number + 1}-of-00002.safetensors")
    [lines, _] = blocks(sections(ROOT / "05_model_parallel/README.md")["Pretrained weights"],
                        "python")
    lines = "".join(f"    {line}\n" for line in lines.replace("FOLDER", str(folder)).splitlines())
    shard = "    model.apply(shard)  # children first\n"
    edit(project, "fsdp.py", (shard, shard + BEFORE + lines + AFTER),
         ("import os\n", "import os\nimport re\n"))
    options = ["--width", 1024, "--depth", 4, "--data-dir", "."]
    result = run_ranks("fsdp.py", 2, *options, cwd=project)
    loaded = torch.load(project / "last.pt", weights_only=True)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    size = sum(part.nbytes for part in weights.values())
    for grown in re.findall(r"^grown by (\d+)", result.output, re.M):
        assert int(grown) * 1024 < 0.8 * size, result
