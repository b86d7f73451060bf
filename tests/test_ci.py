"""What CI and make run: CI with a `make` that only says so, make without running it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / ".ci" / "run"
LANES = re.findall(r"[\w-]+", " ".join(re.findall(r"^chain ([\w -]+) &$", RUN.read_text(), re.M)))

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "flock", "make"))), reason="CI runs on Linux"
)


def run(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """.ci/run with a `make` of this Python code, which knows its `target`."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(f"#!{sys.executable}\nimport os, sys\ntarget = sys.argv[-1]\n{script}")
    make.chmod(0o755)
    path = f"{make.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path)}
    command = [tmp_path / ".ci" / "run"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_every_lane_runs_once_and_says_all_that_it_has_to_say_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, "print(*(f'{target} {n}' for n in range(500)), sep='\\n', flush=True)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("environments 0\n")
    for lane in LANES:
        whole = "\n".join(f"{lane} {n}" for n in range(500))
        assert done.stdout.count(f"=== make {lane}\n{whole}\n=== make {lane}: exit status 0") == 1
    assert [*tmp_path.glob("tmp.*")] == []


@pytest.mark.parametrize("lane", [LANES[0], LANES[-1], "environments"])
def test_a_lane_that_fails_is_shown_and_ends_the_run(tmp_path: Path, lane: str) -> None:
    """The other chain too, even if it would run for ever."""
    first = [line.split()[1] for line in RUN.read_text().splitlines() if line.startswith("chain ")]
    waiting = tmp_path / "waits"
    os.mkfifo(waiting)
    # Lanes of the chain that does not fail wait for somebody who never comes.
    other = [name for name in first if (lane in LANES) and name not in chain_of(lane)]
    done = run(
        tmp_path,
        f"if target == {lane!r}:\n    print('it is broken', file=sys.stderr)\n    sys.exit(3)\n"
        f"if target in {other!r}:\n    open({str(waiting)!r}).read()\n",
    )
    assert done.returncode != 0
    assert "it is broken" in done.stdout + done.stderr
    if lane in LANES:
        assert f"=== make {lane}: exit status 3" in done.stdout
    assert "all lanes passed" not in done.stdout
    assert [*tmp_path.glob("tmp.*")] == []


def chain_of(lane: str) -> list[str]:
    chains = [line.split()[1:-1] for line in RUN.read_text().splitlines() if line[:6] == "chain "]
    return next(chain for chain in chains if lane in chain)


def test_lanes_are_those_of_the_makefile_and_of_the_workflow() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(LANES) <= set(targets) and len(set(LANES)) == len(LANES)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    listed = [
        each.strip()
        for found in re.findall(r"target: \[(.*)\]", workflow)
        for each in found.split(",")
    ]
    # `make check` is lint and a part of the tests.
    assert {*LANES, "check"} - {"lint"} == set(listed)


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
