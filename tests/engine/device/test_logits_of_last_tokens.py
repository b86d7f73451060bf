"""Logits are computed of one token a row: its last one (AccelGen section 4.2). Batches in which all
sample greedily draw their tokens in the same program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxserve.engine.device import executor as module
from jaxserve.engine.device.batch_layout import Rows
from jaxserve.engine.device.buckets import make_buckets
from jaxserve.engine.device.model_step import make_model_step
from jaxserve.engine.device.sampling_state import Newest
from jaxserve.engine.device.step_model import StepModel
from jaxserve.engine.engine import Engine
from jaxserve.models.registry import family_for
from jaxserve.pallas_kernels import make_pool, pool_format
from jaxserve.weights import load_params
from tests.engine.harness import SAMPLING, SHAPES, generate, prompts

TOKENS, ROWS = 64, 8
VOCABULARY = 101  # a size that nothing else in the step has


def shapes_in(program: Jaxpr) -> set[tuple[int, ...]]:
    """Of every array that the program computes, those of its inner programs included."""
    found: set[tuple[int, ...]] = set()
    for equation in program.eqns:
        found |= {getattr(value.aval, "shape", ()) for value in equation.outvars}
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                found |= shapes_in(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
    return found


@pytest.mark.parametrize("decode_only", [True, False])
def test_a_step_has_logits_of_one_token_a_row(decode_only: bool) -> None:
    """Of chunks, too, that are not the last of their prompt; there are none of other tokens."""
    shape = SHAPES["opt"] | {"vocab_size": VOCABULARY}
    family = family_for(shape)
    config = family.config_from_hf(shape)
    params = load_params(None, family, config, dtype=jnp.float32, load_format="random")
    pool = make_pool(config.num_layers, 64, config.num_kv_heads, 4, config.head_dim, jnp.float32)
    step: Any = make_model_step(StepModel(family, config, "xla", None, None, 64), pool_format(pool))
    buckets = make_buckets(ROWS, TOKENS, width=16, block_size=4)
    layout = buckets.decode(ROWS) if decode_only else buckets.mixed(TOKENS)
    assert layout.tokens > layout.rows or decode_only
    packed = jnp.zeros(layout.size, jnp.int32)
    newest = Newest(*2 * [jnp.zeros(layout.slots, jnp.int32)])
    traced = jax.make_jaxpr(lambda *given: step(*given, layout=layout))(
        params, pool, newest, packed
    )
    logits = {shape for shape in shapes_in(traced.jaxpr) if shape[-1:] == (VOCABULARY,)}
    assert logits == {(layout.rows, VOCABULARY)}


def test_a_greedy_batch_is_one_call(roomy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are two: what they sample with is a program behind the step."""
    executor: Any = roomy.executor
    calls: list[str] = []
    step, sample = executor._steps[False], module._SAMPLE_FULL

    def counted_step(*given: Any, **layout: Any) -> Any:
        calls.append("step")
        return step(*given, **layout)

    def counted_sample(*given: Any) -> Any:
        calls.append("sample")
        return sample(*given)

    monkeypatch.setitem(executor._steps, False, counted_step)
    monkeypatch.setattr(module, "_SAMPLE_FULL", counted_sample)
    generate(roomy, prompts()[:2], **SAMPLING)
    assert set(calls) == {"step"}
    calls.clear()
    generate(roomy, prompts()[:1], temperature=0.7, seed=1, **SAMPLING)
    assert 0 < calls.count("sample") <= calls.count("step")


def test_a_step_draws_only_where_the_batch_says_so(roomy: Engine) -> None:
    executor: Any = roomy.executor
    layout = executor.buckets.decode(2)
    ones = np.ones(2, np.int64)
    tables = np.arange(4 * layout.width, dtype=np.int32).reshape(2, 2, layout.width)
    rows = Rows(ones, 0 * ones, tables, tokens=[[5], [6]], slots=np.array([3, 1]), emits=ones)
    packed = layout.pack(rows).buffer
    before = jax.device_get(executor._state.newest)
    pending = executor.compute(layout, packed)
    after = jax.device_get(executor._state.newest)
    np.testing.assert_array_equal(before, after)
    drawn = executor.submit(layout, packed, full=False).result().tokens[:2]
    assert drawn.tolist() == np.asarray(pending.logits)[:2].argmax(axis=-1).tolist()
    newest = jax.device_get(executor._state.newest)
    assert newest.last_token[[3, 1]].tolist() == drawn.tolist()
    assert (newest.num_generated - before.num_generated).nonzero()[0].tolist() == [1, 3]
