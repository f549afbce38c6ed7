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
    "blue": "#cfe3ff #1f6feb #1b3a66 #6ca8ff",
    "orange": "#ffdfb0 #b86a00 #5c3a0a #f0a94a",
    "green": "#c8efd0 #1f883d #17492a #56d07a",
    "red": "#ffd8d3 #cf222e #6b1f1f #ff7b72",
    "grey": "#eaeef2 #8c959f #2a313a #7d8590",
    "wait": "none #6e7781 none #8b949e",
    "words": "#1f2328 none #e6edf3 none",
    "soft": "#59636e none #9ba5b0 none",
}
LIGHT = DARK = ""
for look, colours in LOOKS.items():
    fill, stroke, dark_fill, dark_stroke = colours.split()
    LIGHT += f".{look}{{fill:{fill};stroke:{stroke}}}"
    DARK += f".{look}{{fill:{dark_fill};stroke:{dark_stroke}}}"
FONT = 'system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif'
TIP = '<path class="soft" d="M0 0L8 4L0 8z"/>'
LINES = "polyline{fill:none!important;stroke-width:1.4}"
HEAD = f"""<style>text{{font:13px {FONT}}}
.bold{{font-weight:600}}.wait{{stroke-dasharray:4 3}}.grid{{opacity:.4}}{LIGHT}
@media(prefers-color-scheme:dark){{{DARK}}}{LINES}</style>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
markerUnits="userSpaceOnUse" orient="auto">{TIP}</marker>"""


def picture(statement, height, parts):
    size = f'width="700" height="{height}" viewBox="0 0 700 {height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = f"<title>{statement}</title>"
    return "\n".join([opening, title, HEAD, *parts, "</svg>\n"])


def text(x, y, words, look="words", anchor="start"):
    """Lines of words with their middle at y; x: of their start, middle or end."""
    y += 4.5 - 7.5 * words.count("\n")
    parts = ""
    for n, each in enumerate(words.split("\n")):
        place = f'x="{x:.4g}" y="{y + 15 * n:.4g}" text-anchor="{anchor}"'
        parts += f'<text class="{look}" {place}>{each}</text>'
    return parts


def box(x, y, width, height, look, words=""):
    place = f'x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height}"'
    part = f'<rect class="{look}" {place} rx="3"/>'
    if words:
        part += text(x + width / 2, y + height / 2, words, anchor="middle")
    return part


def square(x, y, look):
    """A point of a curve."""
    return box(x - 5, y - 5, 10, 10, look)


def line(look, *points, arrow=False):
    """A line through points (x, y)."""
    tip = ' marker-end="url(#tip)"' if arrow else ""
    points = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
    return f'<polyline class="{look}" points="{points}"{tip}/>'


def at(value, end=100):
    """The x of a value on an axis from 0 to end."""
    return LEFT + (RIGHT - LEFT) * float(value) / end


def lanes(bottom, plan):
    """Boxes on a time axis.

    The plan is rows of: top height class | name | start end words | ...; with a / for a
    new line in the words.
    """
    parts = [
        line("grey", (LEFT, bottom), (RIGHT + 12, bottom), arrow=True),
        text(RIGHT + 12, bottom + 12, "time", "soft", "end"),
    ]
    for row in plan.replace("/", "\n").split(";"):
        place, name, *boxes = [cell.strip() for cell in row.split("|")]
        top, height, look = place.split()
        top, height = int(top), int(height)
        parts.append(text(6, top + height / 2, name))
        for each in boxes:
            start, end, words = each.split(" ", 2)
            parts.append(box(at(start), top, at(end) - at(start), height, look, words))
    return parts


