"""In place of a training, 03 tries whether another address reaches the store."""

import errno
import os
import sys
from pathlib import Path

import torch


def change(script, rank):
    main, port = script.main, os.environ["MASTER_PORT"]
    addresses, file = ["127.0.0.1"], Path("/proc/net/if_inet6")
    if file.exists() and "0" * 31 + "1 " in file.read_text():  # this machine has ::1
        addresses.append("::1")

    def spawn(*given):
        """127.0.0.2 is this machine, too, and reaches what listens everywhere."""
        script.socket.create_connection((sys.argv[-1], port)).close()
        with script.socket.socket() as other:
            code = other.connect_ex(("127.0.0.2", int(port)))
        print(errno.errorcode.get(code, f"--master-addr {sys.argv[-1]}: connected"))

    def mains():
        for address in addresses:
            sys.argv[1:] = ["--master-port", port, "--master-addr", address]
            main()

    torch.multiprocessing.spawn, script.main = spawn, mains
