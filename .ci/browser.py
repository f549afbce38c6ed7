"""Test the page of .pages/build.py in Chromium.

    python .ci/browser.py --python .venv/bin/python --screenshots screenshots
    python .ci/browser.py --python .venv/bin/python --picture

It needs playwright (PyPI) and Chromium; --python is one with requirements.txt installed. Every tab
is drawn in a wide and in a narrow window and compared with git and the READMEs, and the finder gets
the logs of ten runs that fail. --picture only writes .pages/side_by_side.png.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / ".pages" / "site"
MARK = re.compile(r"\b([A-Z]{2,5}-)(\d+)(?: to \1(\d+))?")
TINTED = """side => [...document.querySelectorAll(`.changed > :${side}-child > *, .equal > * > *`)]
    .filter(line => getComputedStyle(line).backgroundColor != "rgba(0, 0, 0, 0)").length"""
NOTES = """() => [...document.querySelectorAll(".step")].map(step => {
    const note = step.querySelector("aside > div"), lines = step.querySelector(".changed");
    return {id: step.id, title: note.querySelector("h3").innerText,
            first: lines.lastChild.firstChild.innerText.trim(),
            note: note.getBoundingClientRect(), lines: lines.getBoundingClientRect()} })"""
SECONDS = """text => { const log = document.getElementById("log"), start = performance.now();
    log.value = text; log.oninput(); return (performance.now() - start) / 1000 }"""
FAIL = '''
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from common.gather import gather_in_order

dist.init_process_group("gloo")
net, kill = nn.Linear(2, 2), lambda *_: os.kill(os.getpid(), 9)
if sys.argv[1] == "killed rank":
    kill() if dist.get_rank() == 1 else dist.all_reduce(torch.ones(1))
elif sys.argv[1] == "killed worker":
    next(iter(DataLoader([1], num_workers=1, worker_init_fn=kill)))
elif sys.argv[1] == "other shapes":
    nn.Linear(2, 3).load_state_dict(net.state_dict())
elif sys.argv[1] == "names of DDP":
    net.load_state_dict(DDP(net).state_dict())
elif sys.argv[1] == "too few rows":
    gather_in_order(torch.ones(3), 8)
elif sys.argv[1] == "unused parameter":
    net.unused = nn.Parameter(torch.ones(1))
    model = DDP(net)
    for _ in range(2):
        model(torch.ones(2)).sum().backward()
'''
TWO = ["torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
RUNS = {  # runs that fail, and words of the row that explains each
    "plain python": (["python", "ours/train.py"], "start it with torchrun"),
    "no GPU": ([*TWO[:2], "--nproc-per-node=gpu", "ours/train.py"], "Cuda is not available"),
    "port in use": (["torchrun", "--nnodes=1", "--master-port=PORT", "x.py"], "EADDRINUSE"),
    "train.py alone": ([*TWO, "alone/train.py"], "No module named 'common'"),
    "killed rank": ([*TWO, "ours/fail.py", "killed rank"], "exitcode: -9"),
    "killed worker": ([*TWO, "ours/fail.py", "killed worker"], "is killed by signal: Killed"),
    "other shapes": ([*TWO, "ours/fail.py", "other shapes"], "size mismatch"),
    "names of DDP": ([*TWO, "ours/fail.py", "names of DDP"], "Unexpected key"),
    "too few rows": ([*TWO, "ours/fail.py", "too few rows"], "rows on each"),
    "unused parameter": ([*TWO, "ours/fail.py", "unused parameter"], "Expected to have finished"),
}


def failing_logs(python):
    """What RUNS print, each within a minute and without a GPU."""
    with tempfile.TemporaryDirectory() as work, socket.create_server(("127.0.0.1", 0)) as server:
        ours, alone = Path(work, "ours"), Path(work, "alone")
        shutil.copytree(ROOT / "common", ours / "common")
        alone.mkdir()
        for folder in (ours, alone):
            shutil.copy(ROOT / "04_ddp_torchrun" / "train.py", folder)
        (ours / "fail.py").write_text(FAIL)
        path = f"{Path(python).absolute().parent}:{os.environ['PATH']}"
        options = {"cwd": work, "env": os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""},
                   "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

        def output(run):
            command = [word.replace("PORT", str(server.getsockname()[1])) for word in run[0]]
            process = subprocess.Popen(command, start_new_session=True, **options)
            try:
                return process.communicate(timeout=60)[0]
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

        with ThreadPoolExecutor(2) as two_at_a_time:
            return dict(zip(RUNS, two_at_a_time.map(output, RUNS.values()), strict=True))


def git(*arguments):
    command = ["git", "diff", "--no-index", "-w", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def steps(old, new):
    """Of each section about a step in new's README that new adds to old: the step's first line."""
    added = re.findall(r"^\+(?!\+\+ )\s*(.*)", git("-U0", old, new), re.M)
    found = {}
    for title in re.findall(r"^### (.*)", (ROOT / new).with_name("README.md").read_text(), re.M):
        if step := MARK.match(title):
            numbers = range(int(step[2]), int(step[3] or step[2]) + 1)
            has_mark = re.compile(rf"#.*\b{step[1]}({'|'.join(map(str, numbers))})\b")
            lines = [line for line in added if has_mark.search(line)]
            found |= {title.replace("`", ""): line for line in lines[:1]}
    return found


def check_tab(page, screenshots, width):
    old, new = page.locator("option[selected]").all_text_contents()
    counts = [int(n) for n in git("--numstat", old, new).split()[:2]]
    tinted = [page.evaluate(TINTED, side) for side in ("last", "first")]
    assert tinted == counts, f"{old} {new}: {tinted} tinted lines, and git counts {counts}"
    notes = page.evaluate(NOTES)
    expected, shown = steps(old, new), {note["title"]: note["first"] for note in notes}
    assert expected.items() <= shown.items(), f"{old} {new}: {expected}, and not {shown}"
    for note in notes:
        box, lines = note["note"], note["lines"]
        if width > 1100:
            near = abs(box["top"] - lines["top"]) < 2 and 0 <= box["left"] - lines["right"] < 30
        else:
            near = 0 <= lines["top"] - box["bottom"] < 30
        assert near, f"{note['title']} is not next to its first line: {note}"
    for one, two in itertools.combinations([note["note"] for note in notes], 2):
        apart = one["bottom"] <= two["top"] or two["bottom"] <= one["top"]
        assert apart, f"{old} {new}: two notes overlap: {one} {two}"
    name = f"{Path(page.url).stem}-{width}.png"
    page.screenshot(path=screenshots / name, full_page=True)
    print(f"{name:18} {counts[0]:4} added, {counts[1]:4} deleted, {len(notes):2} notes")


def check_keys(page):
    """j goes through the steps, each with its whole note; the other controls work."""
    ids = [note["id"] for note in page.evaluate(NOTES)]
    for step in ids:
        page.keyboard.press("j")
        note = page.locator(":target > aside > div")
        page.wait_for_url(f"**#{step}")
        hidden = note.evaluate("note => note.scrollHeight - note.clientHeight")
        assert hidden < 2, f"{step}: the last {hidden} pixels of its note are hidden"
    page.keyboard.press("k")
    page.wait_for_url(f"**#{ids[max(len(ids) - 2, 0)]}")
    page.locator("#brief").check()
    three_of_context = git("-U3", *page.locator("option[selected]").all_text_contents())
    assert page.locator(".equal:visible").count() == len(re.findall("(?m)^ ", three_of_context))
    assert page.locator(".changed:visible").count() == page.locator(".changed").count()
    mark = page.locator(".changed a.mark").last
    mark.click()
    panel = page.frame_locator("#frame").locator(":target")
    panel.locator("h3 a").first.wait_for()
    assert panel.get_attribute("id") == mark.text_content()
    page.locator("select").first.select_option("01")
    page.wait_for_url("**/01-*.html")


def check_links():
    pages = {path.name: path.read_text("utf-8") for path in SITE.glob("*.html")}
    for name, text in pages.items():
        for link in re.findall(r'<[ails][^>]*? (?:href|src)="?([^\s">]+)', text):
            file, _, anchor = link.partition("#")
            place = rf'\bid="?{anchor}[" >]' if anchor else ""
            is_there = (SITE / file).exists() and re.search(place, pages.get(file or name, ""))
            assert link.startswith("http") or is_there, f"{name}: {link} leads nowhere"


def check_finder(page, logs):
    wrong = []
    for name, log in logs.items():
        page.fill("#log", log)
        symptoms = page.locator("#rows li p:first-child").all_text_contents()
        fits = [n for n, symptom in enumerate(symptoms, 1) if RUNS[name][1] in symptom]
        wrong += [log] if fits[:1] != [1] else []
        marked = page.locator("mark").text_content().strip()
        print(f"{name:16} the right row is number {fits[:1]}; marked: {marked[:60]}")
    assert len(wrong) <= 1, "\n".join(wrong)
    long_log = "".join(logs.values()) * 10
    seconds = page.evaluate(SECONDS, long_log)
    print(f"the finder takes {seconds:.2f} s for {len(long_log)} characters")
    assert seconds < 1
    page.fill("#log", "all is well")
    assert page.locator("#nothing").is_visible()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--python", default=sys.executable, help="one with what requirements.txt installs")
    add("--chromium", default="/usr/bin/chromium", help="path of the browser")
    add("--screenshots", type=Path, default=Path(tempfile.gettempdir()), help="folder for them")
    add("--picture", action="store_true", help="only write .pages/side_by_side.png")
    args = parser.parse_args()
    subprocess.run([args.python, ROOT / ".pages" / "build.py"], check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 600})
        page.set_default_timeout(10_000)
        errors = []
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        if args.picture:
            page.goto(f"{SITE.as_uri()}/01-04.html#04-DDP-3")
            picture = page.screenshot(path=SITE.with_name("side_by_side.png"))
            assert len(picture) <= 200_000, f"{len(picture)} bytes"
            return
        check_links()
        args.screenshots.mkdir(parents=True, exist_ok=True)
        page.goto(f"{SITE.as_uri()}/index.html")
        tabs = page.locator("nav a").evaluate_all("links => links.map(link => link.href)")
        for width, tab in itertools.product((1400, 400), tabs[:-2]):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(tab)
            check_tab(page, args.screenshots, width)
            if width == 1400 and page.locator(".step").count():
                check_keys(page)
        plain = browser.new_context(java_script_enabled=False).new_page()
        plain.goto(tabs[1])
        lines = [(ROOT / path).read_text("utf-8").count("\n") for path in
                 plain.locator("option[selected]").all_text_contents()]
        assert plain.locator("[data-n]:visible").count() == sum(lines)
        page.goto(tabs[-2])
        check_finder(page, failing_logs(args.python))
        page.screenshot(path=args.screenshots / "find.png")
        assert not errors, errors


if __name__ == "__main__":
    main()
