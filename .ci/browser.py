"""Test the site that .pages/build.py writes, in Chromium.

    python .ci/browser.py --python .venv/bin/python --screenshots screenshots
    python .ci/browser.py --picture

It needs playwright, .pages/requirements.txt and Chromium; --python is one with torch.
Every tab is compared with git and the READMEs. The finder gets whole logs: of RUNS, and
those in .ci/logs (NCCL, disks), named after the right row. --picture only writes
.pages/side_by_side.png, and next to it the text that it shows.
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
PICTURE, TEXT = ROOT / ".pages/side_by_side.png", ROOT / ".pages/side_by_side.txt"
# the part of the page in the picture, and its text
SHOWN = 'section[id="04-DDP-3"] :is(aside, [data-n])'
TEXTS = """all => all.map(
    ({dataset, textContent}) => [dataset.n, textContent].join(" ")
).join("\\n")"""
# how many lines and notes are cut (but for two spaces), hidden, or of a wrong colour
WRONG = """all => all.filter(one => {
    const text = new Range();
    text.selectNodeContents(one);
    const [end, edge] = [text, one].map(each => each.getBoundingClientRect().right);
    const hasColour = getComputedStyle(one).backgroundColor != "rgba(0, 0, 0, 0)";
    const plain = !hasColour || !one.offsetHeight;
    return plain != one.matches(".equal *") || end > edge + 14
        || one.scrollHeight > one.clientHeight + 1;
}).length"""
# the text of each note, the `code` with which an item begins, and the new lines below:
# to the first that is no comment, and ends with no colon, comma or open bracket
NOTES = """all => all.map(note => {
    const text = note.innerText.replace(/\\s+/g, " ");
    const isStep = note.querySelector("details");
    const code = isStep ? "" : note.querySelector("code").innerText;
    const lines = [];
    let row = note;
    do {
        row = row.nextElementSibling;
        if (row.lastChild.matches("code")) lines.push(row.lastChild.innerText);
    } while (!lines.length || /^ *#|[(\\[{,:]$/.test(lines.at(-1)));
    return [text, code, lines];
})"""
# what the finder shows first for a log, and after how many milliseconds
SEARCH = """text => {
    const start = Date.now();
    log.value = text;
    log.oninput();
    const shown = raised.hidden ? list.firstChild : excerpt.children[1];
    return [shown.textContent, Date.now() - start];
}"""
# the rows that have a text of so few letters that it would fit any log
SHORT = """rows.filter(([_, texts]) => texts.some(({patterns, needs}) =>
    [...patterns.map(({regexp}) => regexp), ...needs].some(
        ({source}) => !/[a-z]{3}/.test(source)
    )
)).map(([row]) => row.textContent)"""
FAIL = """
import common.gather, datetime, os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

def kill(*_):
    os.kill(os.getpid(), 9)

dist.init_process_group("gloo")
model, rank = nn.Linear(2, 2), dist.get_rank()
exec(sys.argv[1])
"""
TWO = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# words of the row, or of the marked error, of a run that fails: its command
RUNS = {
    "start it with torchrun": "python 04_ddp_torchrun/train.py",
    "Cuda is not available": (
        "torchrun --standalone --nproc-per-node=gpu 04_ddp_torchrun/train.py"
    ),
    "EADDRINUSE": "torchrun --nnodes=1 --master-port=$PORT x.py",
    "No module named 'common'": f"env --unset=PYTHONPATH {TWO} $WORK/train.py",
    "unrecognized arguments": f"{TWO} 04_ddp_torchrun/train.py --epochz=3",
}
# the same, with what FAIL executes
FAILING = {
    "ZeroDivisionError: ": "1 / 0 if rank == 1 else dist.all_reduce(torch.ones(1))",
    "preamble.length": "dist.all_reduce(torch.ones(3 + 10**6 * rank))",
    "Timed out waiting": """
group = dist.new_group(timeout=datetime.timedelta(seconds=3))
time.sleep(9) if rank else dist.all_reduce(torch.ones(1), group=group)
""",
    "exitcode: -9": "kill() if rank == 1 else dist.all_reduce(torch.ones(1))",
    "killed by signal: Killed": (
        "next(iter(DataLoader([1], num_workers=1, worker_init_fn=kill)))"
    ),
    "size mismatch": "nn.Linear(2, 3).load_state_dict(model.state_dict())",
    "Unexpected key": "model.load_state_dict(DDP(model).state_dict())",
    "rows on each": "common.gather.gather_in_order(torch.ones(3), 8)",
    "Expected to have finished": """
model.unused = nn.Parameter(torch.ones(1))
ddp_model = DDP(model)
for _ in range(2):
    ddp_model(torch.ones(2)).sum().backward()
""",
}


def failing_logs(python):
    """What RUNS and FAILING print, each within a minute and without a GPU."""
    runs = RUNS | {
        words: f"{TWO} $WORK/fail.py '{code}'" for words, code in FAILING.items()
    }
    with (
        tempfile.TemporaryDirectory() as work,
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(2) as two_at_a_time,
    ):
        shutil.copy(ROOT / "04_ddp_torchrun/train.py", work)  # without common/
        Path(work, "fail.py").write_text(FAIL)
        first = f"""cd '{ROOT}'
            export PATH='{Path(python).absolute().parent}':$PATH PYTHONPATH=.
            export CUDA_VISIBLE_DEVICES= WORK={work} PORT={server.getsockname()[1]}
            env --unset=OMP_NUM_THREADS timeout --signal=KILL 60 """
        commands = [first + run for run in runs.values()]
        logs = two_at_a_time.map(subprocess.getoutput, commands)
        return dict(zip(runs, logs, strict=True))


def check_tab(page, tab, words):
    """It has all changes, and whole notes at their lines; words: what the map says."""
    old, new = page.locator(".heads b").all_text_contents()
    diff = subprocess.getoutput(f"cd '{ROOT}'; git diff --no-index -w -U1 {old} {new}")
    signs = [line[0] for line in diff.splitlines()[4:]]
    more, less = signs.count("+"), signs.count("-")
    assert page.locator(".changed > code:last-child").count() == more, tab
    assert page.locator(".changed > code:first-child").count() == less, tab
    size = f"+{more} −{less} lines" if diff else "same train.py"
    assert words == size, f"{tab}: {size}, not {words}"
    check_notes(page, tab, ROOT / new)
    if "01-04" in tab:
        # a line that is now three
        lines = re.compile("train_loader = DataLoader|sampler=train_sampler")
        strong = page.locator(".changed", has_text=lines).locator("b")
        fresh = ["shuffle", "True", "sampler", "train_sampler"]
        assert strong.all_text_contents() == fresh
        shown = page.locator(SHOWN).evaluate_all(TEXTS)
        assert shown == TEXT.read_text(), "renew it: --picture"
    page.locator("#brief").check()
    page.goto(tab)  # the next page has only changes, too
    page.keyboard.press("o")
    assert page.locator(".changed:visible").count() == page.locator(".changed").count()
    assert page.locator(".equal:visible").count() <= signs.count(" ")
    page.locator("#brief").uncheck()


def check_notes(page, tab, script):
    """Each line of the README's notes is shown, next to its code."""
    notes = page.locator("aside").evaluate_all(NOTES)
    text = script.with_name("README.md").read_text("utf-8")
    text = re.sub(r"(?ms)^```.*?^```$|\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = text.replace("`", "")
    of_step = r"^### ([A-Z]+-\d)(: .*\n(?:(?!#).*\n)*)"
    for mark, section in re.findall(of_step, text, re.M):
        if mark in script.read_text():
            shown = "".join(text for text, *_ in notes if text.startswith(mark))
            for line in section.splitlines():
                assert line.lstrip("- ") in shown, f"{tab}: {line}, {shown}"
    # a step is above its mark, or the `if` above that; an item is above its statement
    for text, code, lines in notes:
        name = re.search(r"\w*", code or text.split(":")[0])[0]
        is_there = name in lines[0]
        if code or lines[0].endswith(":"):
            is_there = name in " ".join(lines)
        assert is_there, f"{tab}: {text}, above {lines}"


def check_windows(page, screenshot):
    """All is shown as it should; keys and buttons go to all bands, then back."""
    ids = page.locator("aside").evaluate_all("all => all.map(({id}) => id)")
    # the chips are in the order of the notes
    first = "all => all.map(({hash}) => hash.slice(1) + '-0')"
    chips = page.locator(".chip").evaluate_all(first)
    assert chips == [band for band in ids if band.endswith("-0")]
    for width, key, step, bands in (
        (400, "j", "next", ids),
        (1400, "k", "previous", ids[-2::-1]),
    ):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width, page.url
        assert not page.locator("aside, [data-n]").evaluate_all(WRONG), page.url
        page.evaluate("scrollTo(0, 0)")  # or the bar would be in the middle
        page.screenshot(path=f"{screenshot}-{width}.png", full_page=True)
        for n, band in enumerate(bands):
            if n % 2 == 1:
                page.keyboard.press(key)
            else:
                page.get_by_role("button", name=step).click()
            page.wait_for_url(f"**#{band}")
            page.locator(f'.chip.on[href="#{band.rpartition("-")[0]}"]').wait_for()
            assert 0 < page.locator(":target").bounding_box()["y"] < 600


def check_links():
    pages = {path.name: path.read_text("utf-8") for path in SITE.glob("*.html")}
    link = r'(?:href|src)="(?!http)([^"#]*)#?([^"]*)"'
    for name, text in pages.items():
        for file, anchor in re.findall(link, text):
            assert (SITE / file).exists(), f"{name}: there is no {file}"
            if anchor:
                there = f'id="{anchor}"' in pages[file or name]
                assert there, f"{name}: {file}#{anchor} leads nowhere"


def check_finder(page, logs):
    short = page.evaluate(SHORT)
    assert not short, short
    for path in LOGS.glob("*.log"):
        logs[path.stem.replace("_", " ")] = path.read_text()
    for words, log in logs.items():
        shown, _ = page.evaluate(SEARCH, log)
        right = words.lower() in shown.lower()
        assert right, f"{shown}, and not {words}, is shown for {log}"
    long = "".join(logs.values()) * 2
    times = [page.evaluate(SEARCH, long)[1] for _ in range(5)]
    assert min(times) < 1000
    no_one_cause = page.locator("#nothing:visible, #several:visible")
    for text in (
        "CUDA out of memory",
        "cuda:0 and cpu",
        "a tensor is on the CPU",
        "OSError: [Errno 9], serialization.py",
        "all is well",
    ):
        page.fill("#log", f"RuntimeError: {text}")
        assert no_one_cause.count(), text


def draw(page):
    page.goto(f"{SITE.as_uri()}/01-04.html#04-DDP-3")
    page.screenshot(path=PICTURE)
    TEXT.write_text(page.locator(SHOWN).evaluate_all(TEXTS))


def check(page, args):
    logs = ThreadPoolExecutor().submit(failing_logs, args.python)  # beside the rest
    check_links()
    page.goto(f"{SITE.as_uri()}/index.html")
    check_windows(page, args.screenshots / "index")
    texts = "all => all.map(({href, text}) => [href, text])"
    arrows = page.locator(".arrow").evaluate_all(texts)
    tabs = page.locator("nav span a").evaluate_all(texts)
    assert sorted(tab for tab, _ in tabs) == sorted(tab for tab, _ in arrows)
    assert len(tabs) == 7
    for tab, words in arrows:
        page.goto(tab)
        check_windows(page, args.screenshots / Path(tab).stem)
        check_tab(page, tab, words)
    page.goto(f"{SITE.as_uri()}/marks.html#DDP-3")
    assert page.locator("h2:visible").count() == 1  # only this step
    plain = page.context.browser.new_page(java_script_enabled=False)
    plain.goto(tab)
    assert plain.locator("[data-n]:visible").count() > 150
    page.goto(f"{SITE.as_uri()}/find.html")
    check_finder(page, logs.result())
    page.screenshot(path=args.screenshots / "find.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--python", default=sys.executable, help="one with torch")
    add("--screenshots", type=Path, default=Path("/tmp"), help="a folder")
    add("--picture", action="store_true", help="write .pages/side_by_side.png")
    args = parser.parse_args()
    subprocess.run([sys.executable, ROOT / ".pages/build.py"], check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 600})
        errors = []
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        if args.picture:
            draw(page)
        else:
            check(page, args)
        assert not errors, errors


if __name__ == "__main__":
    main()
