"""What the slow tests share: all of them have the mark slow, and some need two hosts."""

import os
import subprocess
from pathlib import Path

import pytest
from hosts import Hosts


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slow")


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Two separate hosts; tests that need them are skipped on machines that do not allow it."""
    try:
        hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    except OSError as error:
        pytest.skip(f"no separate hosts on this machine: {error}")
    yield hosts
    hosts.end()


@pytest.fixture
def unshare():
    """The command before one that may mount disks, and change the name of its machine."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", "--mount", "--uts", *user]
    if subprocess.run([*command, "mount", "-t", "tmpfs", "none", "/mnt"]).returncode:
        pytest.skip("no namespaces on this machine")
    return command
