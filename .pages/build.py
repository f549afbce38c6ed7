"""Write .pages/site/: a map, scripts side by side, a finder for errors, the READMEs.

    pip install -r .pages/requirements.txt && python .pages/build.py

Then open .pages/site/index.html. From the READMEs are the notes (sections such as
"### DDP-3: ..."), the texts of the map (the first table), and the finder's rows (tables
with a column "symptom").
"""

import os
import re
import shutil
from collections import namedtuple
from itertools import groupby, pairwise
from pathlib import Path
from string import Template

import pygments
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from pairs import (
    MARK,
    MARKS,
    SCRIPTS,
    TEXT,
    TRAIN,
    added,
    depth,
    line,
    removed,
    row,
    rows,
    runs,
)
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

HERE, SITE = Path(".pages"), Path(".pages/site")
TABS = {
    "01-04": "one process → DDP",
    "04-06": "DDP → checkpoints",
    "06-07": "checkpoints → stops",
    "06-08": "checkpoints → Docker",
    "06-fsdp": "copies → shards",
    "01-02": "one process → spawn",
    "02-03": "spawn → two machines",
}
HOME = {SCRIPTS[name[3:]]: f"{name}.html" for name in TABS}
HOME[SCRIPTS["01"]] = "01-04.html"
PAGES = []
for pattern in ("*.md", "0*/*.md", "tests/**/*.md", ".github/*.md"):
    PAGES += sorted(Path().glob(pattern))
# texts: each paragraph, and each item of a list
Note = namedtuple("Note", "title page texts")
# its note is above the line `begin`; own: it is of the README of the script
Step = namedtuple("Step", "mark note runs begin own")


def address(path):
    """The page of a file of the repository; a file that has none is copied."""
    if path in HOME:
        return HOME[path]
    if path.is_dir():
        path = path / "README.md"
    name = path.as_posix().removesuffix("README.md").strip("/.") or "README"
    name = name.replace("/", "-")
    if path in PAGES:
        return f"{name}.html"
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


def cells_of(table):
    """The cells of a table as HTML, row by row."""
    rows = [row for part in table.children for row in part.children]
    return [[render(*cell.children) for cell in row.children] for row in rows]


class Readme:
    """A README as HTML, its notes about steps, its tables, each with its address."""

    def __init__(self, path):
        self.page = address(path)
        self.notes, self.tables = {}, []
        tokens = MARKDOWN.parse(path.read_text("utf-8"))
        for opening, token in pairwise(tokens):
            for child in token.children or ():
                for name in {"href", "src"} & child.attrs.keys():
                    child.attrs[name] = self.address_of(child.attrs[name], path)
            if opening.type == "heading_open":
                title = "".join(child.content for child in token.children)
                anchor = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
                opening.attrs["id"] = anchor
        tree = SyntaxTreeNode(tokens)
        self.html = re.sub(
            rf"(<h3 [^>]*>)({MARK.pattern})(?=: )",
            r'\1<a href="marks.html#\2">\2</a>',
            render(tree),
        )
        self.collect(tree)

    @staticmethod
    def address_of(link, path):
        """Where a link of the README at path leads to on the site."""
        file, sign, anchor = link.partition("#")
        if file.startswith("http"):
            return link
        if file:
            path = Path(os.path.normpath(path.parent / file))
        return address(path) + sign + anchor

    def collect(self, tree):
        """Set notes and tables."""
        for node in tree.children:
            if node.type == "heading":
                place = f"{self.page}#{node.attrs['id']}"
                title = re.sub("<[^>]*>", "", render(*node.children))
                texts = []
                if re.match(rf"{MARK.pattern}: ", title):
                    self.notes[MARK.match(title)[0]] = Note(title, self.page, texts)
            elif node.type == "paragraph":
                texts.append(render(node))
            elif node.type == "bullet_list":
                texts += [f"<ul>{render(item)}</ul>" for item in node.children]
            elif node.type == "table":
                self.tables.append((place, cells_of(node)))