def table(page, name):
    """The cells, row by row, of the table below the line <!-- name --> of a page."""
    content = (ROOT / page).read_text("utf-8")
    found = re.search(rf"<!-- {name} -->\s*((?:\|.*\n)+)", content)
    if not found:
        raise ValueError(f"{page} has no table below a line <!-- {name} -->")
    rows = found[1].splitlines()[2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def ddp_step():
    parts = lanes(
        236,
        """
    20 44 blue | rank 0 | 0 20 forward:/layers 1-6 | 20 34 backward:/layers 5, 6
        | 34 48 backward:/layers 3, 4 | 48 62 backward:/layers 1, 2
        | 87 99 optimizer/step;
    20 44 wait | | 62 75 wait for/rank 1 | 75 87 wait for/network;
    102 32 orange | all-reduces | 41 53 bucket 0 | 58 70 bucket 1 | 75 87 bucket 2;
    172 44 blue | rank 1,/slower | 0 24 forward:/layers 1-6
        | 24 41 backward:/layers 5, 6 | 41 58 backward:/layers 3, 4
        | 58 75 backward:/layers 1, 2 | 87 99 optimizer/step;
    172 44 wait | | 75 87 wait for/network""",
    )
    same = "equal weights, its own images"
    parts += [
        text(at(35), 87, "gradients", "soft", "end"),
        text(LEFT, 9, same, "soft"),
        text(LEFT, 226, same, "soft"),
        text(RIGHT, 9, "same step: equal weights again", "soft", "end"),
    ]
    # when gradients are ready on rank 0, and on rank 1
    for fast, slow in ((34, 41), (48, 58), (62, 75)):
        x = at(slow) + 2
        parts += [
            line("grey", (at(fast), 65), (x, 101), arrow=True),
            line("grey", (x, 171), (x, 135), arrow=True),
        ]
    title = "DDP: buckets are all-reduced while the backward computes the next"
    return picture(title, 260, parts)


def fsdp():
    parts = lanes(
        258,
        """
    4 20 grey | | 0 39 forward | 39 90 backward;
    32 26 orange | all-gather | 0 5 root | 5 10 1 | 10 15 2 | 19 24 3 | 39 44 3
        | 44 49 2 | 61 66 1;
    63 26 blue | compute | 10 19 block 1 | 19 28 block 2 | 28 37 block 3 | 37 44 loss
        | 44 56 block 3 | 56 68 block 2 | 68 80 block 1 | 91 99 step;
    94 26 orange | reduce-scatter | 56 61 3 | 68 73 2 | 80 85 1 | 85 90 root;
    138 26 green | whole blocks | 10 28 block 2 | 44 68 block 2;
    164 26 green | in memory | 5 19 block 1 | 19 37 block 3 | 39 56 block 3
        | 61 80 block 1;
    194 24 green | root's layers
        | 0 80 embedding and head: whole until the backward has ended;
    222 24 grey | shards
        | 0 99 its part of all parameters, gradients and optimizer states""",
    )
    parts.append(text(at(28) + 6, 151, "← freed", "soft"))
    title = "FSDP: blocks are whole only while they are used, two at most"
    return picture(title, 282, parts)


def memory():
    rows = table("05_model_parallel/README.md", "memory.svg")
    end = 1.12 * max(float(total) for *_, total in rows)
    looks = {"weights": "blue", "gradients": "orange", "optimizer": "green"}
    parts = []
    for n, (way, *cells, total) in enumerate(rows):
        y = 23 + 40 * n
        parts.append(text(6, y, way))
        parts.append(text(at(total, end) + 8, y, f"{float(total):g} GB"))
        below = 0  # the sum of the cells so far
        for cell, (name, look) in zip(cells, looks.items(), strict=True):
            gigabytes = float(cell)
            x = at(below, end)
            below += gigabytes
            width = at(below, end) - x
            words = ""
            if width > 100:
                words = f"{name} {gigabytes:g}"
            elif width > 30:
                words = f"{gigabytes:g}"
            parts.append(box(x, y - 15, width, 30, look, words))
    title = "GB of each rank for 7 billion parameters"
    return picture(title, 8 + 40 * len(rows), parts)


def two_machines():
    parts = []
    for node, x in enumerate((8, 402)):
        parts += [
            box(x, 8, 290, 222, "grey"),
            text(x + 12, 26, f"node {node}: 10.0.0.{node + 1}"),
            box(x + 12, 44, 266, 58, "blue"),
            text(x + 24, 73, f"torchrun\n--node-rank={node}"),
        ]
        for local_rank, middle in enumerate((x + 71, x + 219)):
            rank = 2 * node + local_rank
            parts += [
                line("green", (middle, 158), (middle, 132)),
                line("orange", (middle, 212), (middle, 196), arrow=True),
                box(middle - 59, 158, 118, 36, "blue", f"rank {rank}"),
            ]
    parts += [
        box(168, 50, 106, 46, "green", "store,\nport 29500"),
        line("red", (414, 73), (276, 73), arrow=True),
        line("green", (79, 132), (621, 132)),
        line("green", (221, 132), (221, 98), arrow=True),
        line("orange", (79, 212), (621, 212)),
    ]
    torchrun_address = (
        "--master-addr=10.0.0.1 --master-port=29500\nwith c10d: --rdzv-endpoint"
    )
    rank_address = (
        "MASTER_ADDR, MASTER_PORT: torchrun sets them\n"
        "with c10d: rank 0's host name or --local-addr, a free port"
    )
    interface = (
        "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME:\nthe interface that has 10.0.0.x"
    )
    # the y of a connection, and of its words below the machines
    for number, y, below, look, what, names in (
        ("1", 73, 258, "red", "torchrun connects to the store", torchrun_address),
        ("2", 132, 304, "green", "each rank connects to the store", rank_address),
        ("3", 212, 350, "orange", "ranks exchange data, free ports", interface),
    ):
        parts += [
            box(339, y - 11, 22, 22, look, number),
            box(8, below - 11, 22, 22, look, number),
            text(38, below, what),
            text(274, below, names),
        ]
    title = "Two machines: who connects to whom, and what you set for it"
    return picture(title, 376, parts)


def elastic():
    def point(time, steps):
        return at(time), 250 - 1.2 * steps

    leave, back, resume = point(20, 46), point(20, 32), point(46, 32)
    join, back_again, go_on = point(66, 53), point(66, 43), point(76, 43)
    parts = lanes(
        272,
        """
    34 30 blue | node 0 | 0 20 2 ranks | 46 66 2 ranks | 76 99 2 ranks;
    34 30 wait | | 20 46 30 s for/another node | 66 76 restart;
    70 30 blue | node 1 | 0 20 2 ranks | 76 99 2 ranks;
    70 30 wait | | 66 76 start""",
    )
    for (x, y), event in (
        (leave, "SIGTERM or kill on node 1"),
        (join, "node 1 joins"),
    ):
        parts += [
            text(x, 14, event, "words bold", "middle"),
            line("wait", (x, 24), (x, y)),
        ]
    curve = [point(0, 0), leave, back, resume, join, back_again, go_on, point(99, 99)]
    parts += [
        line("blue", *curve),
        line("red", leave, back, arrow=True),
        line("red", join, back_again, arrow=True),
        text(6, 186, "progress"),
        text(22, 211, "checkpoint"),
        text(at(22), 236, "steps since the last\ncheckpoint are repeated"),
        square(11, 211, "green"),
        square(*point(14, 32), "green"),
        square(*point(56, 43), "green"),
        square(*point(96, 92), "green"),
    ]
    title = "Elastic: a leave or a join costs the steps since a checkpoint"
    return picture(title, 292, parts)


def log():
    """Of .pages/run1.log: five epochs of 06 on MNIST, killed in the third, resumed."""
    printed = (ROOT / ".pages/run1.log").read_text("utf-8")
    parts = [text(6, 184, "epochs")]
    for top, look, name in ((24, "orange", "loss"), (104, "green", "accuracy")):
        row = rf"^epoch (\d)/5  (?:(\d+)%)?.*\b{name} (\S+)"
        values = {}  # by the epochs that are done
        for epoch, percent, value in re.findall(row, printed, re.M):
            values[int(epoch) - 1 + int(percent or 100) / 100] = float(value)
        low, high = min(values.values()), max(values.values())
        points = [
            (at(epochs, 5), top + 60 * (high - value) / (high - low))
            for epochs, value in sorted(values.items())
        ]
        parts += [
            text(6, top + 30, name),
            line(look, *points),
            text(92, top, f"{high:.4g}", "soft", "end"),
            text(92, top + 60, f"{low:.4g}", "soft", "end"),
        ]
    for epoch in range(6):
        parts.append(text(at(epoch, 5), 184, f"{epoch}", "soft", "middle"))
    done = int(re.search(r"^resuming .*'epoch': 3, 'done': (\d+)", printed, re.M)[1])
    x = at(2 + done / 60_000, 5)
    parts.append(line("wait", (x, 16), (x, 170)))
    parts.append(text(x + 8, 20, "killed, and resumed"))
    title = "Loss and accuracy over the epochs of two starts"
    return picture(title, 198, parts)


def benchmark():
    rows = table("tests/benchmark.md", "benchmark.svg")

    def run(column):
        """The seconds and the accuracy in per cent after each epoch of a run."""
        of_run = [row[column : column + 2] for row in rows if row[column]]
        return [(float(seconds), 100 * float(part)) for seconds, part in of_run]

    recipe, ddp = run(1), run(3)
    end = 1.05 * max(seconds for seconds, _ in recipe + ddp)
    low = math.floor(min(accuracy for _, accuracy in recipe + ddp))

    def height(accuracy):
        return 228 - 186 * (accuracy - low) / (100 - low)

    parts = [
        text(RIGHT, 261, "seconds", "soft", "end"),
        text(6, 15, "accuracy", "soft"),
    ]
    for seconds in range(0, int(end), 10 * math.ceil(end / 80)):
        parts.append(text(at(seconds, end), 242, str(seconds), "soft", "middle"))
    for accuracy in range(low, 101):
        y = height(accuracy)
        parts.append(line("grey grid", (LEFT, y), (RIGHT, y)))
        parts.append(text(92, y, f"{accuracy} %", "soft", "end"))
    for x, look, name, results in (
        (110, "blue", "04", ddp),
        (350, "orange", "recipe", recipe),
    ):
        points = [(at(seconds, end), height(accuracy)) for seconds, accuracy in results]
        seconds, accuracy = results[-1]
        parts.append(line(look, *points))
        parts.append(text(x + 10, 15, f"{name}: {accuracy:.2f} % after {seconds:g} s"))
        parts.append(square(x, 15, look))
        parts += [square(*point, look) for point in points]
    return picture("Accuracy after each epoch against seconds", 276, parts)


def draw():
    """The text of each picture, by its path in the repository."""
    return {
        "04_ddp_torchrun/ddp_step.svg": ddp_step(),
        "04_ddp_torchrun/two_machines.svg": two_machines(),
        "05_model_parallel/fsdp.svg": fsdp(),
        "05_model_parallel/memory.svg": memory(),
        "06_checkpointing/elastic.svg": elastic(),
        "tests/benchmark.svg": benchmark(),
        "tests/copies/log.svg": log(),
    }


if __name__ == "__main__":
    for path, content in draw().items():
        (ROOT / path).write_text(content, "utf-8")
