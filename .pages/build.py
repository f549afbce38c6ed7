"""Write .pages/site/: two scripts side by side, a finder for error messages, and the READMEs.

    python .pages/build.py

Then open .pages/site/index.html. The lines come from git diff --no-index -w, the notes from the
READMEs' sections "### DDP-3: ...", the finder's rows from their tables with a column "symptom".
"""

import html
import os
import re
import shutil
import subprocess
from itertools import combinations, count, groupby
from pathlib import Path
from string import Template

import pygments
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

os.chdir(Path(__file__).resolve().parent.parent)  # the repository, where all paths begin
HERE, SITE = Path(".pages"), Path(".pages/site")
TABS = [("01", "02"), ("01", "04"), ("02", "03"), ("04", "06"), ("06", "07"), ("04", "fsdp")]
PYTHON = sorted(Path().glob("0*/*.py"), key=lambda path: (path.name != "train.py", path))
SCRIPTS = {path.parent.name[:2] if path.name == "train.py" else path.stem: path for path in PYTHON}
BASE = dict.fromkeys(SCRIPTS, "04") | {script: base for base, script in TABS} | {"08": "06"}
HOME = {script: f"{BASE[script]}-{script}.html" for script in SCRIPTS} | {"01": "01-04.html"}
PAGES = [page for glob in ("*.md", "0*/*.md", "tests/**/*.md", ".github/*.md")
         for page in sorted(Path().glob(glob))]
MARK = re.compile(r"\b([A-Z]{2,5}-)(\d+)")
LIST = re.compile(r"^(?:- |1\. ).*\n(?:(?:- |\d+\. |  ).*\n|\n(?=  ))*", re.M)


def highlight(text, language):
    """The lines of a program as HTML."""
    lexer = get_lexer_by_name(language, stripnl=False)
    shown = pygments.highlight(text, lexer, HtmlFormatter(nowrap=True)).removesuffix("\n")
    return re.sub(r'<span class="[nopw]">(.*?)</span>', r"\1", shown).split("\n")  # no colour


CODE = {script: highlight(SCRIPTS[script].read_text("utf-8"), "python") for script in SCRIPTS}
MARKS = {script: [mark and mark[0] for mark in map(MARK.search, CODE[script])] for script in CODE}


def address(path):
    """The page of a file of the repository; what is neither a script nor a README is copied."""
    if path in PYTHON:
        return HOME[[*SCRIPTS][PYTHON.index(path)]]
    name = (path.as_posix().removesuffix("README.md").strip("/.") or "README").replace("/", "-")
    if path in PAGES:
        return f"{name}.html"
    return shutil.copy(path, SITE / (name + ".txt" * (path.suffix not in (".svg", ".png")))).name


