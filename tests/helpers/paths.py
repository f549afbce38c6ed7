"""Where things are."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FOLDERS = sorted(path.parent.name for path in ROOT.glob("0*/train.py"))
DIGITS = ROOT / "common"  # as --data-dir: the bundled digits, without a download


def label(path):
    """The name of a path in the list of tests."""
    return str(path.relative_to(ROOT))
