"""Write .pages/site/: a map, each script next to its base, a finder for errors, the READMEs.

    pip install -r .pages/requirements.txt && python .pages/build.py

Then open .pages/site/index.html. From the READMEs are the notes (sections "### DDP-3: ..."), the
texts of the map (the first table), and the finder's rows (tables with a column "symptom").
"""

import os
import re
import shutil
from collections import namedtuple
from itertools import chain, groupby, pairwise
from pathlib import Path
from string import Template

import pygments
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from pairs import MARK, MARKS, SCRIPTS, TEXT, TRAIN, line, row, rows, runs
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

HERE, SITE = Path(".pages"), Path(".pages/site")
TABS = {"01-04": "one process → DDP", "04-06": "DDP → checkpoints", "06-07": "checkpoints → stops",
        "06-08": "checkpoints → Docker", "06-fsdp": "copies → shards",
        "01-02": "one process → spawn", "02-03": "spawn → two machines"}
HOME = {SCRIPTS[name[3:]]: f"{name}.html" for name in TABS} | {SCRIPTS["01"]: "01-04.html"}
PAGES = [page for glob in ("*.md", "0*/*.md", "tests/**/*.md", ".github/*.md")
         for page in sorted(Path().glob(glob))]
Note = namedtuple("Note", "title page texts")  # each paragraph, and each item of a list
Step = namedtuple("Step", "mark note runs begin own")  # its note is above the line `begin`


def address(path):
    """The page of a file of the repository; a file that has none is copied."""
    if path in HOME:
        return HOME[path]
    path = path / "README.md" if path.is_dir() else path
    name = (path.as_posix().removesuffix("README.md").strip("/.") or "README").replace("/", "-")
    if path in PAGES:
        return f"{name}.html"
    return shutil.copy(path, SITE / (name + ".txt" * (path.suffix not in (".svg", ".png")))).name


def fence(program, language, _):
    lexer = get_lexer_by_name(language or "text", stripnl=False)
    return f"<pre>{pygments.highlight(program, lexer, HtmlFormatter(nowrap=True))}</pre>"


MARKDOWN = MarkdownIt("commonmark", {"highlight": fence}).enable("table")


def render(*nodes):
    tokens = [token for node in nodes for token in node.to_tokens()]
    return MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})


class Readme:
    """A README as HTML, its notes about steps, and its tables, each with its address."""

    def __init__(self, path):
        self.page, self.notes, self.tables = address(path), {}, []
        tokens = MARKDOWN.parse(path.read_text("utf-8"))
        for opening, token in pairwise(tokens):
            for child in token.children or ():
                for name in {"href", "src"} & child.attrs.keys():
                    file, sign, anchor = child.attrs[name].partition("#")
                    if not file.startswith("http"):
                        file = Path(os.path.normpath(path.parent / file)) if file else path
                        child.attrs[name] = address(file) + sign + anchor
            if opening.type == "heading_open":
                words = "".join(child.content for child in token.children)
                opening.attrs["id"] = re.sub(r"[^\w -]", "", words).lower().replace(" ", "-")
        tree = SyntaxTreeNode(tokens)
        self.html = re.sub(rf'(<h3 [^>]*>)({MARK.pattern})(?=: )',
                           r'\1<a href="marks.html#\2">\2</a>', render(tree))
        for node in tree.children:
            if node.type == "heading":
                anchor, texts = f"{self.page}#{node.attrs['id']}", []
                title = re.sub("<[^>]*>", "", render(*node.children))
                if re.match(rf"{MARK.pattern}: ", title):
                    self.notes[MARK.match(title)[0]] = Note(title, self.page, texts)
            elif node.type == "paragraph":
                texts.append(render(node))
            elif node.type == "bullet_list":
                texts += [f"<ul>{render(item)}</ul>" for item in node.children]
            elif node.type == "table":
                self.tables.append((anchor, [[render(*cell.children) for cell in line.children]
                                             for part in node.children for line in part.children]))


def steps_of(old, new):
    """The steps that new adds, in order. A note is above their first lines below the options."""
    steps, readme = [], readmes[SCRIPTS[new].with_name("README.md")]
    for mark, found in runs(old, new).items():
        if note := readme.notes.get(mark) or mark not in MARKS[old] and others.get(mark):
            begin = next((run for run in found if run[0] >= TRAIN[new]), found[0])[0]
            steps.append(Step(mark, note, found, begin, mark in readme.notes))
    return sorted(steps, key=lambda step: step.begin)


def notes_of(new, step, look):
    """By line: the note, and of its own lists the items, above the first line with their `code`."""
    texts, where = {step.begin: ""}, ", ".join(
        f'<a href="#{new}-{run[0] + 1}">{run[0] + 1}{f"–{run[-1] + 1}" * (len(run) > 1)}</a>'
        for run in step.runs)
    code = {n: TEXT[new][n].split("# ")[0] for run in step.runs for n in run if n >= TRAIN[new]}
    for text in step.note.texts:
        name = step.own and re.match(r"(?s)<ul>.*?<code>\W*(\w+)|", text)[1]
        n = next((n for n in code if name and re.search(rf"\b{name}\b", code[n])), step.begin)
        texts[n] = texts.get(n, "") + text
    title = f"<b>{step.note.title}</b>" + f" (a note of {step.note.page[:2]})" * (not step.own)
    whole = (f"<details{' open' * step.own}><summary>{title}</summary>{texts.pop(step.begin)}<p "
             f'class=soft>Lines of {new}: {where} · <a href="marks.html#{step.mark}">{step.mark} '
             f"in all scripts</a></details>")
    band = f'<aside class={look} id="{new}-{step.mark}'
    shown = {n: f'{band}-{n}"><b>{step.mark}</b>{texts[n]}</aside>' for n in texts}
    section = f'</section><section class=step id="{new}-{step.mark}">'
    return shown | {step.begin: f'{section}{band}-0">{whole}</aside>'}