class Readme:
    """The HTML of a README; the notes about steps, and the rows of symptoms, that it has."""

    def __init__(self, path):
        self.path, self.source, self.kept, self.symptoms = path, path.read_text("utf-8"), [], []
        text = re.sub(r"(?s)<!--.*?-->\n", "", self.source)
        text = re.sub(r"(?ms)^( *)```(\w*)\n(.*?)^ *```$|(`+)(.+?)\4", self.keep, text)
        text = html.escape(re.sub(r"<(https?://[^>]+)>", r"[\1](\1)", text), False)
        text = re.sub(r"&lt;(/?(?:details|summary))&gt;", r"<\1>", text)
        text = re.sub(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)", self.link, text)
        text = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
        text = re.sub(r"\*(\w[^*\n]*)\*", r"<em>\1</em>", text)
        text = re.sub(r"(?m)^(#+) (.*)", self.heading, text)
        text = re.sub(r"(?m)(?:^\|.*\n)+", self.table, text)
        text = LIST.sub(self.items, text)
        if unknown := re.search(r"(?m)^(?:&[lg]t;|[*+|#] |```| {4}).*", text):
            self.fail(unknown[0])
        blocks = [block if re.match("\0pre|</?[hdust]|<ol", block) else f"<p>{block}</p>"
                  for block in re.split("\n\n+", text.strip())]
        self.html, self.notes = self.restore("\n".join(blocks)), {}
        prose = re.sub(r"(?s)<(pre|details)>.*?</\1>", "", self.html)
        for note in re.findall(r"(?s)<h3.*?(?=<h[123]|\Z)", prose):
            if step := re.match(rf"<h3[^>]*>(?:<a[^>]*>)?{MARK.pattern}(?: to \1(\d+))?", note):
                for number in range(int(step[2]), int(step[3] or step[2]) + 1):
                    self.notes[f"{step[1]}{number}"] = note

    def fail(self, text):
        line = self.source.partition(html.unescape(text).split("\0")[0])[0].count("\n") + 1
        raise ValueError(f"{self.path}, line {line}: cannot show {text}")

    def keep(self, match):
        indent, language, program, _, words = match.groups()
        if words:
            tag, text = "code", " ".join(words.replace(r"\|", "|").split())
        else:
            tag, text = "pre", re.sub(f"(?m)^{indent}", "", program)
        self.kept.append(f"<{tag}>" + "\n".join(highlight(text, language or "text")) + f"</{tag}>")
        return f"{indent or ''}\0{tag}{len(self.kept) - 1}\0"

    def restore(self, text):
        return re.sub("\0\\D+(\\d+)\0", lambda match: self.kept[int(match[1])], text)

    def link(self, match):
        image, words, target = match.groups()
        name, sign, anchor = target.partition("#")
        if not target.startswith("http"):
            path = Path(os.path.normpath(self.path.parent / name)) if name else self.path
            if path.is_dir() and not (path := path / "README.md").exists():
                return words  # a folder without a page
            target = address(path if path.exists() else self.fail(target)) + sign + anchor
        alt = words.replace('"', "&quot;")
        return f'<img src="{target}" alt="{alt}">' if image else f'<a href="{target}">{words}</a>'

    def heading(self, match):
        title, level = self.restore(match[2]), len(match[1])
        slug = re.sub(r"<[^>]*>|[^\w\- ]", "", html.unescape(title)).lower().replace(" ", "-")
        mark = (MARK.match(title) or [""])[0]
        for script in SCRIPTS:
            if SCRIPTS[script].parent == self.path.parent and mark in MARKS[script]:
                title = f'<a href="{HOME[script]}#{script}-{mark}">{title}</a>'
                break
        return f"\n\n<h{level} id={slug}>{title}</h{level}>\n\n"

    def table(self, match):
        rows = [[self.restore(cell.strip()) for cell in line.split("|")[1:-1]]
                for line in match[0].splitlines()]
        sides = [" class=right" if cell.endswith(":") else "" for cell in rows.pop(1)]
        if rows[0][0] == "symptom":
            anchor = re.findall(r"<h\d id=(\S+)>", match.string[: match.start()])[-1]
            place = f'<a href="{address(self.path)}#{anchor}">{address(self.path)[:-5]}</a>'
            self.symptoms += ["<p>".join(["<li>", *row, place]) for row in rows[1:]]
        rows = ["".join(map("<td{}>{}".format, sides, row)) for row in rows]
        rows[0] = rows[0].replace("<td", "<th")
        return "\n\n<table><tr>" + "<tr>".join(rows) + "</table>\n\n"

    def items(self, match):
        tag = "ul" if match[0][0] == "-" else "ol"
        items = re.split(r"(?m)^(?:- |\d+\. )", match[0])[1:]
        items = [LIST.sub(self.items, re.sub("(?m)^  ", "", item)) for item in items]
        return f"\n\n<{tag}><li>" + "<li>".join(items).replace("\n\n", "<p>") + f"</{tag}>\n\n"


def diff(old, new):
    """What git diff -w pairs: for each block whether it is equal, its old and its new lines."""
    command = ["git", "diff", "--no-index", "-w", "-U99999", "--no-color", "--no-ext-diff"]
    run = subprocess.run([*command, SCRIPTS[old], SCRIPTS[new]], stdout=subprocess.PIPE, text=True)
    signs = re.findall(r"\n([ +-])", run.stdout.partition("\n@@")[2]) or [" "] * len(CODE[old])
    left, right = count(), count()
    for equal, block in groupby(signs, " ".__eq__):
        block = [*block]
        yield (equal, [next(left) for sign in block if sign != "+"],
               [next(right) for sign in block if sign != "-"])


