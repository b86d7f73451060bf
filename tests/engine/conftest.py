from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from jaxserve.engine.engine import Engine
from tests.engine.harness import SAMPLING, engine, generate, prompts, wait_until_idle, write_shape

Engines = Callable[[str], Engine]
Texts = Callable[[str], list[list[int]]]


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    return {family: write_shape(folder, family) for family in ("opt", "llama", "moe")}


@pytest.fixture(scope="session")
def engines(shapes: dict[str, Path]) -> Iterator[Engines]:
    """One engine a family, with memory for everything, shared by all tests and started for the
    first that wants it."""
    with ExitStack() as running:

        @cache
        def engine_of(family: str) -> Engine:
            return running.enter_context(engine(shapes[family]))

        yield engine_of


@pytest.fixture
def roomy(engines: Engines) -> Iterator[Engine]:
    """The shared OPT engine; idle before and after."""
    yield engines("opt")
    wait_until_idle(engines("opt"))


@pytest.fixture(scope="session")
def alone(engines: Engines) -> Texts:
    """By family: what each of `prompts()` is answered with nothing beside it."""

    @cache
    def texts(family: str) -> list[list[int]]:
        on = engines(family)
        found = [generate(on, [prompt], **SAMPLING)[0] for prompt in prompts()]
        wait_until_idle(on)
        return found

    return texts
