"""Where a run of 07 or fsdp.py was stopped, and where it was resumed, by its log."""

import re

LINE = re.compile(
    # fsdp.py resumes from a folder, which has the place in its name
    r"^(stopped at|resuming from) .*?epoch\D+(\d+)\D+done\D+(\d+)\b"
    r".*(?:; rerun the same command to resume|on 2 ranks)$",
    re.M,
)


def stopped_and_resumed(log):
    """Two lists, which are equal if nothing was lost: the epoch and the images done."""
    places = {"stopped at": [], "resuming from": []}
    for word, epoch, done in LINE.findall(log):
        places[word].append((int(epoch), int(done)))
    return places["stopped at"], places["resuming from"]
