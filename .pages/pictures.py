"""Draw the pictures of the pages as SVG files.

    python .pages/pictures.py

Time axes are schematic. The figures of memory and of the benchmark are those of the
tables below the lines <!-- memory.svg --> and <!-- benchmark.svg -->.
"""

import math
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT, RIGHT = 100, 680  # from where to where the axes go, in pixels of 700
LOOKS = {  # class: its fill and its stroke in light, then in dark
    "blue": "#cfe3ff #1f6feb #1b3a66 #6ca8ff", "orange": "#ffdfb0 #b86a00 #5c3a0a #f0a94a",
    "green": "#c8efd0 #1f883d #17492a #56d07a", "red": "#ffd8d3 #cf222e #6b1f1f #ff7b72",
    "grey": "#eaeef2 #8c959f #2a313a #7d8590", "wait": "none #6e7781 none #8b949e",
    "words": "#1f2328 none #e6edf3 none", "soft": "#59636e none #9ba5b0 none"}
LIGHT, DARK = ["".join(f".{look}{{fill:{colours.split()[n]};stroke:{colours.split()[n + 1]}}}"
                       for look, colours in LOOKS.items()) for n in (0, 2)]
HEAD = f"""<style>text{{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}
.bold{{font-weight:600}}.wait{{stroke-dasharray:4 3}}.grid{{opacity:.4}}{LIGHT}
@media(prefers-color-scheme:dark){{{DARK}}}polyline{{fill:none!important;stroke-width:1.4}}</style>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
markerUnits="userSpaceOnUse" orient="auto"><path class="soft" d="M0 0L8 4L0 8z"/></marker>"""


def picture(statement, height, parts):
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="700" height="{height}" '
                      f'viewBox="0 0 700 {height}" role="img">\n<title>{statement}</title>',
                      HEAD, *parts, "</svg>\n"])


def text(x, y, words, look="words", anchor="start"):
    """Lines of words with their middle at y; anchor: start, middle or end of them is at x."""
    y += 4.5 - 7.5 * words.count("\n")
    return "".join(f'<text class="{look}" x="{x:.4g}" y="{y + 15 * n:.4g}" text-anchor="{anchor}">'
                   f"{each}</text>" for n, each in enumerate(words.split("\n")))


def box(x, y, width, height, look, words=""):
    inside = text(x + width / 2, y + height / 2, words, anchor="middle") if words else ""
    return (f'<rect class="{look}" x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height}" '
            f'rx="3"/>{inside}')


def line(look, *points, end=False):
    """A line through points (x, y); with end=True an arrow."""
    points = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
    return f'<polyline class="{look}" points="{points}"' + ' marker-end="url(#tip)"' * end + "/>"


def at(value, end=100):  # the x of a value on an axis from 0 to end
    return LEFT + (RIGHT - LEFT) * float(value) / end


def lanes(bottom, plan):
    """Boxes on a time axis; a row of the plan: top height class | name | start end words | ...;"""
    parts = [line("grey", (LEFT, bottom), (RIGHT + 12, bottom), end=True),
             text(RIGHT + 12, bottom + 12, "time", "soft", "end")]
    for row in plan.replace("/", "\n").split(";"):
        place, name, *boxes = [cell.strip() for cell in row.split("|")]
        top, height, look = place.split()
        parts.append(text(6, int(top) + int(height) / 2, name))
        for start, end, words in [each.split(" ", 2) for each in boxes]:
            parts.append(box(at(start), int(top), at(end) - at(start), int(height), look, words))
    return parts


def table(page, name):
    """The cells, row by row, of the table below the line <!-- name --> of a page."""
    found = re.search(rf"<!-- {name} -->\s*((?:\|.*\n)+)", (ROOT / page).read_text("utf-8"))
    if not found:
        raise ValueError(f"{page} has no table below a line <!-- {name} -->")
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[1].split("\n")[2:-1]]


def ddp_step():
    parts = lanes(236, """
    20 44 blue | rank 0 | 0 20 forward:/layers 1-6 | 20 34 backward:/layers 5, 6
        | 34 48 backward:/layers 3, 4 | 48 62 backward:/layers 1, 2 | 87 99 optimizer/step;
    20 44 wait | | 62 75 wait for/rank 1 | 75 87 wait for/network;
    102 32 orange | all-reduces | 41 53 bucket 0 | 58 70 bucket 1 | 75 87 bucket 2;
    172 44 blue | rank 1,/slower | 0 24 forward:/layers 1-6 | 24 41 backward:/layers 5, 6
        | 41 58 backward:/layers 3, 4 | 58 75 backward:/layers 1, 2 | 87 99 optimizer/step;
    172 44 wait | | 75 87 wait for/network""")
    same = "equal weights, its own images"
    parts += [text(at(35), 87, "gradients", "soft", "end"), text(LEFT, 9, same, "soft"),
              text(LEFT, 226, same, "soft"),
              text(RIGHT, 9, "same step: equal weights again", "soft", "end")]
    for fast, slow in ((34, 41), (48, 58), (62, 75)):  # when they are ready on rank 0, on rank 1
        parts += [line("grey", (at(fast), 65), (at(slow) + 2, 101), end=True),
                  line("grey", (at(slow) + 2, 171), (at(slow) + 2, 135), end=True)]
    return picture("DDP: buckets are all-reduced while the backward computes the next", 260, parts)


