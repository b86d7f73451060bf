"""The command `jaxserve`: what it has, and what it says of what it has not."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

from jaxserve import __version__
from jaxserve.bench.cli import LAB_COMMANDS, MEASURED
from jaxserve.commands.cli import COMMANDS, main
from jaxserve.extras import LAB

ROOT = Path(__file__).parents[1]


def test_every_command_is_there_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for module, function, _ in COMMANDS.values():
        assert callable(getattr(importlib.import_module(module), function))
    assert main(["--help"]) == 0
    assert re.findall(r"^  ([\w-]+)  ", capsys.readouterr().out, re.M) == [*COMMANDS]


class _NoLab(MetaPathFinder):
    """Stands where nothing finds the lab."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == LAB:
            raise ModuleNotFoundError(f"No module named {LAB!r}", name=LAB)


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == LAB]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoLab(), *sys.meta_path])


@pytest.mark.parametrize("command", ["compile-check", *(f"bench {name}" for name in LAB_COMMANDS)])
def test_without_the_lab_its_commands_say_what_to_install(
    command: str, no_lab: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 1
    where, _, what = f"jaxserve {command}".rpartition(" ")
    begin = f"{where}: {what}" if "bench" in command else f"{where} {what}"
    assert capsys.readouterr().err == (
        f"{begin} needs the lab, which is not installed (no module jaxserve_lab): install "
        "jaxserve-llm with its extra lab\n"
    )


def test_without_the_lab_the_bench_still_lists_its_commands(
    no_lab: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--help"])
    assert caught.value.code == 0
    _, _, listed = capsys.readouterr().out.partition("COMMAND\n    ")
    commands = listed.partition("\n\n")[0].split("\n    ")
    named = [each for each in commands if each.strip() and not each.startswith(" ")]
    assert [each.split()[0] for each in named] == [*MEASURED, *LAB_COMMANDS]
    assert listed.count("(lab)") == len(LAB_COMMANDS)


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
