"""Test the site that .pages/build.py writes, in Chromium.

    python .ci/browser.py FOLDER_FOR_SCREENSHOTS

It needs playwright, .pages/requirements.txt and Chromium. Each log in .ci/logs is named
after words of its row, which the finder must show first for the whole log.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SITE, LOGS = ROOT / ".pages/site", ROOT / ".ci/logs"
# the code of the right column, and what the finder shows first for a log
CODE = "all => all.map(line => line.textContent).join('\\n')"
FIRST = """text => {
    log.value = text;
    log.oninput();
    return raised.hidden ? list.firstChild.textContent : excerpt.textContent;
}"""
# the lowest contrast of a text that is shown and its background
CONTRAST = """all => {
    const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).reduce(
        (sum, part, n) => sum + [0.21, 0.72, 0.07][n] * (part / 255) ** 2.2, 0.05);
    const behind = (one) => {
        const colour = getComputedStyle(one).backgroundColor;
        return /^rgb\\(/.test(colour) ? colour : behind(one.parentElement);
    };
    return Math.min(...all.filter((one) => one.checkVisibility()).map((one) => {
        const ratio = light(getComputedStyle(one).color) / light(behind(one));
        return Math.max(ratio, 1 / ratio);
    }));
}"""


def check_links(pages):
    link = re.compile(r'(?:href|src)="(?!http)([^"#]*)#?([^"]*)"')
    for name, text in pages.items():
        for file, anchor in link.findall(text):
            there = f'id="{anchor}"' in pages[file or name] if anchor else True
            assert there and (SITE / file).exists(), f"{name}: {file}#{anchor}"


def check_pair(page, file):
    """The new script is there as a whole, and j goes from note to note."""
    page.goto(f"{SITE.as_uri()}/{file}")
    script = page.locator(".heads b").last.text_content()
    shown = page.locator("[data-n]:last-child").evaluate_all(CODE)
    assert shown == (ROOT / script).read_text("utf-8").rstrip("\n"), file
    for note in page.locator("aside").all():
        page.keyboard.press("j")
        assert 0 < note.bounding_box()["y"] < 400, f"{file}: {note.text_content()}"
    assert page.locator("aside").count() > 0 or not page.locator(".changed").count()
    page.locator("#brief").check()
    rows = page.locator("main > .equal")
    assert rows.and_(page.locator(":visible")).count() < rows.count() / 2, file


def check_finder(page):
    page.goto(f"{SITE.as_uri()}/find.html")
    for path in sorted(LOGS.glob("*.log")):
        first = page.evaluate(FIRST, path.read_text()).lower()
        assert path.stem.replace("_", " ") in first, f"{path.name}: {first}"
    page.fill("#log", "RuntimeError: all is well")
    assert page.locator("#nothing:visible").count()


def main():
    folder = Path(sys.argv[1])
    subprocess.run([sys.executable, ROOT / ".pages/build.py"], check=True)
    pages = {path.name: path.read_text("utf-8") for path in SITE.glob("*.html")}
    check_links(pages)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        errors = []
        for scheme, width in (("dark", 400), ("light", 1400)):
            size = {"width": width, "height": 900}
            page = browser.new_page(color_scheme=scheme, viewport=size)
            page.on("console", lambda message: errors.append(message.text))
            page.on("pageerror", lambda error: errors.append(str(error)))
            for name in pages:
                page.goto(f"{SITE.as_uri()}/{name}")
                page.screenshot(path=folder / f"{name}-{scheme}.png")
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                texts = page.locator("p, li, a, code, span, b")
                contrast = texts.evaluate_all(CONTRAST)
                assert contrast > 4.5, f"{name} in {scheme}: {contrast}"
        for name in filter(re.compile(r"0\d-").match, pages):
            check_pair(page, name)
        check_finder(page)
        page.set_viewport_size({"width": 1400, "height": 600})
        page.goto(f"{SITE.as_uri()}/01-04.html#DDP-3")
        page.screenshot(path=folder / "side_by_side.png")  # README's picture
        assert not errors, errors


if __name__ == "__main__":
    main()
