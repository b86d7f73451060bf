"""The command `jaxserve`: what it has, and that all of its commands are equally brief about a wrong
command line."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

from jaxserve import __version__
from jaxserve.bench import cli as bench
from jaxserve.bench.cli import LAB_COMMANDS, MEASURED
from jaxserve.client import cli as client
from jaxserve.command_line import Parser, exit_code, run
from jaxserve.commands import keys, policies
from jaxserve.commands.cli import COMMANDS, main
from jaxserve.extras import LAB
from jaxserve.simulator.advise import cli as advise
from jaxserve.simulator.optimal import cli as optimal
from jaxserve.simulator.simulate import cli as simulate

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


PACKAGES = (ROOT / "jaxserve", ROOT / "lab" / "jaxserve_lab")
MODULES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


@pytest.mark.parametrize(
    ("main", "name", "flag"),
    [
        (client.complete, "complete", "--file"),
        (client.batch, "batch", "--out"),
        (policies.main, "policies", "--jsn"),
        (simulate.main, "simulate", "--rat=3"),
        (advise.main, "advise", "--rat=3"),
        (bench.main, "bench load", "--rate=x"),
        (bench.main, "bench plan", "--repetes=x"),
    ],
)
def test_what_is_wrong_is_said_in_two_lines(
    main: object, name: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    with pytest.raises(SystemExit) as caught:
        main([*name.split()[1:], flag])
    assert caught.value.code == 2
    out, error = capsys.readouterr()
    wrong, where = error.splitlines()
    assert out == "" and wrong.startswith(f"jaxserve {name}: ")
    assert flag.partition("=")[0] in wrong
    assert where == f"jaxserve {name} --help says what there is"


@pytest.mark.parametrize(
    ("main", "argv", "meant"),
    [
        (simulate.main, ["--workload=alpaca", "--slo-ttft=9"], "--slo_ttft_ms"),
        (keys.main, ["new", "me", "--concurency=3"], "--concurrency"),
        (bench.main, ["throughput", "--num-request=3"], "--num_requests"),
        (bench.main, ["mixed", "--polices=sarathi"], "--policies"),
    ],
)
def test_the_flag_that_is_meant_is_named(
    main: Callable[[Sequence[str]], int],
    argv: list[str],
    meant: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        assert main(argv) == 2
    except SystemExit as end:
        assert end.code == 2
    assert f"; did you mean {meant}?" in capsys.readouterr().err


def test_dashes_do_for_underscores(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = Parser(prog="x")
    parser.add_argument("--num_rows", type=int)
    parser.add_argument("prompt", nargs="?")
    assert parser.parse_args(["--num-rows", "3"]).num_rows == 3
    assert parser.parse_args(["--num-rows=3", "--", "--num-rows"]).prompt == "--num-rows"
    monkeypatch.setattr(sys, "argv", ["x", "--num-rows=4"])
    assert parser.parse_args().num_rows == 4


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("x"), 2), (FileNotFoundError("x"), 2), (RuntimeError("x"), 1), (OSError("x"), 1)],
)
def test_the_code_says_whether_another_command_line_is_needed(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_the_description_is_shown_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="python -m jaxserve.x", description="First.\n\n    indented  text")
    assert "\n    indented  text\n" in told(parser.parse_args, ["--help"], capsys)


def told(main: Callable[[Sequence[str]], int], argv: list[str], capsys: Any) -> str:
    """What a command prints that ends well at once."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    return str(capsys.readouterr().out)


def test_every_command_of_the_bench_is_listed_and_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = told(bench.main, ["--help"], capsys)
    for command in (*bench.LAB_COMMANDS, *bench.MEASURED):
        assert re.search(rf"^    {command}\s+\w", listed, re.MULTILINE), command
        text = told(bench.main, [command, "--help"], capsys)
        assert text.startswith(f"usage: jaxserve bench {command} ")
        assert "show this help message and exit" in text


@pytest.mark.parametrize(
    "main",
    [
        *(advise.main, client.batch, client.complete, keys.main),
        *(optimal.main, policies.main, simulate.main),
    ],
)
def test_every_command_explains_its_flags(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--version" in told(main, ["--help"], capsys)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(policies.main, ["--version"], capsys) == f"jaxserve {__version__}\n"


def test_no_command_has_another_parser() -> None:
    others = []
    for path in MODULES:
        if "argparse.ArgumentParser" in (text := path.read_text()):
            called = [n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
            if "argparse.ArgumentParser" in map(ast.unparse, called):
                others.append(path.relative_to(ROOT))
    assert others == []


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("Parser(prog='x').parse_args(['--help'])", 141),
        ("print('text ' * 20_000) or 3", 141),  # more than is kept before it is written
        ("3", 3),
    ],
)
def test_output_that_nobody_reads_is_no_trouble(command: str, code: int) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from jaxserve.command_line import Parser, run; run(lambda: {command})",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == code


def test_no_output_from_the_start_is_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
    with pytest.raises(SystemExit) as caught:
        run(lambda: 0)
    assert caught.value.code == 0


OWN_CALLERS = {
    "lab/jaxserve_lab/bench/stress/crowd.py",
    "lab/jaxserve_lab/bench/stress/faulty_server.py",
    "lab/jaxserve_lab/bench/frontend_client.py",
    "jaxserve/server/requests/templates/template_worker.py",
    "jaxserve/engine/text/grammar_worker.py",
}
"""Processes of other commands' own."""


def test_every_command_is_run_so() -> None:
    others = set()
    for path in (ROOT / "serve.py", *MODULES):
        source = path.read_text()
        for node in ast.parse(source).body if "__main__" in source else ():
            text = ast.unparse(node)
            if text.startswith("if __name__ ==") and not re.search(
                r"^    (run|signal|entry_point)", text, re.M
            ):
                others.add(str(path.relative_to(ROOT)))
    assert others == OWN_CALLERS
