"""Batches in which all sample greedily draw their tokens in the model's step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.device import executor as module
from jaxserve.engine.device.batch_layout import Rows
from jaxserve.engine.engine import Engine
from tests.engine.harness import SAMPLING, generate, prompts


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
