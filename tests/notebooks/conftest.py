from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.packages import clone, install


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for a notebook's kernel, which has the package from a wheel."""
    site = install(clone(tmp_path / "source"), tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(site))
    empty = tmp_path / "empty"
    empty.mkdir()
    return empty
