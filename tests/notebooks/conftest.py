from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.packages import clone, install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with the package from a wheel, built once for all tests."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(clone(folder / "source"), folder / "site")


@pytest.fixture
def elsewhere(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for a notebook's kernel, which has the package from a wheel."""
    monkeypatch.setenv("PYTHONPATH", str(wheel))
    empty = tmp_path / "empty"
    empty.mkdir()
    return empty