def side(script, lines, noted=()):
    """Lines of one script; the first with a mark has the step's address, if no note has it."""
    shown = ""
    for n in lines:
        line, mark = CODE[script][n], MARKS[script][n]
        has_address = mark and MARKS[script].index(mark) == n and mark not in noted
        place = f"id={script}-{mark} " if has_address else ""
        indent = len(line) - len(line.lstrip(" "))
        line = MARK.sub(rf'<a class=mark href="#{script}-\g<0>">\g<0></a>', line)
        shown += f"<code {place}data-n={n + 1} style=--i:{indent}ch>{line}</code>"
    return f"<div>{shown}</div>"


def pair(old, new, own, others):
    """Two scripts as rows of lines, in sections that open with the note of a step."""
    blocks, begins, shown = [*diff(old, new)], {}, "<section><div>"
    for n in reversed([n for equal, _, right in blocks if not equal for n in right]):
        mark = MARKS[new][n]  # other READMEs have notes about marks that old lacks
        begins[own.get(mark) or mark not in MARKS[old] and others.get(mark)] = n
    notes = {n: note for note, n in begins.items() if note}
    noted = [MARKS[new][n] for n in notes]
    for equal, left, right in blocks:
        starts = [k for k, n in enumerate(right) if k == 0 or equal or n in notes] or [0]
        for k, end in zip(starts, [*starts[1:], None], strict=True):
            for n in notes.keys() & right[k : k + 1]:
                shown += f"</div></section><section class=step id={new}-{MARKS[new][n]}>"
                shown += f"<aside><div>{notes[n]}</div></aside><div>"
            part = side(old, left[k:end] if equal else left if k == 0 else [])
            part += side(new, right[k:end], noted)
            shown += f"<div class={'equal' if equal else 'changed'}>{part}</div>"
    return shown + "</div></section>"


def everywhere(mark):
    """The lines with a mark in all scripts, which a click on it shows."""
    shown = f"<section class=everywhere id={mark}><h2>{mark}</h2>"
    for script in [script for script in SCRIPTS if mark in MARKS[script]]:
        found = [CODE[script][n].strip() for n, each in enumerate(MARKS[script]) if each == mark]
        place = f'href="{HOME[script]}#{script}-{mark}" target=_top'
        shown += f"<h3><a {place}>{SCRIPTS[script]}</a></h3><pre>{'<br>'.join(found)}</pre>"
    return shown + "</section>"


def write(name, title, body):
    here = tabs.replace(f'"{name}"', f'"{name}" aria-current=page')
    (SITE / name).write_text(page.substitute(title=title, tabs=here, body=body), "utf-8")


shutil.rmtree(SITE, ignore_errors=True)
shutil.copytree(HERE, SITE, ignore=shutil.ignore_patterns("site", "*.html", "*.p*", "__*"))
page, head, find = [Template((HERE / f"{name}.html").read_text("utf-8"))
                    for name in ("page", "pair", "find")]
tabs = "".join(f'<a href="{old}-{new}.html">{old} → {new}</a>' for old, new in TABS)
options = "".join(f"<option value={script}>{path}" for script, path in SCRIPTS.items())
readmes = {path: Readme(path) for path in PAGES}
others = {mark: note for readme in readmes.values() for mark, note in readme.notes.items()}
for old, new in combinations(SCRIPTS, 2):
    readme = readmes[SCRIPTS[new].with_name("README.md")]
    left, right = [options.replace(f"={script}>", f"={script} selected>") for script in (old, new)]
    lead = readme.html.partition("<p>")[2].partition("</p>")[0]
    body = head.substitute(left=left, right=right, lead=lead, page=address(readme.path))
    write(f"{old}-{new}.html", f"{old} → {new}", body + pair(old, new, readme.notes, others))
shutil.copy(SITE / "01-04.html", SITE / "index.html")
for path, readme in readmes.items():
    write(address(path), path, f"<article>{readme.html}</article>")
found = sorted({mark for script in MARKS for mark in MARKS[script] if mark})
write("marks.html", "Marks", "".join(map(everywhere, found)))
rows = "".join(row for readme in readmes.values() for row in readme.symptoms)
write("find.html", "Find an error", find.substitute(rows=rows))
