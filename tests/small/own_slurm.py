"""07 with the change that CHANGE names, or what another script might do."""

import os
import sys
import time

sys.path.insert(0, "07_slurm")
import train


def slow_saves():
    """As long as there is a file `slow saves`."""
    save_file = train.save_file

    def save(content, path):
        if os.path.exists("slow saves"):
            time.sleep(55)
        save_file(content, path)

    train.save_file = save


def error_after_an_epoch():
    train.evaluate = None


def half_a_file():
    os.makedirs("run.pt", exist_ok=True)
    open("run.pt/1.pt.tmp", "w").close()
    sys.exit(1)


def early_stopping():
    open("run.pt", "w").close()
    print("stopped at epoch 5: no improvement")
    sys.exit()


globals()[os.environ["CHANGE"]]()
train.main()
