"""Test the page of .pages/build.py in Chromium.

    python .ci/browser.py --python .venv/bin/python --screenshots screenshots
    python .ci/browser.py --picture

It needs playwright, .pages/requirements.txt and Chromium; --python is one with torch. Every tab is
compared with git and the READMEs. The finder gets whole logs: of RUNS, and those in .ci/logs (NCCL,
two ranks on one GPU), named after the right row. --picture only writes .pages/side_by_side.png,
and next to it the text that it shows.
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
SITE, LOGS = ROOT / ".pages/site", ROOT / ".ci/logs"
PICTURE, TEXT = [SITE.with_name(f"side_by_side.{kind}") for kind in ("png", "txt")]
SHOWN = 'section[id="04-DDP-3"] :is(aside, [data-n])'  # the part of the page in the picture
TEXTS = "all => all.map(({dataset, textContent}) => [dataset.n, textContent].join(' ')).join('\\n')"
# the lines and notes that are cut off (not counting two spaces), hidden, or not of their colour
WRONG = """all => all.filter(one => { const text = new Range(); text.selectNodeContents(one);
    const [end, edge] = [text, one].map(each => each.getBoundingClientRect().right);
    const plain = getComputedStyle(one).backgroundColor == "rgba(0, 0, 0, 0)" || !one.offsetHeight;
    return plain != one.matches(".equal *") || end > edge + 14
        || one.scrollHeight > one.clientHeight + 1 }).length"""
NOTES = """all => all.map(note => [note.innerText.replace(/\\s+/g, " "),
    note.querySelector("details") ? "" : note.querySelector("code").innerText,
    note.nextElementSibling.lastChild.innerText])"""
SEARCH = """text => { const start = Date.now(); log.value = text; log.oninput(); return [
    (raised.hidden ? list.firstChild : excerpt.children[1]).textContent, Date.now() - start] }"""
FAIL = '''
import common.gather, datetime, os, sys, time, torch, torch.distributed as dist, torch.nn as nn
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
net, rank, kill = nn.Linear(2, 2), dist.get_rank(), lambda *_: os.kill(os.getpid(), 9)
exec(sys.argv[1])
'''
TWO = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
RUNS = {  # words of the row, or of the marked error, of a run that fails: what it, or FAIL, runs
    "start it with torchrun": "python 04_ddp_torchrun/train.py",
    "Cuda is not available": "torchrun --standalone --nproc-per-node=gpu 04_ddp_torchrun/train.py",
    "EADDRINUSE": "torchrun --nnodes=1 --master-port=$PORT x.py",
    "No module named 'common'": f"env --unset=PYTHONPATH {TWO} $WORK/train.py",
    "unrecognized arguments": f"{TWO} 04_ddp_torchrun/train.py --epochz=3",
    "ZeroDivisionError: ": "1 / 0 if rank == 1 else dist.all_reduce(torch.ones(1))",
    "preamble.length": "dist.all_reduce(torch.ones(3 + 10**6 * rank))",
    "Timed out waiting": "group = dist.new_group(timeout=datetime.timedelta(seconds=3)); "
    "time.sleep(9) if rank else dist.all_reduce(torch.ones(1), group=group)",
    "exitcode: -9": "kill() if rank == 1 else dist.all_reduce(torch.ones(1))",
    "killed by signal: Killed": "next(iter(DataLoader([1], num_workers=1, worker_init_fn=kill)))",
    "size mismatch": "nn.Linear(2, 3).load_state_dict(net.state_dict())",
    "Unexpected key": "net.load_state_dict(nn.parallel.DistributedDataParallel(net).state_dict())",
    "rows on each": "common.gather.gather_in_order(torch.ones(3), 8)",
    "Expected to have finished": "net.unused = nn.Parameter(torch.ones(1)); "
    "model = nn.parallel.DistributedDataParallel(net); "
    "[model(torch.ones(2)).sum().backward() for _ in range(2)]",
}


def failing_logs(python):
    """What RUNS print, each within a minute and without a GPU."""
    with tempfile.TemporaryDirectory() as work, socket.create_server(("127.0.0.1", 0)) as server:
        shutil.copy(ROOT / "04_ddp_torchrun/train.py", work)  # without common/
        Path(work, "fail.py").write_text(FAIL)
        first = f"""cd '{ROOT}'; export PATH='{Path(python).absolute().parent}':$PATH PYTHONPATH=.
            export CUDA_VISIBLE_DEVICES= WORK={work} PORT={server.getsockname()[1]}
            env --unset=OMP_NUM_THREADS timeout --signal=KILL 60 """
        commands = [first + (f"{TWO} $WORK/fail.py '{run}'" if "(" in run else run)
                    for run in RUNS.values()]
        with ThreadPoolExecutor(2) as two_at_a_time:
            return dict(zip(RUNS, two_at_a_time.map(subprocess.getoutput, commands), strict=True))


def check_tab(page, tab, words):
    """It has all changes, and whole notes next to their lines; words: what the map says."""
    old, new = page.locator(".heads b").all_text_contents()
    diff = subprocess.getoutput(f"cd '{ROOT}'; git diff --no-index -w -U1 {old} {new}")
    signs = [line[0] for line in diff.splitlines()[4:]]
    for side, sign in (("last", "+"), ("first", "-")):
        assert page.locator(f".changed > code:{side}-child").count() == signs.count(sign), tab
    size = f"+{signs.count('+')} −{signs.count('-')} lines" if diff else "same train.py"
    assert words == size, f"{tab}: {size}, not {words}"
    notes = page.locator("aside").evaluate_all(NOTES)
    text = (ROOT / new).with_name("README.md").read_text("utf-8")
    text = re.sub(r"(?ms)^```.*?^```$|\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    for mark, section in re.findall(r"^### ([A-Z]+-\d)(: .*\n(?:(?!#).*\n)*)", text, re.M):
        shown = "".join(text for text, *_ in notes if text.startswith(mark))
        missing = [line for line in section.splitlines() if line.lstrip("- ") not in shown]
        assert not missing or mark not in (ROOT / new).read_text(), f"{tab}: {missing}, {shown}"
    for text, code, line in notes:  # a step is above its mark, an item of its note above its code
        assert re.search(r"\w*", code or text.split(":")[0])[0] in line, f"{tab}: {text}"
    if "01-04" in tab:
        strong = page.locator(".changed", has_text="sampler=train_sampler").locator("b")
        assert strong.all_text_contents() == ["shuffle", "True", "sampler", "train_sampler"]
        assert page.locator(SHOWN).evaluate_all(TEXTS) == TEXT.read_text(), "renew it: --picture"
    page.locator("#brief").check()
    page.goto(tab)  # the next page has only changes, too
    page.keyboard.press("o")
    assert page.locator(".changed:visible").count() == page.locator(".changed").count()
    assert page.locator(".equal:visible").count() <= signs.count(" ")
    page.locator("#brief").uncheck()


def check_windows(page, screenshot):
    """All is shown as it should; keys and buttons go to all bands, in a wide window back."""
    ids = page.locator("aside").evaluate_all("all => all.map(({id}) => id)")
    first = page.locator(".chip").evaluate_all("all => all.map(({hash}) => hash.slice(1) + '-0')")
    assert first == [band for band in ids if band.endswith("-0")]  # the chips are in this order
    for width, key, step, bands in ((400, "j", "next", ids), (1400, "k", "previous", ids[-2::-1])):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width, page.url
        assert not page.locator("aside, [data-n]").evaluate_all(WRONG), page.url
        page.evaluate("scrollTo(0, 0)")  # or the bar would be in the middle
        page.screenshot(path=f"{screenshot}-{width}.png", full_page=True)
        for n, band in enumerate(bands):
            page.keyboard.press(key) if n % 2 else page.get_by_role("button", name=step).click()
            page.wait_for_url(f"**#{band}")
            page.locator(f'.chip.on[href="#{band.rpartition("-")[0]}"]').wait_for()
            assert 0 < page.locator(":target").bounding_box()["y"] < 600


def check_links():
    pages = {path.name: path.read_text("utf-8") for path in SITE.glob("*.html")}
    for name, text in pages.items():
        for file, anchor in re.findall(r'(?:href|src)="(?!http)([^"#]*)#?([^"]*)"', text):
            is_there = not anchor or f'id="{anchor}"' in pages[file or name]
            assert (SITE / file).exists() and is_there, f"{name}: {file}#{anchor} leads nowhere"


def check_finder(page, logs):
    logs |= {path.stem.replace("_", " "): path.read_text() for path in LOGS.glob("*.log")}
    for words, log in logs.items():
        shown = page.evaluate(SEARCH, log)[0]
        assert words.lower() in shown.lower(), f"{shown}, and not {words}, is shown for {log}"
    assert min(page.evaluate(SEARCH, "".join(logs.values()) * 2)[1] for _ in "12345") < 1000  # ms
    for common in ("CUDA out of memory", "cuda:0 and cpu", "a tensor is on the CPU", "all is well"):
        page.fill("#log", f"RuntimeError: {common}")
        assert page.locator("#nothing:visible, #several:visible").count(), common  # no one cause


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="one with torch")
    parser.add_argument("--screenshots", type=Path, default=Path("/tmp"), help="a folder")
    parser.add_argument("--picture", action="store_true", help="write .pages/side_by_side.png")
    args = parser.parse_args()
    subprocess.run([sys.executable, ROOT / ".pages" / "build.py"], check=True)
    with sync_playwright() as playwright:
        chromium = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**chromium)
        page, errors = browser.new_page(viewport={"width": 1400, "height": 600}), []
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        if args.picture:
            page.goto(f"{SITE.as_uri()}/01-04.html#04-DDP-3")
            page.screenshot(path=PICTURE)
            return TEXT.write_text(page.locator(SHOWN).evaluate_all(TEXTS))
        logs = ThreadPoolExecutor().submit(failing_logs, args.python)  # beside the rest
        check_links()
        page.goto(f"{SITE.as_uri()}/index.html")
        check_windows(page, args.screenshots / "index")
        arrows = page.locator(".arrow").evaluate_all("all => all.map(a => [a.href, a.text])")
        tabs = page.locator("nav span a").evaluate_all("all => all.map(a => a.href)")
        assert sorted(tabs) == sorted(tab for tab, _ in arrows) and len(tabs) == 7
        for tab, words in arrows:
            page.goto(tab)
            check_windows(page, args.screenshots / Path(tab).stem)
            check_tab(page, tab, words)
        page.goto(f"{SITE.as_uri()}/marks.html#DDP-3")
        assert page.locator("h2:visible").count() == 1  # only this step
        plain = browser.new_page(java_script_enabled=False)
        plain.goto(tab)
        assert plain.locator("[data-n]:visible").count() > 150
        page.goto(f"{SITE.as_uri()}/find.html")
        check_finder(page, logs.result())
        page.screenshot(path=args.screenshots / "find.png")
        assert not errors, errors


if __name__ == "__main__":
    main()
