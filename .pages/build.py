"""Write .pages/site/: two scripts side by side, with notes from the READMEs.

    pip install -r .pages/requirements.txt && python .pages/build.py

Then open .pages/site/index.html. The notes are the sections of the READMEs such as
"### DDP-3: shard the data".
"""

import re
import shutil
from collections import namedtuple
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

ROOT = Path(__file__).resolve().parents[1]
HERE, SITE = ROOT / ".pages", ROOT / ".pages/site"
# the scripts left and right, and the title; the first pair is index.html, too
PAIRS = [
    ("01_dataparallel/train.py", "04_ddp_torchrun/train.py", "one process → DDP"),
    ("04_ddp_torchrun/small.py", "04_ddp_torchrun/small_ddp.py", "the smallest → DDP"),
    (
        "04_ddp_torchrun/small_ddp.py",
        "06_checkpointing/small_resume.py",
        "DDP → resume",
    ),
    ("04_ddp_torchrun/train.py", "06_checkpointing/train.py", "DDP → checkpoints"),
    ("06_checkpointing/train.py", "07_slurm/train.py", "checkpoints → stops"),
    (
        "06_checkpointing/train.py",
        "06_checkpointing/image_folder.py",
        "checkpoints → images",
    ),
    ("04_ddp_torchrun/train.py", "05_model_parallel/train.py", "DDP → layers split"),
    ("04_ddp_torchrun/train.py", "05_model_parallel/fsdp.py", "DDP → FSDP"),
    ("07_slurm/train.py", "07_slurm/fsdp.py", "stops → FSDP"),
    ("07_slurm/fsdp.py", "05_model_parallel/huggingface.py", "FSDP → Hugging Face"),
    ("01_dataparallel/train.py", "02_ddp_spawn/train.py", "one process → spawn"),
    (
        "02_ddp_spawn/train.py",
        "03_ddp_multinode_spawn/train.py",
        "spawn → two machines",
    ),
]
MARK = re.compile(r"\b[A-Z]{2,5}-\d+")
Row = namedtuple("Row", "old new equal")  # the numbers of two lines, or None


def notes_of(path):
    """The title and the HTML of each mark of a README, without diffs and links."""
    page = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    sections = re.split(r"^#+ (.*)\n", page, flags=re.M)
    notes = {}
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        mark, colon, words = title.partition(": ")
        if colon and MARK.fullmatch(mark):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
            notes[mark] = words, MarkdownIt().render(text)
    return notes


class Script:
    """Its lines, the mark in the comment of each, and the words of each."""

    def __init__(self, path):
        program = (ROOT / path).read_text("utf-8")
        self.path, self.lines = path, program.splitlines()
        found = [re.search(f"# .*?({MARK.pattern})", line) for line in self.lines]
        self.marks = [match and match[1] for match in found]
        self.words = words_of(program)
        functions = re.finditer(r"^def (?:train|main)\(", program, re.M)
        self.top = program.count("\n", 0, next(functions).start())


def words_of(program):
    """Its lines, each as words: a class of pygments, such as c1 (comment), and text."""
    lines = [[]]
    for kind, value in PythonLexer(stripnl=False).get_tokens(program):
        for word in re.findall(r"\n|\w+|[^\S\n]+|[^\w\s]", value):
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
            numbers = zip(range(a, b), range(c, d), strict=True)
            rows += [Row(*each, True) for each in numbers]
            continue
        # lines with the same first words, such as `lr =`, are side by side
        starts = [
            [(*re.findall(r"\w+|[^\w\s]", line)[:2],) for line in lines]
            for lines in (texts[0][a:b], texts[1][c:d])
        ]
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


def show_line(script, n, stressed):
    """A line as HTML."""
    if n is None:
        return "<i></i>"
    shown = ""
    for k, (look, word) in enumerate(script.words[n]):
        text = escape(word, quote=False)
        if look not in ("", "n", "o", "p", "w"):
            text = f"<span class={look}>{text}</span>"
        shown += f"<b>{text}</b>" if k in stressed else text
    indent = len(script.lines[n]) - len(script.lines[n].lstrip())
    return f"<code data-n={n + 1} style=--i:{indent}ch>{shown}</code>"


def show(row, old, new, look):
    """A row as HTML."""
    left = right = set()
    if not row.equal and None not in row:
        words = old.words[row.old], new.words[row.new]
        left, right = fresh(*words), fresh(*words[::-1])
    kind = "equal" if row.equal else f"changed {look}"
    lines = show_line(old, row.old, left) + show_line(new, row.new, right)
    return f'<div class="{kind}">{lines}</div>'


def size(rows):
    more = sum(not row.equal and row.new is not None for row in rows)
    less = sum(not row.equal and row.old is not None for row in rows)
    return f"<b>+{more}</b> <i>−{less}</i> lines"


def page(old, new, notes):
    """The fields of page.html."""
    rows = pair(old, new)
    chips, asides, looks = "", {}, {}
    for mark, lines in marks_of(rows, new).items():
        if mark in notes and mark not in old.marks:
            words, text = notes[mark]
            look = f"t{len(asides) % 6}"
            # not above train(), if it has lines in it
            begin = next((n for n in lines if n >= new.top), lines[0])
            title = f"<b>{mark}</b> {words}"
            chips += f'<a class="chip {look}" href="#{mark}">{title}</a>'
            asides[begin] = f'<aside class={look} id="{mark}">{title}{text}</aside>'
            looks |= dict.fromkeys(lines, look)
    top = min([new.top, *asides])
    parts, above, look, folded = [], [], "", 0
    # upwards, as a removed line has the colour of the line below
    for row in reversed(rows):
        if row.new is not None:
            look = looks.get(row.new, "")
            folded = folded or (len(parts) if row.new < top else 0)
        if folded:
            above.append(row)
        parts += [asides.get(row.new, "") + show(row, old, new, look)]
    return {
        "left": old.path,
        "right": new.path,
        "purpose": new.lines[0].strip('"'),
        "size": size(rows),
        "above": size(above),
        "chips": chips,
        "folded": "".join(reversed(parts[folded:])),
        "rows": "".join(reversed(parts[:folded])),
    }


def main():
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir()
    shutil.copy(HERE / "style.css", SITE)
    template = Template((HERE / "page.html").read_text("utf-8"))
    folders = {Path(path).parent for old, new, _ in PAIRS for path in (old, new)}
    notes = {each: notes_of(ROOT / each / "README.md") for each in sorted(folders)}
    everywhere = {}
    for each in notes.values():  # those of 04 replace those of 02
        everywhere |= each
    files = [f"{new.replace('/', '-')}.html" for _, new, _ in PAIRS]
    for file, (old, new, title) in zip(files, PAIRS, strict=True):
        tabs = ""
        for other, (*_, words) in zip(files, PAIRS, strict=True):
            here = " aria-current=page" if other == file else ""
            tabs += f'<a href="{other}"{here}>{words}</a>'
        own = everywhere | notes[Path(new).parent]
        fields = page(Script(old), Script(new), own)
        html = template.substitute(fields, title=title, tabs=tabs)
        (SITE / file).write_text(html, "utf-8")
    shutil.copy(SITE / files[0], SITE / "index.html")


if __name__ == "__main__":
    main()
