"""Replicas set up the process' logging."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.logging_kept import logging_kept


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """As it was before each test."""
    with logging_kept():
        yield
