"""Before anything imports jax: how tests compile. Then which examples Hypothesis takes."""

from __future__ import annotations

import os

import tests.compiling  # noqa: F401  isort: skip

import pytest
from hypothesis import settings

# In CI the same examples every time: a new one that fails is for a developer's run to find. Nearly
# the same: Hypothesis also draws constants of the modules that are loaded, which the tests before
# decide. No deadlines anywhere: they measure the machine.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--screenshots: where the console's pictures go."""
    parser.addoption("--screenshots", default="", help="folder for pictures of the console")
