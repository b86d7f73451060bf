"""What numba compiles is counted as it does, and what it finds is not."""

from __future__ import annotations

import logging
import threading

import numba
import pytest

from jaxserve import progress
from jaxserve.engine.startup import build
from jaxserve.numba_cache.compile_count import counted
from jaxserve.progress import Show

PATIENCE = 20.0


def test_each_function_counts_once_it_is_compiled() -> None:
    @numba.njit
    def inner(number: int) -> int:
        return number + 1

    @numba.njit
    def outer(number: int) -> int:
        return 2 * inner(number)

    told: list[int] = []
    with counted(told.append):
        assert told == []
        assert outer(3) == 8
        assert told == [1, 2]
        assert outer(4) == 10
    assert told == [1, 2]
    assert inner(1.5) == 2.5
    assert told == [1, 2], "nobody is told any more"


def test_a_start_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While its first step waits for its kernels."""
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    caplog.set_level(logging.INFO, progress.log.name)
    function = numba.njit(lambda number: number + 1)
    wanted = "compiling: 0 of 2 steps, 1 kernel functions after "

    seen = threading.Event()

    def note(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith(wanted):
            seen.set()
        return True

    monkeypatch.setattr(progress.log, "filters", [note])
    for piece in build._compiling(Show.LINES, kernels=True)([0, 1]):
        if piece == 0:
            function(1)
            assert seen.wait(PATIENCE)
    with_none = build._compiling(Show.NOTHING, kernels=False)
    assert list(with_none([0, 1])) == [0, 1]
