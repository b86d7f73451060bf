"""On CPUs what attention makes of a token has the same bits in any company and any chunk of its
prompt, wherever its blocks lie, and whether they hold K and V or the vectors that these are made
of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    LEFT,
    RIGHT,
    AttentionBatch,
    HiddenProjection,
    Pool,
    angle_table,
    as_cached,
    dtype_named,
    make_pool,
    paged_attention,
    project,
    projected_attention,
    write,
)
from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.pallas_kernels.pool import cached_width

HEADS, TOKENS = 4, 150
LAYER = 1
# Of each pool a width of heads that fills vectors, and one that does not. The quick ones, and the
# quick latent vectors, which do not, have the kernels of cases.py.
POOLS = [
    ("float32", 64),
    pytest.param("bfloat16", 128, marks=pytest.mark.slow),
    pytest.param("float32", 24, marks=pytest.mark.slow),
    pytest.param("int8", 64, marks=pytest.mark.slow),
    pytest.param("bfloat16", 40, marks=pytest.mark.slow),
    pytest.param("int8", 20, marks=pytest.mark.slow),
    pytest.param("fp8", 80, marks=pytest.mark.slow),
]


@dataclasses.dataclass
class Request:
    """Its queries, keys and values [TOKENS, heads, D], or the vectors [TOKENS, E] that its keys and
    values are made of; and how it lies in the pool."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    x: jax.Array | None = None
    kind: int = KV
    direction: int = LEFT


class Steps:
    """Steps over one pool: as a scheduler has them, requests [TOKENS, ...] in pieces."""

    def __init__(
        self,
        requests: Sequence[Request],
        dtype: str,
        *,
        block_size: int = 16,
        projection: HiddenProjection | None = None,
        **options: Any,
    ) -> None:
        self._requests, self._projection, self._options = requests, projection, options
        self._width, blocks = -(-TOKENS // block_size), 2 * len(requests) * -(-TOKENS // block_size)
        self._halves = options.get("halves", 0)
        (kv_heads, head_dim), kind = requests[0].k.shape[1:], dtype_named(dtype)
        width = cached_width(head_dim, kind, self._halves)
        self._pool: Pool = make_pool(2, blocks, kv_heads, block_size, width, kind)
        ids = np.random.default_rng(blocks).permutation(blocks).astype(np.int32)
        self._tables = ids.reshape(len(requests), 2, self._width)
        self._done = [0] * len(requests)

    def run(self, counts: Sequence[int]) -> list[np.ndarray]:
        """The next so many tokens of each request; what attention makes of them."""
        rows, tokens = len(counts), sum(counts)
        context = np.array([done + n for done, n in zip(self._done, counts, strict=True)])
        parts = [slice(done, done + n) for done, n in zip(self._done, counts, strict=True)]
        batch = AttentionBatch(
            tables=jnp.asarray(self._tables),
            context_lens=jnp.asarray(np.where(counts, context, 0), jnp.int32),
            query_start=jnp.asarray(np.cumsum([0, *counts[:-1]]), jnp.int32),
            query_lens=jnp.asarray(counts, jnp.int32),
            direction=jnp.asarray([one.direction for one in self._requests], jnp.int32),
            kind=jnp.asarray([one.kind for one in self._requests], jnp.int32),
            token_row=jnp.asarray(np.repeat(np.arange(rows), counts), jnp.int32),
            num_decodes=jnp.int32(0),
            num_rows=jnp.int32(rows),
        )

        def of(name: str) -> jax.Array:
            found = [
                getattr(one, name)[part] for one, part in zip(self._requests, parts, strict=True)
            ]
            return jnp.concatenate(found)

        k = of("k")
        x = None if self._projection is None else of("x").reshape(k.shape)
        put: Any = {"x": x, "halves": self._halves, "backend": "numba"}
        self._pool = write(self._pool, LAYER, k, of("v"), batch, **put)
        given: Any = {"decode_only": False, "backend": "numba", "scale": 0.2, **self._options}
        out = paged_attention(of("q"), self._pool, LAYER, batch, **given)
        if self._projection is not None:
            given.pop("sinks", None)
            hidden = projected_attention(
                of("q"), self._pool, LAYER, batch, self._projection, **given
            )
            out = out + hidden
        self._done = context.tolist()
        assert out.shape[0] == tokens
        return np.split(np.asarray(out).view(np.uint32), np.cumsum(counts)[:-1])

    def all(self, pieces: Sequence[int], beside: int = 0) -> np.ndarray:
        """The first request, its pieces beside so many tokens of each other one."""
        others = [beside] * (len(self._requests) - 1)
        found = [self.run([n, *others])[0] for n in pieces]
        return np.concatenate(found)


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def request(seed: int, kv_heads: int, head_dim: int) -> Request:
    q = numbers(seed, TOKENS, HEADS, head_dim)
    return Request(q, *(numbers(seed + i, TOKENS, kv_heads, head_dim) for i in (1, 2)))


def softmax(
    one: Request,
    sliding_window: int = TOKENS,
) -> np.ndarray:
    """What attention in both directions makes of a request, by NumPy in float64."""
    shared = HEADS // one.k.shape[1]
    k, v = (np.repeat(np.asarray(x, np.float64), shared, axis=1) for x in (one.k, one.v))
    found = 0.2 * np.einsum("thd,shd->hts", np.asarray(one.q, np.float64), k)
    behind = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))
    weights = np.where(np.abs(behind) < sliding_window, np.exp(found), 0)
    return np.einsum("hts,shd->thd", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.promise(45)
@pytest.mark.parametrize(("dtype", "head_dim"), POOLS)
def test_company_and_chunks(dtype: str, head_dim: int) -> None:
    first, *others = (request(10 * i, 2, head_dim) for i in range(4))
    window: dict[str, Any] = {
        "sliding_window": 37,
        "soft_cap": 3.0,
        "sinks": numbers(99, HEADS),
    }
    for options in ({}, window):
        alone = Steps([first], dtype, **options).all([TOKENS])
        chunks = Steps([first], dtype, **options).all([7, 1, 64, 30, 48])
        np.testing.assert_array_equal(chunks, alone)
        company = Steps([first, *others], dtype, **options)
        np.testing.assert_array_equal(company.all([90, 9, 1, 50], beside=30), alone)
        mirrored = dataclasses.replace(first, direction=RIGHT)
        small = Steps([mirrored, *others], dtype, block_size=8, **options)
        np.testing.assert_array_equal(small.all([5, 100, 45], beside=40), alone)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "halves"),
    [
        ("float32", 26, 19),
        pytest.param("int8", 60, 40, marks=pytest.mark.slow),
        pytest.param("bfloat16", 40, 35, marks=pytest.mark.slow),
        pytest.param("fp8", 24, 19, marks=pytest.mark.slow),
    ],
)
def test_latent_vectors(dtype: str, head_dim: int, halves: int) -> None:
    """All heads of a token at once, or few of them, where a row alone is cut by its heads."""
    whole = numbers(1, TOKENS, 2 * HEADS, 2 * head_dim)

    def made(seed: int) -> Request:
        vectors = numbers(seed, TOKENS, 2, 1, head_dim)
        return Request(whole * seed, vectors[:, 0], vectors[:, 1])

    first, *others = (made(seed) for seed in range(1, 5))
    for options in ({}, {"sliding_window": 37}):
        given: dict[str, Any] = {"halves": halves, **options}
        alone = Steps([first], dtype, **given).all([TOKENS])
        one_by_one = Steps([first], dtype, **given).all([1] * 20 + [64, 1, 65])
        np.testing.assert_array_equal(one_by_one, alone)
        mirrored = dataclasses.replace(first, direction=RIGHT)
        company = Steps([mirrored, *others], dtype, block_size=8, **given)
        np.testing.assert_array_equal(company.all([90, 9, 1, 50], beside=30), alone)