def fsdp():
    parts = lanes(258, """
    4 20 grey | | 0 39 forward | 39 90 backward;
    32 26 orange | all-gather | 0 5 root | 5 10 1 | 10 15 2 | 19 24 3 | 39 44 3 | 44 49 2 | 61 66 1;
    63 26 blue | compute | 10 19 block 1 | 19 28 block 2 | 28 37 block 3 | 37 44 loss
        | 44 56 block 3 | 56 68 block 2 | 68 80 block 1 | 91 99 step;
    94 26 orange | reduce-scatter | 56 61 3 | 68 73 2 | 80 85 1 | 85 90 root;
    138 26 green | whole blocks | 10 28 block 2 | 44 68 block 2;
    164 26 green | in memory | 5 19 block 1 | 19 37 block 3 | 39 56 block 3 | 61 80 block 1;
    194 24 green | root's layers | 0 80 embedding and head: whole until the backward has ended;
    222 24 grey | shards | 0 99 its part of all parameters, gradients and optimizer states""")
    parts.append(text(at(28) + 6, 151, "← freed", "soft"))
    return picture("FSDP: blocks are whole only while they are used, two at most", 282, parts)


def memory():
    rows, parts = table("05_model_parallel/README.md", "memory.svg"), []
    end = 1.12 * max(float(total) for *_, total in rows)
    looks = {"weights": "blue", "gradients": "orange", "optimizer": "green"}
    for n, (way, *cells, total) in enumerate(rows):
        y, held = 23 + 40 * n, 0
        parts += [text(6, y, way), text(at(total, end) + 8, y, f"{float(total):g} GB")]
        for cell, name in zip(map(float, cells), looks, strict=True):
            x, held = at(held, end), held + cell
            width = at(held, end) - x
            words = f"{name} {cell:g}" if width > 100 else f"{cell:g}" * (width > 30)
            parts.append(box(x, y - 15, width, 30, looks[name], words))
    return picture("GB of each rank for 7 billion parameters", 8 + 40 * len(rows), parts)


def two_machines():
    parts = []
    for n, x in ((0, 8), (1, 402)):
        parts += [box(x, 8, 290, 222, "grey"), text(x + 12, 26, f"node {n}: 10.0.0.{n + 1}"),
                  box(x + 12, 44, 266, 58, "blue"), text(x + 24, 73, f"torchrun\n--node-rank={n}")]
        for rank, middle in ((2 * n, x + 71), (2 * n + 1, x + 219)):
            parts += [line("green", (middle, 158), (middle, 132)),
                      line("orange", (middle, 212), (middle, 196), end=True),
                      box(middle - 59, 158, 118, 36, "blue", f"rank {rank}")]
    parts += [box(168, 50, 106, 46, "green", "store,\nport 29500"),
              line("red", (414, 73), (276, 73), end=True), line("green", (79, 132), (621, 132)),
              line("green", (221, 132), (221, 98), end=True), line("orange", (79, 212), (621, 212))]
    for number, y, below, look, what, names in (
            ("1", 73, 258, "red", "torchrun connects to the store",
             "--master-addr=10.0.0.1 --master-port=29500\nwith c10d: --rdzv-endpoint"),
            ("2", 132, 304, "green", "each rank connects to the store", "MASTER_ADDR, MASTER_PORT: "
             "torchrun sets them\nwith c10d: rank 0's host name or --local-addr, a free port"),
            ("3", 212, 350, "orange", "ranks exchange data, free ports",
             "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME:\nthe interface that has 10.0.0.x")):
        parts += [box(x, middle - 11, 22, 22, look, number) for x, middle in ((339, y), (8, below))]
        parts += [text(38, below, what), text(274, below, names)]
    return picture("Two machines: who connects to whom, and what you set for it", 376, parts)


