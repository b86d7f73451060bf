"""Attention by the deterministic variants: a token's bits are the same whatever else is in the
step, wherever its chunk begins, and whether it is a decode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import deterministic_backend, paged_attention
from jaxserve.pallas_kernels.gpu_triton import prefill, tuning
from jaxserve.pallas_kernels.pool import FLOAT8, halves_wide
from jaxserve.pallas_kernels.reference import as_cached
from tests.pallas_kernels.batches import Shape, in_bytes, make_batch, make_pool, steps, vectors
from tests.pallas_kernels.cases import BY_NAME, Case
from tests.pallas_kernels.conformance import PAGED

INTERPRETED = ("triton-interpret", "tpu-interpret")
SHAPE = Shape(4, 2, head_dim=64, block_size=32, rows=4, width=3, tokens=96, layers=1)
CASES = (
    Case("whole", SHAPE),
    Case("window", SHAPE, "bfloat16", window=37, cap=3.0, sinks=True),
    Case("int8", SHAPE, cache="int8"),
    Case("float8", SHAPE, "bfloat16", cache=FLOAT8),
    Case("latent", dataclasses.replace(SHAPE, kv_heads=1), window=37, halves=48),
    Case("latent-int8", dataclasses.replace(SHAPE, kv_heads=1), cache="int8", halves=48),
)
LENGTH = 70  # of the row that is looked at
Pieces = Sequence[tuple[int, int]]  # (context with it, tokens) of each chunk of that row
WAYS: dict[str, tuple[Pieces, Pieces]] = {  # the row's chunks; (context, tokens) of rows beside it
    "alone": ([(70, 70)], []),
    "in chunks": ([(40, 40), (41, 1), (69, 28), (70, 1)], [(3, 3)]),
    "beside longer ones": ([(23, 23), (69, 46), (70, 1)], [(96, 1), (95, 1), (90, 48)]),
}


def deterministic(name: str) -> str:
    found = deterministic_backend(name)
    assert found is not None
    return found


@functools.cache
def _attention(backend: str, case: Case) -> Any:
    options = PAGED.options(case)
    return jax.jit(
        functools.partial(paged_attention, backend=backend, decode_only=False, **options)
    )


def found(backend: str, case: Case, row: Pieces, beside: Pieces) -> np.ndarray:
    """What one row's tokens get, whose chunks are computed beside other rows: [LENGTH, H, D]."""
    shape = case.shape
    rng = np.random.default_rng(7)
    asked = dataclasses.replace(shape, head_dim=shape.head_dim * (2 if case.halves else 1))
    size = dataclasses.replace(shape, tokens=LENGTH)
    queries = dataclasses.replace(asked, tokens=LENGTH)
    own = {name: vectors(size, shape.kv_heads, rng, np.float32) for name in ("k", "v")}
    own["q"] = vectors(queries, shape.num_heads, rng, np.float32)
    out = np.zeros((LENGTH, shape.num_heads, 2 * case.halves or shape.head_dim), np.float32)
    for number, (context, count) in enumerate(row):
        drawn = np.random.default_rng(number)
        rows = sorted([(context, count), *beside], key=lambda each: each[1] != 1)
        mine = rows.index((context, count))
        batch = make_batch(shape, rows, [0] * len(rows), sum(n == 1 for _, n in rows), drawn)
        pool = make_pool(shape, batch, drawn, np.float32)
        tables = np.asarray(batch.tables)[mine]
        for plane, name in enumerate(("k", "v")):
            for position in range(context):
                block, slot = divmod(position, shape.block_size)
                pool[0, tables[plane, block], :, slot] = own[name][position]
        q = vectors(asked, shape.num_heads, drawn, np.float32)
        begin = int(batch.query_start[mine])
        q[begin : begin + count] = own["q"][context - count : context]
        cached = as_cached(pool, case.cached)
        if halves_wide(case.cached, case.halves):
            cached = in_bytes(pool, batch, case.cached, case.halves)
        got = _attention(backend, case)(q.astype(case.dtype), cached, jnp.int32(0), batch)
        out[context - count : context] = np.asarray(got[begin : begin + count], np.float32)
    return out.view(np.uint32)


def _same(backend: str, case: Case, ways: Sequence[str]) -> None:
    first, *others = (found(backend, case, *WAYS[way]) for way in ways)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.slow] * slow)
        for name in INTERPRETED
        for case in CASES
        if (slow := name == "tpu-interpret" and case.name != "whole") in (False, True)
    ],
)
def test_a_token_has_the_same_bits_in_any_company(name: str, case: Case) -> None:
    _same(deterministic(name), case, list(WAYS))


@pytest.mark.parametrize("way", ["in chunks", "beside longer ones"])
def test_the_faster_kernels_have_others(way: str) -> None:
    """So the test above can fail. Those of TPUs differ in the sizes of their products alone, which
    the interpreter does not show."""
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        _same("triton-interpret", CASES[0], ["alone", way])


@pytest.mark.parametrize("case", ["cut-decodes", "cut-mixed"])
@pytest.mark.parametrize("name", INTERPRETED)
@settings(max_examples=2)
@given(data=st.data())
def test_they_agree_with_the_reference(name: str, case: str, data: st.DataObject) -> None:
    """Decodes and chunks, in any order, of rows of both kinds."""
    shape = BY_NAME[case]
    PAGED.check(deterministic(name), shape, *data.draw(steps(shape.shape)))


def test_tiles_do_not_depend_on_the_size_of_the_step() -> None:
    launch = tuning.launch("few", 2, 128)
    sizes = [
        {prefill._queries(tokens, 4, kind, launch) for tokens in (1, 8, 64, 4096)}
        for kind in (prefill.UNCUT, prefill.ANY)
    ]
    assert [len(each) for each in sizes] == [1, 3]


def test_only_kernels_of_ours_have_such_a_variant() -> None:
    assert deterministic_backend("xla") is None
    assert deterministic_backend(deterministic("triton")) is None
