"""Journals for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import NewLine, Position

ROOM = 2**30
START: Mapping[str, Position] = {}


def lines(count: int, first: int = 0) -> list[NewLine]:
    return [NewLine(f"request {number}") for number in range(first, first + count)]


@contextmanager
def opened(directory: Path, **options) -> Iterator[Journal]:
    options = {"max_bytes": ROOM, **options}
    journal = Journal(directory, **options)
    try:
        yield journal
    finally:
        journal.close()
