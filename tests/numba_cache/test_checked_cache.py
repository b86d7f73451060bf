"""numba's compiled code on disk: found again, checked, and made anew where it is damaged."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from jaxserve.numba_cache.checked_cache import KEPT
from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.simulator.compiled import code_cache, kernel


def times(factor: int) -> Any:
    def function(number: int) -> int:
        return factor * number

    return function


def compiled(factor: int, name: str = "times") -> tuple[int, int]:
    """7 times the factor, and how often its code was found on disk."""
    address = numba_ffi._compiled(times(factor), name)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)
    return call(7), numba_ffi._kept[-1].cache_hits


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_code_is_found_again_by_the_values_that_it_closes_over(folder: Path) -> None:
    assert compiled(2) == (14, 0)
    assert compiled(3) == (21, 0)
    assert compiled(2) == (14, 1)
    assert compiled(3) == (21, 1)
    before = files(folder)
    assert compiled(2, "other") == (14, 0)
    assert len(files(folder) - before) == 1, "what it writes is its own"


def zero(content: bytes, first: int, count: int) -> bytes:
    return content[:first] + bytes(count) + content[first + count :]


@pytest.mark.promise(33)
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: bytes(len(content)),
        lambda content: b"\x80" + content[1:],
        lambda content: zero(content, len(content) // 2, len(content) // 8),
    ],
)
def test_what_is_damaged_is_compiled_anew_and_kept(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    """Before pickle or LLVM sees it. The file is named."""
    assert compiled(2) == (14, 0)
    (path,) = files(folder)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert compiled(2) == (14, 0)
    assert f"{path} is damaged" in caplog.text
    caplog.clear()
    assert compiled(2) == (14, 1)
    assert files(folder) == {path} and not caplog.text


def test_one_file_in_the_place_of_another_is_damaged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(2)
    (path,) = files(folder)
    compiled(3)
    (other,) = files(folder) - {path}
    other.write_bytes(path.read_bytes())
    assert compiled(3) == (21, 0)
    assert f"{other} is damaged" in caplog.text


def test_what_cannot_be_kept_is_compiled_and_said(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a file that cannot be read, no folder that can be written."""
    assert compiled(2) == (14, 0)
    (path,) = files(folder)
    replace = os.replace

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert compiled(3) == (21, 0)
        assert "is compiled at each start" in caplog.text and "No space left" in caplog.text
    assert os.replace is replace and files(folder) == {path}, "nothing is left behind"
    path.unlink()
    path.mkdir()
    caplog.clear()
    assert compiled(2) == (14, 0)
    assert str(path) in caplog.text
    path.rmdir()
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    caplog.clear()
    assert compiled(2) == (14, 0)
    assert "times" in caplog.text and "is compiled at each start" in caplog.text


def test_what_killed_processes_and_older_code_left_does_not_pile_up(folder: Path) -> None:
    compiled(2)
    (path,) = files(folder)
    stem = path.name.rsplit(".", 2)[0]
    for number in range(KEPT + 3):
        left = path.with_name(f"{stem}.{number:016x}.nbc.tmp.0123")
        left.write_bytes(b"half")
        os.utime(left, (number, number))
    assert compiled(3) == (21, 0)
    assert len(files(folder)) == KEPT
    assert compiled(2) == (14, 1) and compiled(3) == (21, 1)


def tiny(world: Any, rules: Any, costs: Any, key: Any, until: int) -> int:
    return until + world


def test_so_is_the_compiled_simulation(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "serve", tiny)
    monkeypatch.setattr(code_cache, "_held", [])
    key, told, numbers = kernel.compiled_key(lambda r: 0.0), list[int](), (5, 0, 0)
    for damaged in (False, True):
        if damaged:
            (path,) = folder.rglob("*.nbc")
            path.write_bytes(zero(path.read_bytes(), 2000, 4000))
        monkeypatch.setattr(kernel, "_serves", {})
        serve = kernel.compiled_serve(*numbers, lambda: told.append(1))  # type: ignore[arg-type]
        assert serve(*numbers, key, 2) == 7
    assert told == [1, 1] and f"{path} is damaged" in caplog.text


def test_others_may_read_what_one_has_compiled(folder: Path) -> None:
    """As far as the process lets them: a folder may be shared."""
    before = os.umask(0o022)
    try:
        compiled(2)
    finally:
        os.umask(before)
    (path,) = files(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
