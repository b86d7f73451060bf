"""A process that has to end does, whoever does not read what it says."""

from __future__ import annotations

import os
import threading

import pytest

from jaxserve.hosts import process_exit

from .peers import TIMEOUT


def test_nobody_who_does_not_read_the_log_keeps_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, codes, written = threading.Event(), list[int](), list[bool]()
    monkeypatch.setattr(
        process_exit.logging, "shutdown", lambda: written.append(read.wait(TIMEOUT))
    )
    monkeypatch.setattr(process_exit, "_WRITE_S", 0.05)
    monkeypatch.setattr(os, "_exit", codes.append)
    process_exit.end_process(3)
    assert codes == [3] and not written
    read.set()
