"""What make runs, as far as a user waits for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_the_minute_that_the_first_installation_takes_shows_what_it_does() -> None:
    """Everything is out of date, and nothing is run."""
    command = ["make", "--dry-run", "--always-make", "serve"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (install,) = (line for line in done.stdout.splitlines() if "pip install" in line)
    assert "--quiet" not in install and "-q" not in install.split()