def steps_of(old, new):
    """The steps that new adds, in order.

    A note is above the first lines of its step, but not of those above train().
    """
    readme = readmes[SCRIPTS[new].with_name("README.md")]
    steps = []
    for mark, found in runs(old, new).items():
        own = mark in readme.notes
        if own:
            note = readme.notes[mark]
        elif mark in all_notes and mark not in MARKS[old]:
            note = all_notes[mark]
        else:
            continue
        begins = [run[0] for run in found]
        in_train = [begin for begin in begins if begin >= TRAIN[new]]
        begin = in_train[0] if in_train else begins[0]
        steps.append(Step(mark, note, found, begin, own))
    return sorted(steps, key=lambda step: step.begin)


def line_of_item(new, step, text):
    """The first line of the step that has the `code` with which an item begins.

    Or the first one of its statement and of the comment above.
    """
    found = re.match(r"(?s)<ul>.*?<code>\W*(\w+)", text)
    if not found or not step.own:
        return step.begin
    for run in step.runs:
        for n in run:
            code = TEXT[new][n].split("# ")[0]
            if n >= TRAIN[new] and re.search(rf"\b{found[1]}\b", code):
                return begin_of_statement(new, run, n)
    return step.begin


def begin_of_statement(script, run, n):
    # where the outermost bracket that is open in line n is; or line n, if none is
    above = [k for k in reversed(run) if k <= n]
    first = max(above, key=lambda k: depth(script, range(k, n)))
    while first - 1 in run and TEXT[script][first - 1].lstrip().startswith("#"):
        first -= 1
    return first


def links_to(new, runs):
    """The numbers of the lines, such as 72, 74–77."""
    links = []
    for run in runs:
        first, last = run[0] + 1, run[-1] + 1
        words = f"{first}" if first == last else f"{first}–{last}"
        links.append(f'<a href="#{new}-{first}">{words}</a>')
    return ", ".join(links)


def notes_of(new, step, look):
    """By line: the note, and items of its lists above the first line of their code."""
    texts = {step.begin: ""}
    for text in step.note.texts:
        n = line_of_item(new, step, text)
        texts[n] = texts.get(n, "") + text
    title = f"<b>{step.note.title}</b>"
    if not step.own:
        title += f" (a note of {step.note.page[:2]})"
    is_open = " open" if step.own else ""
    whole = (
        f"<details{is_open}><summary>{title}</summary>{texts.pop(step.begin)}"
        f"<p class=soft>Lines of {new}: {links_to(new, step.runs)} · "
        f'<a href="marks.html#{step.mark}">{step.mark} in all scripts</a></details>'
    )
    name = f"{new}-{step.mark}"
    shown = {
        step.begin: f'</section><section class=step id="{name}">'
        f'<aside class={look} id="{name}-0">{whole}</aside>'
    }
    for n, text in texts.items():
        band = f"<b>{step.mark}</b>{text}"
        shown[n] = f'<aside class={look} id="{name}-{n}">{band}</aside>'
    return shown


def pair(old, new, steps):
    """Two scripts as rows of lines; what is above train() and the notes is folded."""
    notes, looks = {}, {}
    for k, step in enumerate(steps):
        notes |= notes_of(new, step, f"t{k}")
        for run in step.runs:
            looks |= dict.fromkeys(run, f"t{k}")
    top = min([TRAIN[new], *notes])
    shown = []
    end = None  # of the folded rows
    for _, block in groupby(rows(old, new), lambda each: each.equal):
        block = [*block]
        colours = [looks.get(each.new, "") for each in block]
        first = len(shown)  # of this row and those above it without a new line
        for n, each in enumerate(block):
            # a removed line has the colour of what replaces it
            nearest = [*colours[n:], *colours[n::-1]]
            look = next(filter(None, nearest), "")
            shown.append(row(old, new, each, look))
            if each.new is not None:
                shown[first] = notes.get(each.new, "") + shown[first]
                if each.new >= top and end is None:
                    end = first
                first = len(shown)
    fresh = len(added(rows(old, new)[:end])) or "none"
    fold = (
        f"<details class=fold><summary>The first {top} lines, with imports and "
        f"options; {fresh} of them new (key o)</summary>"
        f"{''.join(shown[:end])}</details>"
    )
    return f"<main><section>{fold}{''.join(shown[end:])}</section></main>"


