"""What tests of several files share."""

import pytest
from hosts import Hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Two hosts that are really separate; where the machine does not allow that, what needs them is skipped."""
    try:
        hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    except OSError as error:
        pytest.skip(f"no separate hosts on this machine: {error}")
    yield hosts
    hosts.end()
