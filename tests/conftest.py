"""Launch files run in the background, two at a time, from the start of the tests.

A test with the mark launch("NN_folder", option, ..., setting=...) gets its Launch as `launched`.
"""

import contextlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.checks import Launch
from helpers.projects import copy_repository

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks torch; all commands inherit it
torch.set_num_threads(1)  # two threads wait for each other where other processes use the cores


def pytest_collection_modifyitems(items):
    """The tests that wait for a Launch come last."""
    items.sort(key=lambda test: test.get_closest_marker("launch") is not None)


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """A copy of this repository with few digits, in a path with a space."""
    return copy_repository(tmp_path_factory.mktemp("repository") / "a copy")


@pytest.fixture(scope="session", autouse=True)
def launches(request, tmp_path_factory):
    """The Launches of the chosen tests by test, as futures."""
    marks = {test.nodeid: test.get_closest_marker("launch") for test in request.session.items}
    marks = {test: mark for test, mark in marks.items() if mark}
    repository = marks and request.getfixturevalue("repository")
    places = tmp_path_factory.mktemp("launches")
    running = []

    def run(number, mark):
        launch = Launch(places / str(number), repository, *mark.args, **mark.kwargs)
        running.append(launch)
        with contextlib.suppress(subprocess.TimeoutExpired):  # then the test fails, with its output
            launch.process.wait(timeout=300)
        return launch

    with ThreadPoolExecutor(2) as pool:
        yield {test: pool.submit(run, number, marks[test]) for number, test in enumerate(marks)}
        pool.shutdown(wait=False, cancel_futures=True)
        for each in running:
            each.kill_all()


@pytest.fixture
def launched(request, launches):
    return launches[request.node.nodeid].result()
