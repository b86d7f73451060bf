"""How far work is: what is said of it, and where."""

from __future__ import annotations

import io
import logging
import sys
import threading

import pytest

from jaxserve import progress
from jaxserve.progress import Show, shown

PATIENCE = 20.0


class Seen(logging.Handler):
    """Says when a line has come."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.came.set()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Seen:
    handler = Seen()
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    monkeypatch.setattr(progress.log, "handlers", [handler])
    caplog.set_level(logging.INFO, progress.log.name)  # loggers keep what they once found enabled
    return handler


def test_long_work_has_a_line_every_so_often(
    seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    for piece in shown(Show.LINES, "compiling", "step", work=iter(range(3))):
        if piece == 1:
            seen.came.clear()
            assert seen.came.wait(PATIENCE), "nothing is said while one piece takes long"
    assert seen.lines[-1].startswith("compiling: ") and " of 3 steps after 0 s" in seen.lines[-1]
    assert "compiling: 1 of 3 steps after 0 s" in seen.lines
    assert capsys.readouterr().err == "", "a bar is drawn"
    assert not any(thread.name == "jaxserve-progress" for thread in threading.enumerate())


def test_where_there_is_no_log_the_lines_are_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    came = threading.Event()

    class Notebook(io.StringIO):
        def flush(self) -> None:
            came.set()

    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    monkeypatch.setattr(sys, "stderr", told := Notebook())
    for _ in shown(Show.where_wanted(True), "compiling", "step", work=[1]):
        assert came.wait(PATIENCE)
    assert told.getvalue().startswith("compiling: 0 of 1 steps after 0 s\n")
    monkeypatch.setattr(sys, "stderr", None)
    assert Show.where_wanted(True) is Show.LINES


def test_a_long_piece_may_say_what_it_does(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of which nobody knows how much there is."""
    steps = shown(Show.LINES, "compiling", "step", work=range(3))
    for piece in steps:
        if piece == 0:
            steps.set_postfix_str("7 kernel functions")
            seen.lines.clear()
            seen.came.clear()
            assert seen.came.wait(PATIENCE)
    assert "compiling: 0 of 3 steps, 7 kernel functions after 0 s" in seen.lines
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = shown(Show.BAR, "compiling", "step", work=range(3))
    for piece in bar:
        if piece == 0:
            bar.set_postfix_str("7 kernel functions")
            assert "0/3" in (said := capsys.readouterr().err.rpartition("\r")[2])
            assert "7 kernel functions" in said


def test_bytes_are_told_in_mib(seen: Seen) -> None:
    with shown(Show.LINES, "weights", "B", total=5 << 20) as bar:
        bar.update(2 << 20)
        seen.came.clear()
        assert seen.came.wait(PATIENCE)
    assert "weights: 2 of 5 MiB after 0 s" in seen.lines


def test_work_that_fails_leaves_no_thread(seen: Seen) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in shown(Show.LINES, "compiling", "step", work=[1]):
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), shown(Show.LINES, "weights", "B", total=1):
        raise ZeroDivisionError
    assert not any(thread.name == "jaxserve-progress" for thread in threading.enumerate())


def test_a_bar_is_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Show.where_wanted(True) is Show.LINES
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert (Show.where_wanted(True), Show.where_wanted(True, lines=True)) == (Show.BAR, Show.LINES)
    assert Show.where_wanted(False, lines=True) is Show.NOTHING
    assert list(shown(Show.NOTHING, "compiling", "step", work=[1, 2])) == [1, 2]
    assert capsys.readouterr().err == ""
    assert list(shown(Show.BAR, "compiling", "step", work=[1, 2])) == [1, 2]
    assert "compiling: 100%" in capsys.readouterr().err
