"""Kill the rank KILLED when it asks for the rate of its eighth step."""

import os
import signal


def change(script, rank):
    factor, fractions = script.warmup_then_decay, set()

    def warmup_then_decay(fraction):
        fractions.add(fraction)  # each group of parameters asks
        if os.environ.get("KILLED") == str(rank) and len(fractions) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return factor(fraction)

    script.warmup_then_decay = warmup_then_decay