def elastic():
    points = ((0, 0), (20, 46), (20, 32), (46, 32), (66, 53), (66, 43), (76, 43), (99, 99))
    curve = [(at(time), 250 - 1.2 * steps) for time, steps in points]
    parts = lanes(272, """
    34 30 blue | node 0 | 0 20 2 ranks | 46 66 2 ranks | 76 99 2 ranks;
    34 30 wait | | 20 46 30 s for/another node | 66 76 restart;
    70 30 blue | node 1 | 0 20 2 ranks | 76 99 2 ranks;
    70 30 wait | | 66 76 start""")
    for (x, y), event in ((curve[1], "SIGTERM or kill on node 1"), (curve[4], "node 1 joins")):
        parts += [text(x, 14, event, "words bold", "middle"), line("wait", (x, 24), (x, y))]
    parts += [line("blue", *curve), line("red", *curve[1:3], end=True),
              line("red", *curve[4:6], end=True), text(6, 186, "progress"),
              text(22, 211, "checkpoint"),
              text(at(22), 236, "steps since the last\ncheckpoint are repeated")]
    saved = [(at(time), 250 - 1.2 * steps) for time, steps in ((14, 32), (56, 43), (96, 92))]
    parts += [box(x - 5, y - 5, 10, 10, "green") for x, y in ((11, 211), *saved)]
    return picture("Elastic: a leave or a join costs the steps since a checkpoint", 292, parts)


def log():
    """Of .pages/run1.log: five epochs of 06 on MNIST, killed in the third and resumed."""
    printed, parts = (ROOT / ".pages/run1.log").read_text("utf-8"), [text(6, 264, "epochs")]
    done = int(re.search(r"^resuming .*'epoch': 3, 'done': (\d+)", printed, re.M)[1])
    for top, look, name in zip(
            (24, 104, 184), ("orange", "blue", "green"), ("loss", "rate", "accuracy"), strict=True):
        rows = {}
        for epoch, percent, value in re.findall(
                rf"^epoch (\d)/5  (?:(\d+)%)?.*\b{name} (\S+)", printed, re.M):
            rows[int(epoch) - 1 + int(percent or 100) / 100] = float(value)
        low, high = min(rows.values()), max(rows.values())
        points = [(at(x, 5), top + 60 * (high - y) / (high - low)) for x, y in sorted(rows.items())]
        parts += [text(6, top + 30, name), line(look, *points)]
        parts += [text(92, top, f"{high:.4g}", "soft", "end"),
                  text(92, top + 60, f"{low:.4g}", "soft", "end")]
    parts += [text(at(n, 5), 264, f"{n}", "soft", "middle") for n in range(6)]
    x = at(2 + done / 60_000, 5)
    parts += [line("wait", (x, 16), (x, 250)), text(x + 8, 20, "killed, and resumed")]
    return picture("Loss, rate and accuracy over the epochs of two starts", 278, parts)


def benchmark():
    rows = table("tests/benchmark.md", "benchmark.svg")
    runs = {n: [(float(row[n]), 100 * float(row[n + 1])) for row in rows if row[n]] for n in (3, 1)}
    end = 1.05 * max(seconds for run in runs.values() for seconds, _ in run)
    low = math.floor(min(accuracy for run in runs.values() for _, accuracy in run))
    parts = [text(RIGHT, 261, "seconds", "soft", "end"), text(6, 15, "accuracy", "soft")]
    for seconds in range(0, int(end), 10 * math.ceil(end / 80)):
        parts.append(text(at(seconds, end), 242, str(seconds), "soft", "middle"))
    for tick in range(low, 101):
        y = 228 - 186 * (tick - low) / (100 - low)
        parts += [line("grey grid", (LEFT, y), (RIGHT, y)), text(92, y, f"{tick} %", "soft", "end")]
    for x, look, name, n in ((110, "blue", "04", 3), (350, "orange", "recipe", 1)):
        points = [(at(time, end), 228 - 186 * (y - low) / (100 - low)) for time, y in runs[n]]
        (time, last) = runs[n][-1]
        parts += [line(look, *points), text(x + 10, 15, f"{name}: {last:.2f} % after {time:g} s")]
        parts += [box(x - 5, y - 5, 10, 10, look) for x, y in ((x, 15), *points)]
    return picture("Accuracy after each epoch against seconds", 276, parts)


def draw():
    """The text of each picture, by its path in the repository."""
    pictures = {"04_ddp_torchrun": [ddp_step, two_machines], "05_model_parallel": [fsdp, memory],
                "06_checkpointing": [elastic], "tests": [benchmark], "tests/copies": [log]}
    return {f"{page}/{each.__name__}.svg": each() for page in pictures for each in pictures[page]}


if __name__ == "__main__":
    for path, content in draw().items():
        (ROOT / path).write_text(content, "utf-8")
