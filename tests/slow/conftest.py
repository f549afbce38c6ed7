"""What the slow tests share: all have the mark slow, and some need two hosts."""

import pytest
from hosts import Hosts


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "slow":
            item.add_marker("slow")


@pytest.fixture(scope="session")
def hosts():
    hosts = Hosts()
    yield hosts
    hosts.end()
