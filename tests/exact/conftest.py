from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxserve.engine.engine import Engine
from tests.engine.drafts.conftest import eager, proposing
from tests.engine.harness import engine, wait_until_idle
from tests.exact.kinds import KINDS, write
from tests.exact.questions import Question, alone, questions

__all__ = ["eager", "proposing"]


class Quiet(NamedTuple):
    """An engine of a kind, and what it answers to each of `asked` alone."""

    engine: Engine
    path: Path
    fields: dict[str, Any]
    asked: list[Question]
    answers: list[Any]


Quietly = Callable[[str], Quiet]
FIELDS: dict[str, Any] = {
    "scheduler__max_rows": 8,
    "engine__row_buckets": (1, 8),
    "engine__token_buckets": (16, 64),
}


@pytest.fixture(scope="package")
def quietly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quietly]:
    """One engine a kind, shared by all tests."""
    with ExitStack() as running:

        @cache
        def of_kind(kind: str) -> Quiet:
            model, more = KINDS[kind]
            path, fields = write(tmp_path_factory.mktemp("kind"), model), {**FIELDS, **more}
            on, asked = running.enter_context(engine(path, **fields)), questions()
            answers = alone(on, asked)
            wait_until_idle(on)
            return Quiet(on, path, fields, asked, answers)

        yield of_kind
