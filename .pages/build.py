"""Write .pages/site/: a map, scripts side by side, a finder for errors, the pages.

    pip install -r .pages/requirements.txt && python .pages/build.py

Then open .pages/site/index.html. The notes are the sections of the READMEs such as
"### DDP-3: ...", the finder's rows are those of tables with a column "symptom".
"""

import os
import re
import shutil
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from string import Template

import pygments
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from pairs import MARK, Script, marks_of, pair, show
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).resolve().parents[1]
HERE, SITE = ROOT / ".pages", ROOT / ".pages/site"
SCRIPTS = {
    path.parent.name[:2]: path
    for path in (*ROOT.glob("0*/train.py"), ROOT / "05_model_parallel/fsdp.py")
}
SCRIPTS["fsdp"] = ROOT / "07_slurm/fsdp.py"
SCRIPTS["images"] = ROOT / "06_checkpointing/image_folder.py"
SCRIPTS["transformers"] = ROOT / "05_model_parallel/huggingface.py"
TABS = {
    ("01", "04"): "one process → DDP",
    ("04", "06"): "DDP → checkpoints",
    ("06", "07"): "checkpoints → stops",
    ("06", "08"): "checkpoints → Docker",
    ("04", "05"): "DDP → FSDP",
    ("06", "images"): "checkpoints → images in folders",
    ("07", "fsdp"): "stops → FSDP",
    ("fsdp", "transformers"): "FSDP → Hugging Face",
    ("01", "02"): "one process → spawn",
    ("02", "03"): "spawn → two machines",
}
HOME = {SCRIPTS[new]: f"{old}-{new}.html" for old, new in TABS}
HOME[SCRIPTS["01"]] = "01-04.html"
Note = namedtuple("Note", "title link html")


def address(path):
    """The page of a file of the repository; a file that has none is copied."""
    if path in HOME:
        return HOME[path]
    if path.is_dir() and not (path / "README.md").exists():
        return "index.html"
    if path.is_dir():
        path = path / "README.md"
    name = path.relative_to(ROOT).as_posix().replace("/", "-").lstrip(".")
    if path.suffix == ".md":
        return name.replace("-README.md", ".md").replace(".md", ".html")
    if path.suffix not in (".svg", ".png"):
        name += ".txt"  # a browser shows it
    shutil.copy(path, SITE / name)
    return name


def fence(program, language, _):
    lexer = get_lexer_by_name(language or "text", stripnl=False)
    shown = pygments.highlight(program, lexer, HtmlFormatter(nowrap=True))
    return f"<pre>{shown}</pre>"


MARKDOWN = MarkdownIt("commonmark", {"highlight": fence}).enable("table")


def render(*nodes):
    tokens = [token for node in nodes for token in node.to_tokens()]
    return MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})


class Page:
    """A page as HTML, its notes about marks, and its rows of symptoms."""

    def __init__(self, path):
        self.name, self.notes, self.symptoms = address(path), {}, ""
        tokens = MARKDOWN.parse(path.read_text("utf-8"))
        for opening, token in pairwise(tokens):
            for child in token.children or ():
                for key in {"href", "src"} & child.attrs.keys():
                    child.attrs[key] = target(child.attrs[key], path)
            if opening.type == "heading_open":
                title = "".join(child.content for child in token.children)
                anchor = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
                opening.attrs["id"] = anchor
        tree = SyntaxTreeNode(tokens)
        self.html = render(tree)
        mark = None
        for node in tree.children:
            if node.type == "heading":
                title = re.sub("<[^>]*>", "", render(*node.children))
                place = f"{self.name}#{node.attrs['id']}"
                mark, colon, _ = title.partition(": ")
                mark = mark if colon and MARK.fullmatch(mark) else None
                if mark:
                    self.notes[mark] = Note(title, place, "")
            elif node.type in ("paragraph", "bullet_list") and mark:
                note = self.notes[mark]
                self.notes[mark] = note._replace(html=note.html + render(node))
            elif node.type == "table":
                self.symptoms += symptoms(node, place)


def target(link, path):
    """Where a link of the page at path leads to on the site."""
    file, sign, anchor = link.partition("#")
    if file.startswith("http"):
        return link
    if file:
        path = Path(os.path.normpath(path.parent / file))
    return address(path) + sign + anchor


def symptoms(table, place):
    """The rows of a table as items of a list, if its first column has symptoms."""
    rows = [row for part in table.children for row in part.children]
    columns, *body = [[render(*cell.children) for cell in row.children] for row in rows]
    if columns[0] != "symptom":
        return ""
    link = f'<a href="{place}">{place.partition(".")[0]}</a>'
    return "".join("<li><p>" + "\n<p>".join([*cells, link]) for cells in body)


