"""The tests of bits notice where a kernel adds up in another order for few rows than for many."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.engine.device import model_step, pooling_step, prompt_logprobs_step
from jaxserve.pallas_kernels import backends
from jaxserve.pallas_kernels.backends import Backend
from tests.engine.harness import engine
from tests.exact.conftest import FIELDS
from tests.exact.kinds import KINDS, write
from tests.exact.questions import alone, differing, questions, together

FEW = 3  # rows

pytestmark = pytest.mark.slow


def from_the_end(backend: Backend) -> Any:
    """Sums of few rows of logits begin at the last."""

    def log_sum_exp(x: jax.Array) -> jax.Array:
        assert backend.log_sum_exp is not None
        return backend.log_sum_exp(x[:, ::-1] if len(x) <= FEW else x)

    return log_sum_exp


def rows_from_the_end(backend: Backend) -> Any:
    """Few rows are multiplied from the last input to the first."""

    def choose(rows: int, weights: jax.Array, *, transposed: bool) -> Any:
        kernel = backend.skinny_matmul(rows, weights, transposed=transposed)
        if kernel is None or rows > FEW:
            return kernel

        def multiply(x: jax.Array, weights: jax.Array, *, transposed: bool) -> Any:
            turned = jnp.flip(weights, -1 if transposed else 0)
            return kernel(x[:, ::-1], turned, transposed=transposed)

        return multiply

    return choose


def inputs_from_the_end(backend: Backend) -> Any:
    """Few rows are multiplied with their experts' weights from the last input to the first."""

    def choose(weights: jax.Array, *, transposed: bool) -> Any:
        assert backend.grouped_matmul is not None and transposed
        kernel = backend.grouped_matmul(weights, transposed=transposed)

        def multiply(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
            turn = slice(None, None, -1 if len(x) <= FEW else 1)
            return kernel(x[:, turn], weights[..., turn], sizes)

        return multiply

    return choose


def heads_from_the_end(backend: Backend) -> Any:
    """Products of queries and keys begin at a head's last element, where all rows decode."""

    def attend(q: jax.Array, pool: Any, *rest: Any, decode_only: bool, **more: Any) -> jax.Array:
        if not decode_only:
            return backend.attend(q, pool, *rest, decode_only=decode_only, **more)
        turned = backend.attend(
            q[..., ::-1], pool[..., ::-1], *rest, decode_only=decode_only, **more
        )
        return jnp.asarray(turned[..., ::-1])

    return attend


MUTANTS: dict[str, tuple[str, Callable[[Backend], Any]]] = {
    "skinny_matmul": ("whole, bfloat16", rows_from_the_end),
    "grouped_matmul": ("whole moe", inputs_from_the_end),
    "log_sum_exp": ("whole", from_the_end),
    "attend": ("whole", heads_from_the_end),
}


@pytest.fixture
def steps() -> Iterator[None]:
    """Steps that are traced for this test, and for no other."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    model_step.make_model_step.cache_clear()
    prompt_logprobs_step.make_prompt_step.cache_clear()
    pooling_step.make_pooling_step.cache_clear()
    jax.clear_caches()


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("field", MUTANTS)
def test_another_order_is_noticed(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, change = MUTANTS[field]
    model, fields = KINDS[kind]
    load = backends._load

    def loaded(name: str) -> Backend:
        backend = load(name)
        return dataclasses.replace(backend, **{field: change(backend)})

    monkeypatch.setattr(backends, "_load", loaded)
    with engine(write(tmp_path, model), **FIELDS, **fields) as running:
        asked = questions()
        assert differing(together(running, asked), alone(running, asked))
