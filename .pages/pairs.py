"""The scripts, how `git diff -w` pairs the lines of two of them, and lines as HTML."""

import os
import re
import subprocess
from collections import namedtuple
from difflib import SequenceMatcher
from functools import cache
from html import escape
from itertools import count, groupby, zip_longest
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

os.chdir(Path(__file__).resolve().parent.parent)  # the repository: all paths begin here
MARK = re.compile(r"(?<!\w)[A-Z]{2,5}-\d+")

SCRIPTS = {}  # by their short names, such as 04, then fsdp
for path in sorted(Path().glob("0*/train.py")):
    SCRIPTS[path.parent.name[:2]] = path
for path in sorted(Path().glob("0*/*.py")):
    if path.name != "train.py":
        SCRIPTS[path.stem] = path

# whether the two lines are equal, and their numbers, or None
Row = namedtuple("Row", "equal old new")


def words_of(program):
    """Its lines, each as words: a class of pygments, such as c1 (comment), and text."""
    lines = [[]]
    for kind, value in PythonLexer(stripnl=False).get_tokens(program):
        for word in re.findall(rf"\n|{MARK.pattern}|\w+|[^\S\n]+|[^\w\s]", value):
            if word == "\n":
                lines.append([])
            else:
                lines[-1].append((STANDARD_TYPES.get(kind, ""), word))
    return lines


def mark_of(line):
    """The first mark in the comment of a line, or None."""
    found = re.search(f"# .*?({MARK.pattern})", line)
    return found and found[1]


# the lines of each script, the marks and the words of each line
TEXT, MARKS, WORDS = {}, {}, {}
TRAIN = {}  # the number of the line `def train(`: a page folds what is above it
for script, path in SCRIPTS.items():
    program = path.read_text("utf-8")
    TEXT[script] = program.splitlines()
    MARKS[script] = [mark_of(line) for line in TEXT[script]]
    WORDS[script] = words_of(program)
    TRAIN[script] = program.split("\ndef train(")[0].count("\n") + 1


def starts(script, numbers):
    """The first two words of each of the lines."""
    lines = [TEXT[script][n] for n in numbers]
    return [tuple(re.findall(r"\w+|[^\w\s]", line)[:2]) for line in lines]


@cache
def rows(old, new):
    """Two scripts side by side, as a list of Row."""
    command = ["git", "diff", "--no-index", "-w", "-U99999"]
    command += ["--no-color", "--no-ext-diff", SCRIPTS[old], SCRIPTS[new]]
    diff = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    signs = re.findall(r"\n([ +-])", diff.partition("\n@@")[2])
    if not signs:  # the scripts are equal
        signs = [" "] * len(TEXT[old])
    old_numbers, new_numbers = count(), count()
    found = []
    for equal, block in groupby(signs, lambda sign: sign == " "):
        left, right = [], []
        for sign in block:
            if sign != "+":
                left.append(next(old_numbers))
            if sign != "-":
                right.append(next(new_numbers))
        # in a change, lines with the same first words, such as `lr =`, are side by side
        matcher = SequenceMatcher(None, starts(old, left), starts(new, right), False)
        for _, a, b, c, d in matcher.get_opcodes():
            for pair in zip_longest(left[a:b], right[c:d]):
                found.append(Row(equal, *pair))
    return found


def added(rows):
    """The numbers of the new lines."""
    return [row.new for row in rows if not row.equal and row.new is not None]


def removed(rows):
    """The numbers of the old lines that are not in the new script."""
    return [row.old for row in rows if not row.equal and row.old is not None]


def runs(old, new):
    """For each mark in the added lines: the runs of lines that it opens.

    At the begin of an `if` or a loop a mark also opens the line above. A run goes on
    after one line that is not new.
    """
    text, marks = TEXT[new], MARKS[new]
    found = {}
    run, last = [], -1
    for n in added(rows(old, new)):
        if marks[n]:
            above = last == n - 1 and last not in run and text[last].endswith(":")
            run = [last, n] if above else [n]
            found.setdefault(marks[n], []).append(run)
        elif run and run[-1] == n - 1:
            run.append(n)
        elif run and run[-1] == n - 2 and text[n - 1].strip() and not marks[n - 1]:
            run += [n - 1, n]
        last = n
    return found


def different(one, other):
    """The numbers of the words that a similar line lacks.

    Words of the comment are among them only if all others are the same.
    """
    texts = [text for _, text in one]
    matcher = SequenceMatcher(None, texts, [text for _, text in other], False)
    if matcher.ratio() < 0.5:
        return set()
    spaces = {n for n, text in enumerate(texts) if text.isspace()}
    fresh = set(range(len(texts))) - spaces
    for start, _, size in matcher.get_matching_blocks():
        fresh -= set(range(start, start + size))
    fresh_code = {n for n in fresh if one[n][0] != "c1"}
    fresh = fresh_code or fresh
    return fresh | {n for n in spaces if {n - 1, n + 1} <= fresh}


def depth(script, lines):
    """How many brackets open in these lines and close below them."""
    words = [text for n in lines for look, text in WORDS[script][n] if look == "p"]
    brackets = "".join(words)
    return len(re.findall(r"[(\[{]", brackets)) - len(re.findall(r"[)\]}]", brackets))


@cache
def strong_words(old, new):
    """By script and line: the numbers of the words that the line next to it lacks.

    Where one script has a statement in several lines, and the other in one, this one is
    compared with all of them.
    """
    statements = []
    for each in rows(old, new):
        if each.equal:
            continue
        if None not in each:
            statements.append({old: [each.old], new: [each.new]})
        elif statements:
            longer, shorter = (old, new) if each.new is None else (new, old)
            n = each.old if each.new is None else each.new
            lines = statements[-1]
            is_open = depth(longer, lines[longer]) > depth(shorter, lines[shorter])
            if is_open and lines[longer][-1] == n - 1:
                lines[longer].append(n)
    found = {}
    for lines in statements:
        for one, other in ((old, new), (new, old)):
            words = [word for n in lines[one] for word in WORDS[one][n]]
            others = [word for n in lines[other] for word in WORDS[other][n]]
            strong = different(words, others)
            first = 0
            for n in lines[one]:
                numbers = range(len(WORDS[one][n]))
                found[one, n] = {k for k in numbers if first + k in strong}
                first += len(numbers)
    return found


def line(script, n, strong=()):
    """A line as HTML, or nothing; strong: the numbers of words to stress."""
    if n is None:
        return "<i></i>"
    words = WORDS[script][n]

    def look_of(k):
        return words[k][0], k in strong

    shown = ""
    for (look, bold), group in groupby(range(len(words)), look_of):
        part = escape("".join(words[k][1] for k in group), quote=False)
        if look == "c1":
            link = r'<a class=mark href="marks.html#\g<0>">\g<0></a>'
            part = MARK.sub(link, part, count=1)
        if look not in ("", "n", "o", "p", "w"):
            part = f"<span class={look}>{part}</span>"
        shown += f"<b>{part}</b>" if bold else part
    text = TEXT[script][n]
    indent = len(text) - len(text.lstrip())
    place = f'id="{script}-{n + 1}" data-n={n + 1} style=--i:{indent}ch'
    return f"<code {place}>{shown}</code>"


def row(old, new, each, look):
    """Two lines side by side as HTML."""
    strong = strong_words(old, new)
    left = line(old, each.old, strong.get((old, each.old), ()))
    right = line(new, each.new, strong.get((new, each.new), ()))
    kind = "equal" if each.equal else "changed"
    return f'<div class="{kind} {look}">{left}{right}</div>'
