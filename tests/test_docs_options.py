"""Options and defaults in the READMEs are those of the scripts and of torchrun."""

import re

import pytest
from helpers.paths import FOLDERS, ROOT
from helpers.readmes import MAIN, OPTION, rows, sections
from helpers.scripts import parse
from torch.distributed.run import get_args_parser


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
