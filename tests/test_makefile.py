"""What make runs, as far as a user waits for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def test_the_minute_that_the_first_installation_takes_shows_what_it_does() -> None:
    """Everything is out of date, and nothing is run."""
    command = ["make", "--dry-run", "--always-make", "serve"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (install,) = (line for line in done.stdout.splitlines() if "pip install" in line)
    assert "--quiet" not in install and "-q" not in install.split()


def test_what_python_compiles_is_kept_even_where_it_is_told_not_to() -> None:
    """It is installed without bytecode."""
    command = ["make", "-f", "Makefile", "-f", "-", "show"]
    told = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    rule = "show: ; @env"
    done = subprocess.run(
        command, cwd=ROOT, env=told, input=rule, capture_output=True, text=True, check=True
    )
    assert "PATH=" in done.stdout and "PYTHONDONTWRITEBYTECODE" not in done.stdout


def test_another_python_has_environments_of_its_own(tmp_path: Path) -> None:
    """Whatever it is called; one that does not run is not taken for 3.11."""
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.12\n")
    other.chmod(0o755)
    for name, folder in (
        ("python3.11", ".venv"),
        (str(other), ".venv-3.12"),
        (str(tmp_path / "python3.12"), ".venv-python3.12"),
    ):
        command = ["make", "--dry-run", "test", "compile-check", f"PYTHON={name}"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert f"\n{folder}/bin/python -m pytest" in f"\n{said}"
        assert f"\n{folder.replace('.venv', '.venv-compile')}/bin/python -m jaxserve" in said


def test_without_python_3_12_its_tests_do_not_pass() -> None:
    command = ["make", "test-py312", "PYTHON312="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "there is no Python 3.12 here: install one" in done.stderr
