from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.engine.engine import Engine
from tests.engine.harness import engine, write_shape


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    return {family: write_shape(folder, family) for family in ("opt", "llama")}


@pytest.fixture(scope="module")
def roomy(shapes: dict[str, Path]) -> Iterator[Engine]:
    """An OPT engine with memory for everything, shared by a module's tests."""
    with engine(shapes["opt"], scheduler__max_rows=32) as running:
        yield running
