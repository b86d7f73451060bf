"""Logits are computed of one token a row: its last one (AccelGen section 4.2)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.engine.device.sampling_state import Newest
from tests.engine.harness import SHAPES, engine

TOKENS, ROWS, VOCABULARY = 64, 8, 101


def shapes_in(program: Jaxpr) -> set[tuple[int, ...]]:
    """Of every array that the program computes, those of its inner programs included."""
    found: set[tuple[int, ...]] = set()
    for equation in program.eqns:
        found |= {getattr(value.aval, "shape", ()) for value in equation.outvars}
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                found |= shapes_in(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
    return found


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JaxExecutor]:
    """Its vocabulary is of a size that nothing else in the step has."""
    path = tmp_path_factory.mktemp("opt")
    shape = SHAPES["opt"] | {"vocab_size": VOCABULARY}
    (path / "config.json").write_text(json.dumps(shape))
    with engine(path) as running:
        yield running.executor


@pytest.mark.parametrize("decode_only", [True, False])
def test_a_step_has_logits_of_one_token_a_row(executor: JaxExecutor, decode_only: bool) -> None:
    """Of chunks, too, that are not the last of their prompt; there are none of other tokens."""
    buckets = executor.buckets
    layout = buckets.decode(ROWS) if decode_only else buckets.mixed(TOKENS)
    assert layout.tokens > layout.rows or decode_only
    packed = jnp.zeros(layout.size, jnp.int32)
    newest = Newest(*2 * [jnp.zeros(layout.slots, jnp.int32)])
    traced = jax.make_jaxpr(lambda *given: executor._steps[False](*given, layout=layout))(
        executor.params, executor.pool, newest, packed
    )
    logits = {shape for shape in shapes_in(traced.jaxpr) if shape[-1:] == (VOCABULARY,)}
    assert logits == {(layout.rows, VOCABULARY)}
