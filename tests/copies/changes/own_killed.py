"""Six epochs; the rank KILLED is killed when the fourth is evaluated."""

import os
import signal


def change(script, rank):
    script.EPOCHS = 6
    validate, calls = script.validate, []

    def validate_or_end(*given):
        calls.append(given)
        if os.environ.get("KILLED") == str(rank) and len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return validate(*given)

    script.validate = validate_or_end