@pytest.mark.parametrize("window", [None, 37])
def test_tokens_that_see_those_behind_them(window: int | None) -> None:
    masks = {"sliding_window": window} if window else {}
    options: dict[str, Any] = {"both_ways": True, **masks}
    first, *others = (request(10 * i, 2, 64) for i in range(3))
    alone = Steps([first], "float32", **options).all([TOKENS])
    expected = softmax(first, **masks)
    np.testing.assert_allclose(alone.view(np.float32), expected, rtol=1e-4, atol=1e-5)
    company = Steps([first, *others], "float32", **options)
    np.testing.assert_array_equal(company.all([TOKENS], beside=70), alone)
    with pytest.raises(ValueError, match="both_ways: xla has no such attention"):
        Steps([first], "float32", **options, backend="xla").all([TOKENS])


@pytest.mark.parametrize(("dtype", "head_dim"), POOLS)
def test_hidden_vectors(dtype: str, head_dim: int) -> None:
    """As K and V made of them, in one piece or many."""
    width, half = HEADS * head_dim, head_dim // 2
    frequencies = np.geomspace(1, 1e-3, half, dtype=np.float32)
    projection = HiddenProjection(
        *(numbers(i, width, width) / 16 for i in (1, 2)),
        bk=numbers(3, width),
        bv=numbers(4, width),
        k_norm=numbers(5, head_dim),
        rotation=angle_table(TOKENS, frequencies, 1.0),
    )
    x = numbers(6, TOKENS, HEADS, head_dim)
    cached = as_cached(x, dtype_named(dtype)).reshape(TOKENS, width)
    k, v = project(cached, jnp.arange(TOKENS, dtype=jnp.int32), projection, HEADS)
    one = Request(
        numbers(7, TOKENS, HEADS, head_dim), k.transpose(1, 0, 2), v.transpose(1, 0, 2), x
    )
    hidden = dataclasses.replace(one, kind=HIDDEN)
    for options in ({}, {"sliding_window": 37}):
        expected = Steps([one], dtype, **options).all([TOKENS])
        for direction, sizes in ((LEFT, [TOKENS]), (RIGHT, [3, 64, 82, 1])):
            turned = dataclasses.replace(hidden, direction=direction)
            steps = Steps([turned, one, hidden], dtype, projection=projection, **options)
            np.testing.assert_array_equal(steps.all(sizes, beside=20), expected)


def test_any_number_of_threads() -> None:
    first, *others = (request(10 * i, 2, 64) for i in range(4))
    (room,) = numba_ffi._helpers
    memory = room[-(room.ctypes.data // 8) % numba_ffi._HELPER :]
    helpers, found = memory[0], []
    for count in (helpers, 0):
        memory[0] = count
        try:
            found.append(Steps([first, *others], "float32").all([100, 50], beside=70))
        finally:
            memory[0] = helpers
    np.testing.assert_array_equal(*found)


def test_another_order_is_noticed() -> None:
    """The check can fail: behind a window that cuts the first token off, the sum of the last one
    has another first part."""
    first = request(0, 2, 64)
    whole = Steps([first], "float32").all([TOKENS])
    cut = Steps([first], "float32", sliding_window=TOKENS - 1).all([TOKENS])
    assert (whole[: TOKENS - 1] == cut[: TOKENS - 1]).all() and (whole[-1] != cut[-1]).any()
