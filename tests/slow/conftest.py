"""What the slow tests share: all of them have the mark slow, and some need two hosts."""

from pathlib import Path

import pytest
from hosts import Hosts

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
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
