"""The trainer is a folder of scripts, not a package: make its modules importable here."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "tiny_model"))


@pytest.fixture(scope="session")
def asset() -> Path:
    """The folder of the shipped checkpoint."""
    return ROOT / "jaxserve" / "assets" / "tiny-stories"