def size(old, new):
    more, less = len(added(rows(old, new))), len(removed(rows(old, new)))
    if more or less:
        return f"<b>+{more}</b> <i>−{less}</i> lines"
    return "same train.py"


def branch(script):
    """A box of the map, with an arrow to each script that is based on it."""
    path = SCRIPTS[script]
    wants, adds = purposes[path.parent.name]
    shown = ""
    for name in TABS:
        old, new = name.split("-")
        if old == script:
            arrow = f'<a class=arrow href="{name}.html">{size(old, new)}</a>'
            shown += f"<li>{arrow}{branch(new)}"
    words = str(path).split("/train")[0]
    link = f'<a href="{address(path.with_name("README.md"))}">{words}</a>'
    texts = f"<p>to {wants}<p class=soft>It adds {adds}."
    return f"<div class=box>{link}{texts}</div><ul>{shown}</ul>"


def everywhere(mark):
    """The note of a step, and its lines in all scripts."""
    shown = f"<h2>{mark}</h2>"
    if mark in all_notes:
        note = all_notes[mark]
        shown = f"<h2>{note.title}</h2>" + "".join(note.texts)
    for script, path in SCRIPTS.items():
        if mark not in MARKS[script]:
            continue
        n = MARKS[script].index(mark)
        place = address(path)
        if path in HOME:
            place += f"#{script}-{n + 1}"
        shown += f'<h3><a href="{place}">{path}</a></h3><div class=lines>'
        for run in runs("01", script).get(mark, [[n]]):
            shown += "".join(line(script, n) for n in run)
        shown += "</div>"
    return f'<section class=everywhere id="{mark}">{shown}</section>'


def template(name):
    return Template((HERE / f"{name}.html").read_text("utf-8"))


def write(name, title, body):
    here = tabs.replace(f'"{name}"', f'"{name}" aria-current=page')
    html = template("page").substitute(title=title, tabs=here, body=body)
    (SITE / name).write_text(html, "utf-8")


def write_pair(name):
    old, new = name.split("-")
    title = f"{old} → {new}: {TABS[name]}"
    steps = steps_of(old, new)
    chips = ""
    for k, step in enumerate(steps):
        words = step.note.title.partition(": ")[2]
        link = f'<a class="chip t{k}" href="#{new}-{step.mark}">'
        chips += f"{link}<b>{step.mark}</b> <span>{words}</span></a>"
    readme = readmes[SCRIPTS[new].with_name("README.md")]
    head = template("pair").substitute(
        title=title,
        left=SCRIPTS[old],
        right=SCRIPTS[new],
        lead=readme.html.partition("<p>")[2].partition("</p>")[0],
        old=old,
        new=new,
        page=readme.page,
        size=size(old, new),
        chips=chips,
    )
    write(f"{name}.html", title, head + pair(old, new, steps))


def write_finder():
    symptoms = ""
    for readme in readmes.values():
        for place, (columns, *body) in readme.tables:
            if columns[0] == "symptom":
                link = f'<a href="{place}">{place.partition(".")[0]}</a>'
                for cells in body:
                    symptoms += "<li><p>" + "\n<p>".join([*cells, link])
    write("find.html", "Find an error", template("find").substitute(rows=symptoms))


shutil.rmtree(SITE, ignore_errors=True)
not_shown = shutil.ignore_patterns("site", "*.html", "*.[pt]*", "__*")
shutil.copytree(HERE, SITE, ignore=not_shown)
tabs = "".join(f'<a href="{name}.html">{words}</a>' for name, words in TABS.items())
readmes = {path: Readme(path) for path in PAGES}
all_notes = {}
for readme in readmes.values():
    all_notes |= readme.notes
_, (_, *folders) = readmes[Path("README.md")].tables[0]
purposes = {re.sub("<[^>]*>", "", folder): texts for folder, *texts in folders}
for name in TABS:
    write_pair(name)
write("index.html", "The scripts", template("index").substitute(map=branch("01")))
for path, readme in readmes.items():
    write(readme.page, path, f"<article>{readme.html}</article>")
found = {mark for marks in MARKS.values() for mark in marks if mark}
bodies = [everywhere(mark) for mark in sorted(found)]
write("marks.html", "A step in all scripts", "".join(bodies))
write_finder()
