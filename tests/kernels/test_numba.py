"""What is only numba's: tiles of queries, heads cut into shares, threads, products of few rows."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba.core import caching

from jaxserve.pallas_kernels import (
    few_rows,
    few_rows_kernel,
    numba_attention,
    numba_ffi,
    numba_rows,
)
from tests.kernels import edges
from tests.kernels.batches import Shape, make_batch
from tests.kernels.cases import Case
from tests.kernels.conformance import PAGED
from tests.kernels.edges import Edge

# Groups of heads and a head_dim that fill no whole vectors; tiles of queries and of context.
LONG = Case("long", Shape(6, 2, head_dim=40, rows=4, width=20, tokens=150), window=40, cap=2.0)
WHOLE = Case("whole", Shape(4, 4, head_dim=16, rows=4, width=20, tokens=150))


@pytest.mark.parametrize("case", [LONG, WHOLE], ids=lambda case: case.name)
@pytest.mark.parametrize("edge", [edges.prompt, edges.any_order, edges.far_chunks])
def test_chunks_of_more_than_one_tile(case: Case, edge: Edge) -> None:
    assert case.shape.tokens > numba_attention.TILE
    PAGED.check("numba", case, edge(case.shape, PAGED.kind), 1)


@pytest.mark.parametrize("context", [1, 33, 2048])
def test_a_single_rows_heads_are_cut(context: int) -> None:
    """From one share to one a head."""
    case = Case("one-row", Shape(6, 6, head_dim=64, block_size=32, rows=1, width=64, tokens=1))
    assert 33 * 6 * 64 < numba_attention.ALONE < 2048 * 6 * 64
    batch = make_batch(case.shape, [(context, 1)], [1], 1, np.random.default_rng(context))
    PAGED.check("numba", case, batch, context)


def test_several_threads_at_once() -> None:
    """Calls share nothing but the threads that compute."""
    case = Case("many", Shape(8, 8, head_dim=64, block_size=32, rows=4, width=16, tokens=4))
    lengths = [(512, 1), (500, 1), (7, 1), (400, 1)]
    batches = [
        make_batch(case.shape, lengths, [0, 1, 0, 1], 4, np.random.default_rng(seed))
        for seed in range(12)
    ]
    PAGED.check("numba", case, batches[0], 0)
    with ThreadPoolExecutor(4) as pool:
        for found in [
            pool.submit(PAGED.check, "numba", case, batch, seed)
            for seed, batch in enumerate(batches)
        ]:
            found.result()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(64, 96), (1024, 1056)])
def test_few_rows(rows: int, transposed: bool, shape: tuple[int, int]) -> None:
    """Within float32's rounding of the product in float64; of one share and of several."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, shape[0])), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=shape[::-1] if transposed else shape), jnp.bfloat16)
    assert few_rows_kernel(rows, weights, transposed=transposed)
    got = jax.jit(few_rows, static_argnames="transposed")(x, weights, transposed=transposed)
    assert got.dtype == jnp.float32
    left, right = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    want = left @ (right.T if transposed else right)
    assert np.abs(np.asarray(got) - want).max() <= 1e-6 * np.abs(want).max() * shape[0] ** 0.5


def test_products_that_few_rows_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = jnp.zeros((64, 64), jnp.bfloat16)
    assert few_rows_kernel(4, weights, transposed=False)
    assert not few_rows_kernel(5, weights, transposed=False)
    assert not few_rows_kernel(1, weights.astype(jnp.float32), transposed=False)
    assert not few_rows_kernel(1, weights[:60], transposed=False)  # no multiple of TOGETHER
    assert not few_rows_kernel(1, weights[:, :48], transposed=False)
    assert not few_rows_kernel(1, weights[:, :48], transposed=True)
    assert few_rows_kernel(1, weights[:60], transposed=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not few_rows_kernel(4, weights, transposed=False)
    assert numba_rows.MOST_ROWS == 4


def test_compiled_code_is_kept_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the values that a function closes over; and compiled each time where nothing can be."""

    def times(factor: int) -> Any:
        def function(number: int) -> int:
            return factor * number

        return function

    def compiled(factor: int) -> tuple[int, int]:
        address = numba_ffi._compiled(times(factor))
        call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)
        return call(7), numba_ffi._kept[-1].cache_hits

    compiled(2), compiled(3)
    assert compiled(2) == (14, 1)
    assert compiled(3) == (21, 1)
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert compiled(2) == (14, 0)
