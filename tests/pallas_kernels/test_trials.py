"""Several backends' attention, timed: XLA's, and others in numba's place, by a clock of ours."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from jaxserve.pallas_kernels import KernelShape, backends, get_backend, trials

SHAPE = KernelShape(4, 2, head_dim=16, block_size=8, dtype="float32")
SIZES = trials.Sizes(rows=3, context=20, prompt=24)


def _in_place_of_numba(monkeypatch: pytest.MonkeyPatch, attend: Callable[..., jax.Array]) -> None:
    """XLA's, since compiling by numba takes long, with this function."""
    load = backends._load
    other = dataclasses.replace(load("xla"), attend=attend)
    monkeypatch.setattr(backends, "_load", lambda name: other if name == "numba" else load(name))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_backends_take_turns_and_the_least_counts(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round takes a second more than the one before: the first counts. The second backend's
    calls take twice as long."""
    _in_place_of_numba(monkeypatch, get_backend("xla").attend)
    took: Iterator[float] = iter([])

    def spans() -> Iterator[float]:
        for turn, slow in itertools.product(range(trials.ROUNDS), (1, 2)):
            yield 0.0
            yield (1.0 + turn) * slow

    def clock() -> float:
        nonlocal took
        try:
            return next(took)
        except StopIteration:
            took = spans()
            return next(took)

    shape = dataclasses.replace(SHAPE, dtype=dtype)
    found = trials.run_trials(("xla", "numba"), shape, SIZES, clock)
    assert found == {kind: {"xla": 1.0, "numba": 2.0} for kind in (trials.DECODES, trials.PROMPTS)}


def _fails(*given: Any, **options: Any) -> jax.Array:
    raise RuntimeError("no kernel image is available")


def _doubled(*given: Any, **options: Any) -> jax.Array:
    return 2 * get_backend("xla").attend(*given, **options)


@pytest.mark.parametrize("attend", [_fails, _doubled])
def test_who_fails_or_is_wrong_does_not_count(
    attend: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_place_of_numba(monkeypatch, attend)
    found = trials.run_trials(("xla", "numba"), SHAPE, SIZES)
    assert [list(times) for times in found.values()] == [["xla"], ["xla"]]