def pair(old, new, steps):
    """Two scripts as rows of lines; what is above train() and above the first note is folded."""
    notes, looks, shown = {}, {}, []
    for k, step in enumerate(steps):
        notes |= notes_of(new, step, f"t{k}")
        looks |= {n: f"t{k}" for run in step.runs for n in run}
    top = min([TRAIN[new], *notes])
    end = next(n for n, (_, _, b) in enumerate(rows(old, new)) if (b or 0) >= top)
    for equal, block in groupby(rows(old, new), lambda each: each[0]):
        block = [*block]
        colours = [looks.get(b, "") for _, _, b in block]
        for n, (_, a, b) in enumerate(block):  # a removed line has the colour of what replaces it
            look = next(filter(None, colours[n:] + colours[n::-1]), "")
            shown.append(notes.get(b, "") + row(old, new, equal, a, b, look))
    fresh = sum(not equal and b is not None for equal, _, b in rows(old, new)[:end])
    fold = (f"<details class=fold><summary>The first {top} lines, with imports and options; "
            f"{fresh or 'none'} of them new (key o)</summary>{''.join(shown[:end])}</details>")
    return f"<main><section>{fold}{''.join(shown[end:])}</section></main>"


def size(old, new):
    more, less = [sum(not each[0] and each[side] is not None for each in rows(old, new))
                  for side in (2, 1)]
    return f"<b>+{more}</b> <i>−{less}</i> lines" if more or less else "same train.py"


def branch(script):
    """A box of the map, with an arrow to each script that is based on it."""
    path, (wants, adds) = SCRIPTS[script], purposes[SCRIPTS[script].parent.name]
    shown = "".join(f'<li><a class=arrow href="{name}.html">{size(script, name[3:])}</a>'
                    f"{branch(name[3:])}" for name in TABS if name[:2] == script)
    link = f'<a href="{address(path.with_name("README.md"))}">{str(path).split("/train")[0]}</a>'
    return f"<div class=box>{link}<p>to {wants}<p class=soft>It adds {adds}.</div><ul>{shown}</ul>"


def everywhere(mark):
    """The note of a step, and its lines in all scripts."""
    title, _, texts = others.get(mark, (mark, "", ()))
    shown = f"<h2>{title}</h2>" + "".join(texts)
    for script in [script for script in SCRIPTS if mark in MARKS[script]]:
        path, n = SCRIPTS[script], MARKS[script].index(mark)
        lines = "".join(line(script, n) for run in runs("01", script).get(mark, [[n]]) for n in run)
        place = f"{HOME[path]}#{script}-{n + 1}" if path in HOME else address(path)
        shown += f'<h3><a href="{place}">{path}</a></h3><div class=lines>{lines}</div>'
    return f'<section class=everywhere id="{mark}">{shown}</section>'


def write(name, title, body):
    here = tabs.replace(f'"{name}"', f'"{name}" aria-current=page')
    (SITE / name).write_text(page.substitute(title=title, tabs=here, body=body), "utf-8")


shutil.rmtree(SITE, ignore_errors=True)
shutil.copytree(HERE, SITE, ignore=shutil.ignore_patterns("site", "*.html", "*.[pt]*", "__*"))
page, head, first, find = [Template((HERE / f"{name}.html").read_text("utf-8"))
                           for name in ("page", "pair", "index", "find")]
tabs = "".join(f'<a href="{name}.html">{words}</a>' for name, words in TABS.items())
readmes = {path: Readme(path) for path in PAGES}
others = {mark: note for readme in readmes.values() for mark, note in readme.notes.items()}
purposes = {re.sub("<[^>]*>", "", folder): texts
            for folder, *texts in readmes[Path("README.md")].tables[0][1]}
for name, change in TABS.items():
    old, new = name.split("-")
    readme, steps = readmes[SCRIPTS[new].with_name("README.md")], steps_of(old, new)
    title, chips = f"{old} → {new}: {change}", ""
    for k, step in enumerate(steps):
        link = f'<a class="chip t{k}" href="#{new}-{step.mark}"><b>{step.mark}</b>'
        chips += f"{link} <span>{step.note.title.partition(': ')[2]}</span></a>"
    lead = readme.html.partition("<p>")[2].partition("</p>")[0]
    top = head.substitute(title=title, left=SCRIPTS[old], right=SCRIPTS[new], lead=lead, old=old,
                          new=new, page=readme.page, size=size(old, new), chips=chips)
    write(f"{name}.html", title, top + pair(old, new, steps))
write("index.html", "The scripts", first.substitute(map=branch("01")))
for path, readme in readmes.items():
    write(readme.page, path, f"<article>{readme.html}</article>")
found = sorted({mark for marks in MARKS.values() for mark in marks if mark})
write("marks.html", "A step in all scripts", "".join(map(everywhere, found)))
symptoms = ""
for place, (columns, *lines) in chain.from_iterable(readme.tables for readme in readmes.values()):
    if columns[0] == "symptom":
        link = f'<a href="{place}">{place.partition(".")[0]}</a>'
        symptoms += "".join("<li><p>" + "\n<p>".join([*cells, link]) for cells in lines)
write("find.html", "Find an error", find.substitute(rows=symptoms))
