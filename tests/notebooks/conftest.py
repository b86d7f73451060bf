from __future__ import annotations

import email
from pathlib import Path

import pytest

from tests.compiling import CACHES
from tests.notebooks.books import NAMES, first_cell, foreign, installed_by
from tests.notebooks.packages import clone, install

# Refused, as if they were not installed.
REFUSE = """
class _Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: no cell installs it", name=name)
sys.meta_path.insert(0, _Refuse())
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with the package from a wheel, built once for all tests."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(clone(folder / "source"), folder / "site")


@pytest.fixture(scope="session")
def requirements(wheel: Path) -> list[str]:
    """The wheel's, with its extras."""
    (metadata,) = wheel.glob("jaxserve_llm-*.dist-info/METADATA")
    return email.message_from_string(metadata.read_text()).get_all("Requires-Dist", [])


@pytest.fixture
def elsewhere(
    wheel: Path,
    requirements: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """An empty folder for a notebook's kernel, which has the package from a wheel, and besides only
    what the first cell of the test's NOTEBOOK installs."""
    assert request.module.NOTEBOOK in NAMES
    refused = foreign(installed_by(first_cell(request.module.NOTEBOOK), requirements))
    site = tmp_path / "site"
    site.mkdir()
    own = (wheel / "sitecustomize.py").read_text()
    (site / "sitecustomize.py").write_text(own + REFUSE.format(refused=refused))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{wheel}")
    # The engine keeps compiled steps in the home directory; a test with its own caches.
    home = CACHES / "home"
    home.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    empty = tmp_path / "empty"
    empty.mkdir()
    return empty
