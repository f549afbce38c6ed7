"""Test the page of .pages/build.py in Chromium.

    python .ci/browser.py --python .venv/bin/python --screenshots screenshots
    python .ci/browser.py --picture

It needs playwright, .pages/requirements.txt and Chromium; --python is one with torch. Every tab is
compared with git and the READMEs, and the finder gets the logs of ten runs that fail. --picture
only writes .pages/side_by_side.png, and next to it the text that it shows.
"""

import argparse
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / ".pages/site"
PICTURE, TEXT = [SITE.with_name(f"side_by_side.{kind}") for kind in ("png", "txt")]
SHOWN = 'section[id="04-DDP-3"] :is(aside, [data-n])'  # the part of the page in the picture
TEXTS = "all => all.map(({dataset, textContent}) => [dataset.n, textContent].join(' ')).join('\\n')"
TINTED = """side => [...document.querySelectorAll(`.changed > code:${side}-child, .equal > code`)]
    .filter(line => getComputedStyle(line).backgroundColor != "rgba(0, 0, 0, 0)").length"""
NOTES = """notes => notes.map(note => ({text: note.innerText.replace(/\\s+/g, " "),
    cut: note.scrollHeight - note.clientHeight + note.scrollWidth - note.clientWidth,
    name: note.querySelector("details") ? "" : note.querySelector("code").innerText,
    line: note.nextElementSibling.lastChild.innerText}))"""
SECONDS = """text => { const start = performance.now(); log.value = text; log.oninput();
    return (performance.now() - start) / 1000 }"""
FAIL = '''
import os, sys, torch, torch.distributed as dist, torch.nn as nn
from torch.utils.data import DataLoader
from common.gather import gather_in_order
dist.init_process_group("gloo")
net, rank, kill = nn.Linear(2, 2), dist.get_rank(), lambda *_: os.kill(os.getpid(), 9)
exec(sys.argv[1])
'''
TWO = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
RUNS = {  # words of the row that explains a run that fails: its command, or what FAIL executes
    "start it with torchrun": "python ours/train.py",
    "Cuda is not available": "torchrun --standalone --nproc-per-node=gpu ours/train.py",
    "EADDRINUSE": "torchrun --nnodes=1 --master-port=$PORT x.py",
    "No module named 'common'": f"{TWO} alone/train.py",
    "exitcode: -9": "kill() if rank == 1 else dist.all_reduce(torch.ones(1))",
    "killed by signal: Killed": "next(iter(DataLoader([1], num_workers=1, worker_init_fn=kill)))",
    "size mismatch": "nn.Linear(2, 3).load_state_dict(net.state_dict())",
    "Unexpected key": "net.load_state_dict(nn.parallel.DistributedDataParallel(net).state_dict())",
    "rows on each": "gather_in_order(torch.ones(3), 8)",
    "Expected to have finished": "net.unused = nn.Parameter(torch.ones(1)); "
    "model = nn.parallel.DistributedDataParallel(net); "
    "[model(torch.ones(2)).sum().backward() for _ in range(2)]",
}


def failing_logs(python):
    """What RUNS print, each within a minute and without a GPU."""
    with tempfile.TemporaryDirectory() as work, socket.create_server(("127.0.0.1", 0)) as server:
        for folder in ("ours", "alone"):
            shutil.copytree(ROOT / "04_ddp_torchrun", Path(work, folder))
        shutil.copytree(ROOT / "common", Path(work, "ours/common"))
        Path(work, "ours/fail.py").write_text(FAIL)
        first = f"export PATH='{Path(python).absolute().parent}':$PATH CUDA_VISIBLE_DEVICES="
        first += f" PORT={server.getsockname()[1]}; timeout --signal=KILL 60"

        def output(run):
            command = f"{TWO} ours/fail.py '{run}'" if "(" in run else run
            return subprocess.run(f"{first} {command} 2>&1", shell=True, cwd=work, text=True,
                                  stdout=subprocess.PIPE).stdout

        with ThreadPoolExecutor(2) as two_at_a_time:
            return dict(zip(RUNS, two_at_a_time.map(output, RUNS.values()), strict=True))


