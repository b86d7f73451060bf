"""Before anything imports jax: one cache of compiled steps for all tests and workers, kept from run
to run beside the packages that it belongs to; and LLVM told not to optimise.

Most of what the suite takes is compiling, and a third of that LLVM's optimising of loops that run
for milliseconds. XLA's own passes, and the libraries that multiply, are as ever. What says how a
model or a kernel computes is compiled as users have it all the same: `tests/models/conftest.py`,
`tests/pallas_kernels/cases.py`; so is all that `make soak` serves.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHES = Path(__file__).parents[1] / ".venv" / "test-caches"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHES / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402  (after the environment is set)

# In CI the same examples every time: a new one that fails is for a developer's run to find. Nearly
# the same: Hypothesis also draws constants of the modules that are loaded, which the tests before
# decide. No deadlines anywhere: they measure the machine.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--screenshots: where the console's pictures go."""
    parser.addoption("--screenshots", default="", help="folder for pictures of the console")
