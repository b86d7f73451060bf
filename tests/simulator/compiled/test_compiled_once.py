"""The compiled simulation's code on disk: made once, said once, and removed when it is old."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from jaxserve.file_lock import lock
from jaxserve.simulator import simulator
from jaxserve.simulator.compiled import code_cache, kernel
from jaxserve.simulator.dispatch import COMPILING
from jaxserve.simulator.settings import RunOptions
from jaxserve.simulator.simulate.cli import main
from jaxserve.simulator.simulate.runs import Outcome, Run
from jaxserve.simulator.simulate.workers import Workers


def tiny(world: Any, rules: Any, costs: Any, key: Any, until: int) -> int:
    return until + world


def test_only_what_is_compiled_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "serve", tiny)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(code_cache, "_held", [])
    told: list[int] = []
    for times in (1, 1):  # compiled, then read
        monkeypatch.setattr(kernel, "_serves", {})
        numbers: Any = (5, 0, 0)
        serve = kernel.compiled_serve(*numbers, lambda: told.append(1))
        assert kernel.compiled_serve(*numbers, lambda: told.append(2)) is serve
        assert serve(5, 0, 0, kernel.compiled_key(lambda r: 0.0), 2) == 7
        assert told == [1] * times
    (folder,) = tmp_path.iterdir()
    assert not code_cache.is_empty(folder)
    assert lock(folder / "used.lock") is None, "in use"
    assert str(tmp_path) == numba.config.CACHE_DIR


def folder_of(parent: Path, number: int) -> Path:
    """Used `number` seconds after 1970."""
    folder = parent / f"{number:016x}"
    (folder / "loop").mkdir(parents=True)
    (folder / "loop" / "serve.nbc").write_text("")
    (folder / "used.lock").write_text("")
    os.utime(folder, (number, number))
    return folder


def test_the_latest_stay_and_those_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "_held", [])
    folders = [folder_of(tmp_path, number) for number in range(1, code_cache.KEPT + 4)]
    used, busy, *others = folders
    assert code_cache.use(used)
    theirs = lock(busy / "used.lock", shared=True)
    strange = [tmp_path / "0123456789abcdef", tmp_path / "notes"]
    for folder in strange:
        folder.mkdir()
        (folder / "mine.txt").write_text("")
        os.utime(folder, (0, 0))
    code_cache.remove_old(used)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {path.name for path in (used, busy, *strange, *others[1 - code_cache.KEPT :])}
    assert theirs is not None
    theirs.close()
    code_cache.remove_old(used)
    assert not busy.exists()


def test_a_folder_that_is_being_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "_held", [])
    folder, tries = tmp_path / "one", []

    def vanishing(path: Path, **how: bool) -> Any:
        tries.append(path)
        if len(tries) == 1:
            folder.rmdir()
        return lock(path, **how)

    monkeypatch.setattr(code_cache, "lock", vanishing)
    assert code_cache.use(folder)
    assert len(tries) == 2 and (folder / "used.lock").exists()


def test_the_command_says_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate = simulator.simulate

    def compiles(*args: Any, run: RunOptions, **options: Any) -> Any:
        assert run.compiling is not None
        run.compiling()
        return simulate(*args, run=run, **options)

    monkeypatch.setattr(simulator, "simulate", compiles)
    assert main(["--policy=aptserve", "--workload=fixed:64x8x5", "--seeds=1"]) == 0
    assert capsys.readouterr().err.splitlines() == [COMPILING]


class Compiling(Run):
    """In a process of its own."""

    requests = math.inf  # type: ignore[assignment]

    def outcome(self, progress: Any = None, compiling: Any = None) -> Outcome:
        compiling()
        return Outcome({}, 1, False, np.zeros(0, bool), float("inf"), None)


def test_processes_say_it_together(capsys: pytest.CaptureFixture[str]) -> None:
    given: list[Any] = [None] * 13
    with Workers(2) as workers:
        assert len(workers.outcomes([Compiling(*given)] * 2)) == 2
    assert set(capsys.readouterr().err.splitlines()) == {COMPILING}