def size(rows):
    more = sum(not row.equal and row.new is not None for row in rows)
    less = sum(not row.equal and row.old is not None for row in rows)
    if more or less:
        return f"<b>+{more}</b> <i>−{less}</i> lines"
    return "same train.py"


class Pair:
    """Two scripts side by side, with the notes of the lines that the second adds."""

    def __init__(self, old, new, own_notes, notes):
        self.old, self.new = old, new
        self.rows = pair(old, new)
        self.links = {mark: note.link for mark, note in (notes | own_notes).items()}
        # by the line above which a note is: its mark, the note, the lines of its colour
        steps = {}
        for mark, lines in marks_of(self.rows, new).items():
            note = own_notes.get(mark)
            if mark not in old.marks:
                note = note or notes.get(mark)
            if note:  # not above train(), if it has lines in it
                begin = next((n for n in lines if n >= new.train), lines[0])
                steps[begin] = mark, note, lines
        self.steps = dict(sorted(steps.items()))

    def chips(self):
        """A link to each note."""
        chips = ""
        for k, (mark, note, _) in enumerate(self.steps.values()):
            words = note.title.partition(": ")[2]
            link = f'<a class="chip t{k % 6}" href="#{mark}">'
            chips += f"{link}<b>{mark}</b> {words}</a>"
        return chips

    def body(self):
        """The rows, those above train() folded, with the notes."""
        looks, notes = {}, {}
        for k, (begin, (mark, note, lines)) in enumerate(self.steps.items()):
            looks |= dict.fromkeys(lines, f"t{k % 6}")
            title = f'<a href="{note.link}">{note.title}</a>'
            band = f'<aside class=t{k % 6} id="{mark}">'
            notes[begin] = f"{band}{title}{note.html}</aside>"
        top = min([self.new.train, *notes])
        part = shown = []
        folded, look = [], ""
        # upwards, as a removed line has the colour of the line below
        for row in reversed(self.rows):
            if row.new is not None:
                look = looks.get(row.new, "")
            if row.new is not None and row.new < top:
                part = folded
            part += [show(row, self.old, self.new, look, self.links)]
            part += [notes.get(row.new, "")]
        more = size([row for row in self.rows if row.new is not None and row.new < top])
        fold = f"<details><summary>Imports and options: {more}</summary>"
        parts = [fold, *reversed(folded), "</details>", *reversed(shown)]
        return f"<main>{''.join(parts)}</main>"


def branch(name, scripts, pairs):
    """A script of the map, and below it those that are based on it."""
    script = scripts[name]
    words = script.path.relative_to(ROOT)
    readme = address(script.path.with_name("README.md"))
    shown = f'<a href="{readme}">{words}</a> {script.purpose}<ul>'
    for (old, new), each in pairs.items():
        if old == name:
            arrow = f'<a class=size href="{HOME[SCRIPTS[new]]}">{size(each.rows)}</a>'
            shown += f"<li>{arrow} {branch(new, scripts, pairs)}"
    return f"{shown}</ul>"


def write(name, title, body):
    """Write a page of the site, with the tabs above."""
    tabs = ""
    for pair_of, words in TABS.items():
        file = f"{'-'.join(pair_of)}.html"
        here = " aria-current=page" if file == name else ""
        tabs += f'<a href="{file}"{here}>{words}</a>'
    html = template("page").substitute(title=title, tabs=tabs, body=body)
    (SITE / name).write_text(html, "utf-8")


def template(name):
    return Template((HERE / f"{name}.html").read_text("utf-8"))


def main():
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir()
    for name in ("style.css", "page.js", "find.js"):
        shutil.copy(HERE / name, SITE)
    patterns = ("*.md", "0*/*.md", "tests/**/*.md", ".github/*.md")
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    pages = {path: Page(path) for path in paths}
    for path, page in pages.items():
        title = path.relative_to(ROOT)
        write(page.name, title, f"<article>{page.html}</article>")
    notes = {}
    for page in pages.values():  # those of 04 replace those of 02
        notes |= page.notes
    scripts = {name: Script(path) for name, path in SCRIPTS.items()}
    pairs = {}
    for (old, new), words in TABS.items():
        own = pages[SCRIPTS[new].with_name("README.md")]
        each = Pair(scripts[old], scripts[new], own.notes, notes)
        pairs[old, new] = each
        head = template("pair").substitute(
            title=words,
            left=each.old.path.relative_to(ROOT),
            right=each.new.path.relative_to(ROOT),
            lead=each.new.purpose,
            page=own.name,
            size=size(each.rows),
            chips=each.chips(),
        )
        write(f"{old}-{new}.html", words, head + each.body())
    tree = branch("01", scripts, pairs)
    write("index.html", "The scripts", template("index").substitute(map=tree))
    rows = "".join(page.symptoms for page in pages.values())
    write("find.html", "Find an error", template("find").substitute(rows=rows))


if __name__ == "__main__":
    main()
