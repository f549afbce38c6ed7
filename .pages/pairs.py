"""Pair the lines of two scripts, and show a line as HTML."""

import re
from collections import namedtuple
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

MARK = re.compile(r"\b[A-Z]{2,5}-\d+")
Row = namedtuple("Row", "old new equal")  # the numbers of two lines, or None


class Script:
    """Its lines, the mark in the comment of each, and the words of each."""

    def __init__(self, path):
        program = path.read_text("utf-8")
        self.path, self.lines = path, program.splitlines()
        found = [re.search(f"# .*?({MARK.pattern})", line) for line in self.lines]
        self.marks = [match and match[1] for match in found]
        self.words = words_of(program)
        self.purpose = self.lines[0].strip('"')
        self.train = next(
            n for n, line in enumerate(self.lines) if "def train(" in line
        )


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


def pair(old, new):
    """Two scripts side by side, as rows. Indentation alone is no change."""
    texts = [[line.strip() for line in script.lines] for script in (old, new)]
    rows = []
    for tag, a, b, c, d in SequenceMatcher(None, *texts, False).get_opcodes():
        if tag == "equal":
            rows += [
                Row(*numbers, True)
                for numbers in zip(range(a, b), range(c, d), strict=True)
            ]
            continue
        # lines with the same first words, such as `lr =`, are side by side
        starts = [
            [re.findall(r"\w+|[^\w\s]", line)[:2] for line in lines]
            for lines in (texts[0][a:b], texts[1][c:d])
        ]
        starts = [[*map(tuple, each)] for each in starts]
        for _, e, f, g, h in SequenceMatcher(None, *starts, False).get_opcodes():
            numbers = zip_longest(range(a + e, a + f), range(c + g, c + h))
            rows += [Row(*each, False) for each in numbers]
    return rows


def marks_of(rows, new):
    """The added lines of each mark. A block continues after one old line."""
    found, mark, last = {}, None, -9
    for n in [row.new for row in rows if not row.equal and row.new is not None]:
        mark = new.marks[n] or (mark if n <= last + 2 else None)
        found.setdefault(mark, []).append(n)
        last = n
    found.pop(None, None)
    return found


def fresh(words, others):
    """The numbers of the words that a similar line lacks."""
    texts = [[text for _, text in each] for each in (words, others)]
    matcher = SequenceMatcher(None, *texts, False)
    if matcher.ratio() < 0.5:
        return set()
    found = {n for n, (_, text) in enumerate(words) if n > 0 or text.strip()}
    for start, _, size in matcher.get_matching_blocks():
        found -= set(range(start, start + size))
    return found


def line(script, n, stressed, links):
    """A line as HTML; links: where the note of a mark is."""
    if n is None:
        return "<i></i>"
    shown = ""
    for k, (look, word) in enumerate(script.words[n]):
        text = escape(word, quote=False)
        if look == "c1" and word in links:
            text = f'<a href="{links[word]}">{text}</a>'
        if look not in ("", "n", "o", "p", "w"):
            text = f"<span class={look}>{text}</span>"
        shown += f"<b>{text}</b>" if k in stressed else text
    text = script.lines[n]
    indent = len(text) - len(text.lstrip())
    return f"<code data-n={n + 1} style=--i:{indent}ch>{shown}</code>"


def show(row, old, new, look, links):
    """A row as HTML."""
    left = right = set()
    if not row.equal and None not in row:
        words = old.words[row.old], new.words[row.new]
        left, right = fresh(*words), fresh(*words[::-1])
    kind = "equal" if row.equal else f"changed {look}"
    lines = line(old, row.old, left, links) + line(new, row.new, right, links)
    return f'<div class="{kind}">{lines}</div>'
