"""The command `jaxserve`: what it has, and what it says of what it has not."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxserve import __version__
from jaxserve.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]


def test_every_command_is_there_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for module, function, _ in COMMANDS.values():
        assert callable(getattr(importlib.import_module(module), function))
    assert main(["--help"]) == 0
    assert re.findall(r"^  ([\w-]+)  ", capsys.readouterr().out, re.M) == [*COMMANDS]


def test_what_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulat", "--rate=3"]) == 2
    wrong, where = capsys.readouterr().err.splitlines()
    assert wrong == "jaxserve: there is no command 'simulat'; did you mean simulate?"
    assert where == "jaxserve --help says what there is"
    assert main(["compile_check"]) == 2
    assert "did you mean compile-check?" in capsys.readouterr().err
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: jaxserve COMMAND")


def test_the_installed_script_and_the_module_are_one_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["jaxserve"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    command = [sys.executable, "-m", "jaxserve", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"jaxserve {__version__}\n"
