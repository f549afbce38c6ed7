"""The scripts, what git diff --no-index -w says of two of them, and their lines as HTML."""

import os
import re
import subprocess
from difflib import SequenceMatcher
from functools import cache
from html import escape
from itertools import count, groupby, zip_longest
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

os.chdir(Path(__file__).resolve().parent.parent)  # the repository, where all paths begin
SCRIPTS = {path.parent.name[:2] if path.name == "train.py" else path.stem: path for path in
           sorted(Path().glob("0*/*.py"), key=lambda path: (path.name != "train.py", path))}
TEXT = {script: path.read_text("utf-8").splitlines() for script, path in SCRIPTS.items()}
MARK = re.compile(r"(?<!\w)[A-Z]{2,5}-\d+")
MARKS = {script: [re.search(f"# .*?({MARK.pattern})|$", text)[1] for text in lines]
         for script, lines in TEXT.items()}


def words(text):
    """The lines of a program, each as its words: a class of pygments, such as c1, and the word."""
    lines = [[]]
    for kind, value in PythonLexer(stripnl=False).get_tokens(text):
        for word in re.findall(rf"\n|{MARK.pattern}|\w+|[^\S\n]+|[^\w\s]", value):
            if word == "\n":
                lines.append([])
            else:
                lines[-1].append((STANDARD_TYPES.get(kind, ""), word))
    return lines


WORDS = {script: words(path.read_text("utf-8")) for script, path in SCRIPTS.items()}
TRAIN = {script: path.read_text("utf-8").split("\ndef train(")[0].count("\n") + 1
         for script, path in SCRIPTS.items()}  # its first line; the page folds what is above


@cache
def rows(old, new):
    """For each row: whether it is equal, and the numbers of its old and its new line, or None."""
    command = ["git", "diff", "--no-index", "-w", "-U99999", "--no-color", "--no-ext-diff"]
    run = subprocess.run([*command, SCRIPTS[old], SCRIPTS[new]], stdout=subprocess.PIPE, text=True)
    signs = re.findall(r"\n([ +-])", run.stdout.partition("\n@@")[2]) or [" "] * len(TEXT[old])
    numbers, found = (count(), count()), []
    for equal, block in groupby(signs, " ".__eq__):
        block = [*block]
        left, right = [[next(number) for sign in block if sign != other]
                       for number, other in zip(numbers, "+-", strict=True)]
        # in a change, lines with the same first two words, such as `lr =`, are side by side
        starts = [[tuple(re.findall(r"\w+|[^\w\s]", TEXT[script][n])[:2]) for n in lines]
                  for script, lines in ((old, left), (new, right))]
        for _, a, b, c, d in SequenceMatcher(None, *starts, False).get_opcodes():
            found += [(equal, *each) for each in zip_longest(left[a:b], right[c:d])]
    return found


def runs(old, new):
    """For each mark in the added lines: the runs of lines that it opens."""
    found = []
    for n in [b for equal, _, b in rows(old, new) if not equal and b is not None]:
        if MARKS[new][n]:
            found.append((MARKS[new][n], [n]))
        elif found and found[-1][1][-1] == n - 1:
            found[-1][1].append(n)
    return {mark: [run for each, run in found if each == mark] for mark, _ in found}


def different(one, other):
    """The numbers of the words that a similar line lacks; in the comment if nowhere else."""
    texts = [[word for _, word in line] for line in (one, other)]
    matcher = SequenceMatcher(None, *texts, False)
    if matcher.ratio() < 0.5:
        return set()
    same = {start + n for start, _, size in matcher.get_matching_blocks() for n in range(size)}
    fresh = {n for n, word in enumerate(texts[0]) if not word.isspace()} - same
    fresh = {n for n in fresh if one[n][0] != "c1"} or fresh
    return fresh | {n for n, word in enumerate(texts[0])
                    if word.isspace() and {n - 1, n + 1} <= fresh}


def line(script, n, other=()):
    """A line as HTML, or nothing; the words that the other line lacks are stronger."""
    if n is None:
        return "<i></i>"
    text, shown = TEXT[script][n], ""
    strong = different(WORDS[script][n], other) if other else ()
    for (look, bold), group in groupby(enumerate(WORDS[script][n]),
                                       lambda each: (each[1][0], each[0] in strong)):
        part = escape("".join(word for _, (_, word) in group), False)
        if look == "c1":
            part = MARK.sub(r'<a class=mark href="marks.html#\g<0>">\g<0></a>', part, 1)
        part = part if look in ("", "n", "o", "p", "w") else f"<span class={look}>{part}</span>"
        shown += f"<b>{part}</b>" if bold else part
    indent = len(text) - len(text.lstrip())
    return f'<code id="{script}-{n + 1}" data-n={n + 1} style=--i:{indent}ch>{shown}</code>'


def row(old, new, equal, a, b, look):
    """Two lines side by side as HTML."""
    changed = not equal and None not in (a, b)
    sides = line(old, a, changed and WORDS[new][b]) + line(new, b, changed and WORDS[old][a])
    return f'<div class="{"equal" if equal else "changed"} {look}">{sides}</div>'