def git(*arguments):
    command = ["git", "diff", "--no-index", "-w", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def sections(old, new):
    """Of each section about a step in new's README that new adds to old: title and texts."""
    added = "".join(re.findall(r"^\+(?!\+\+ ).*\n", git("-U0", old, new), re.M))
    text = (ROOT / new).with_name("README.md").read_text("utf-8")
    text = re.sub(r"(?ms)^```.*?^```$|\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    for title, body in re.findall(r"^### ([A-Z]+-\d: .*)\n((?:(?!#).*\n)*)", text, re.M):
        if re.search(rf"# .*{title.split(':')[0]}\b", added):
            yield title, [" ".join(each.split()) for each in re.split(r"(?m)\n\n|^- ", body)]


def check_tab(page, words, screenshots):
    """It has all changes, whole notes next to their lines, and folds; words: what the map says."""
    old, new = page.locator("option[selected]").all_text_contents()
    width, name = page.viewport_size["width"], Path(page.url).stem
    counts = [int(n) for n in (git("--numstat", old, new) or "0 0").split()[:2]]
    assert [page.evaluate(TINTED, side) for side in ("last", "first")] == counts, name
    assert words == ("+{} −{} lines".format(*counts) if any(counts) else "same train.py"), name
    notes = page.locator("main aside").evaluate_all(NOTES)
    for title, texts in sections(old, new):
        mine = [note["text"] for note in notes if note["text"].startswith(title.split(":")[0])]
        missing = [text for text in [title, *texts] if text not in "".join(mine)]
        assert not missing, f"{name}: {missing} are not in {mine}"
    for note in notes:  # none is cut off; one about one line is above this line
        assert note["cut"] < 2 and re.search(r"\w*", note["name"])[0] in note["line"], note
    if name == "01-04":
        assert page.locator('[id="04-DDP-1"] .changed', has_text="init_process_group(").count()
        assert page.locator('[id="04-DDP-2"] .changed', has_text="model = DDP(").count()
        strong = page.locator(".changed", has_text="sampler=train_sampler").locator("b")
        assert strong.all_text_contents() == ["shuffle", "True", "sampler", "train_sampler"]
        assert page.locator("aside").first.bounding_box()["y"] < 700
        assert page.locator("aside + .changed", has_text="set_epoch").count()
        assert page.locator(SHOWN).evaluate_all(TEXTS) == TEXT.read_text(), "renew it: --picture"
    assert page.evaluate("document.documentElement.scrollWidth") == width, name
    code, rows = page.locator("main [data-n]:visible"), page.locator(".equal, .changed")
    assert re.search("def train|# SLURM-1|# DDP-4", code.first.inner_text()), "starts with imports"
    wrapped = rows.evaluate_all("all => all.filter(row => row.offsetHeight > 20).length")
    assert width == 400 or wrapped < 0.08 * rows.count(), f"{name}: {wrapped} rows wrap"
    page.screenshot(path=screenshots / f"{name}-{width}.png", full_page=True)
    print(f"{name:8} {width:4}: {counts} lines, {len(notes)} notes, {wrapped} rows wrap")
    folded, changed = code.count(), page.locator(".changed:visible").count()
    page.keyboard.press("o")
    assert code.count() > folded
    page.locator(".fold summary").click()
    assert code.count() == folded
    page.locator("#brief").check()
    assert page.locator(".equal:visible").count() <= git("-U1", old, new).count("\n ")
    assert page.locator(".changed:visible").count() == changed


def check_steps(page):
    """Keys and buttons go from band to band; a mark shows its step in all scripts."""
    page.locator("#brief").uncheck()
    ids = page.locator("aside").evaluate_all("all => all.map(({id}) => id)")
    first = page.locator(".chip").evaluate_all("all => all.map(({hash}) => hash.slice(1) + '-0')")
    assert first == [band for band in ids if band.endswith("-0")]  # the chips are in this order
    for n, band in enumerate(ids):
        page.keyboard.press("j") if n % 2 else page.get_by_role("button", name="next step").click()
        page.wait_for_url(f"**#{band}")
        page.locator(f'.chip.on[href="#{band.rpartition("-")[0]}"]').wait_for()
        assert 0 < page.locator(":target").bounding_box()["y"] < 600
    page.keyboard.press("k")
    page.wait_for_url(f"**#{ids[max(len(ids) - 2, 0)]}" if ids else "**")
    mark = page.locator(".changed a.mark:visible, .equal a.mark:visible").last
    name = mark.inner_text()
    mark.click()
    page.wait_for_url(f"**/marks.html#{name}")
    scripts = [re.search(rf"# .*{name}\b", path.read_text()) for path in ROOT.glob("0*/*.py")]
    assert page.locator("h3:visible").count() == sum(map(bool, scripts))
    assert page.locator("h2:visible").inner_text().startswith(name)
    page.go_back()
    page.locator("select").first.select_option("01")
    page.wait_for_url("**/01-*.html")


def check_links():
    pages = {path.name: path.read_text("utf-8") for path in SITE.glob("*.html")}
    for name, text in pages.items():
        for file, anchor in re.findall(r'(?:href|src)="(?!http)([^"#]*)#?([^"]*)"', text):
            is_there = not anchor or f'id="{anchor}"' in pages[file or name]
            assert (SITE / file).exists() and is_there, f"{name}: {file}#{anchor} leads nowhere"


def check_finder(page, logs):
    wrong = []
    for words, log in logs.items():
        page.fill("#log", log)
        symptom = page.locator("#rows li p").first.text_content()
        print(f"{words:25} is {'' if words in symptom else 'not '}in the first row: {symptom[:40]}")
        wrong += [log] if words not in symptom else []
    assert len(wrong) <= 1, "\n".join(wrong)
    assert page.evaluate(SECONDS, "".join(logs.values()) * 10) < 1
    page.fill("#log", "all is well")
    assert page.locator("#nothing").is_visible()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--python", default=sys.executable, help="one with what requirements.txt installs")
    add("--screenshots", type=Path, default=Path(tempfile.gettempdir()), help="folder for them")
    add("--picture", action="store_true", help="only write .pages/side_by_side.png")
    args = parser.parse_args()
    subprocess.run([sys.executable, ROOT / ".pages" / "build.py"], check=True)
    with sync_playwright() as playwright:
        chromium = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**chromium)
        page, errors = browser.new_page(viewport={"width": 1400, "height": 600}), []
        page.set_default_timeout(10_000)
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        if args.picture:
            page.goto(f"{SITE.as_uri()}/01-04.html#04-DDP-3")
            page.screenshot(path=PICTURE)
            return TEXT.write_text(page.locator(SHOWN).evaluate_all(TEXTS))
        check_links()
        for width in (1400, 400):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(f"{SITE.as_uri()}/index.html")
            assert page.locator("h1:visible, .lead:visible, .box:visible").count() == 10
            assert not re.search(r"\d", page.locator("nav").inner_text())  # tabs have words
            page.screenshot(path=args.screenshots / f"index-{width}.png", full_page=True)
            arrows = page.locator(".arrow").evaluate_all("all => all.map(a => [a.href, a.text])")
            assert len(arrows) == len(page.locator("nav span a").all()) == 7
            for tab, words in arrows:
                page.goto(tab)
                check_tab(page, words, args.screenshots)
                check_steps(page)
        plain = browser.new_context(java_script_enabled=False).new_page()
        plain.goto(arrows[0][0])
        assert plain.locator("[data-n]:visible").count() > 150
        page.goto(f"{SITE.as_uri()}/find.html")
        check_finder(page, failing_logs(args.python))
        page.screenshot(path=args.screenshots / "find.png")
        assert not errors, errors


if __name__ == "__main__":
    main()
