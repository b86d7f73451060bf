"""Before anything imports jax: how tests compile. Then which examples Hypothesis takes, and what
the garbage collector goes through."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import tests.compiling  # noqa: F401  isort: skip

import pytest
from hypothesis import settings

# In CI the same examples every time: a new one that fails is for a developer's run to find. Nearly
# the same: Hypothesis also draws constants of the modules that are loaded, which the tests before
# decide. No deadlines anywhere: they measure the machine.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: a million objects, through all of which the garbage
    collector would go again and again, meanwhile and later. Later it comes seldom: tracing a step
    makes hundreds of thousands of objects, and each time jax looks for garbage of its own, too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


# The simulator's compiled loop takes most of a minute to compile, and whoever else needs it waits.
FIRST = "tests/simulator/compiled/test_compiled.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Its own tests come first: while they compile it, another worker runs what does not need
    it."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_addoption(parser: pytest.Parser) -> None:
    """--screenshots: where the console's pictures go."""
    parser.addoption("--screenshots", default="", help="folder for pictures of the console")
