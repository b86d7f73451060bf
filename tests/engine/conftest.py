from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup import build
from jaxserve.engine.startup.blueprint import build_programs
from tests.engine.harness import (
    SAMPLING,
    SHAPES,
    box,
    engine,
    generate,
    prompts,
    wait_until_idle,
    write_shape,
)

Engines = Callable[[str], Engine]
Texts = Callable[[str], list[list[int]]]


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    return {family: write_shape(folder, family) for family in SHAPES}


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
def boxed() -> Iterator[Engine]:
    """The model in the box, with memory for everything, shared by all tests."""
    with box() as running:
        yield running


@pytest.fixture
def on(boxed: Engine) -> Iterator[Engine]:
    """The same; idle before and after."""
    yield boxed
    wait_until_idle(boxed)


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


@pytest.fixture
def one_executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines whose steps are the same have one executor, one engine after the other."""
    made: dict[str, tuple[Any, ...]] = {}
    closed = JaxExecutor.close

    def built_once(served: Any, tensor: int, blueprint: Any, **more: Any) -> Any:
        key = repr((served, blueprint))
        if key not in made:
            made[key] = build_programs(served, tensor, blueprint, **more)
        return made[key]

    monkeypatch.setattr(build, "build_programs", built_once)
    monkeypatch.setattr(JaxExecutor, "close", lambda self: None)
    yield
    assert len(made) <= 5  # the models compared with, and with and without moves of caches
    for executor, *_ in made.values():
        closed(executor)
