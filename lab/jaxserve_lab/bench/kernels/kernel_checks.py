"""Checks the kernels on this device against their NumPy references in float64, with pools that hold
NaN in every slot outside the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import HIDDEN, KV, RIGHT, AttentionBatch, reference
from jaxserve.pallas_kernels import attention as attend
from jaxserve.pallas_kernels import move as moving
from jaxserve.pallas_kernels.backends import get_backend
from jaxserve.pallas_kernels.pool import FLOAT8, Pool, ScaledPool
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.kernel_inputs import Heads, Row

# Allowed relative error (L2), by the pool's dtype, without the rounding to 8 bits. With 8 bits,
# everything else is bfloat16.
LIMITS = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 2e-3, "int8": 5e-3, FLOAT8: 5e-3}
ROUNDED = 1e-3  # for new int8 vectors: a few numbers close to a tie may be rounded either way
HEADS = (
    Heads(4, 4, 64),
    Heads(8, 2, 128),
    Heads(4, 4, 128, rotary=True),
    Heads(4, 4, 256),
    Heads(8, 2, 256),
)
LAYERS, LAYER, BLOCK_SIZE = 2, 1, 16


@dataclass(frozen=True)
class Check:
    """A kernel compared with its reference.

    Attributes:
        kernel: Its name.
        shape: The heads' shape, in words.
        dtype: Dtype of the inputs and the pool.
        error: Relative L2 error; for a kernel that only copies, the share of wrong elements.
        limit: The largest allowed error.
        why: Why it was not run; "" if it was.
    """

    kernel: str
    shape: str
    dtype: str
    error: float
    limit: float
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran and is correct."""
        return not self.why and self.error <= self.limit


def check_kernels(
    backend: str, dtypes: Sequence[str] = tuple(LIMITS), shapes: Sequence[Heads] = HEADS
) -> Iterator[Check]:
    """Checks every kernel for every shape and dtype that the backend supports; for others, the
    check has a `why`."""

    def both(given: tuple[str, Heads, str]) -> list[Check]:
        results = list(_checked(KV, chain(_kv(*given), _copies(*given)), *given))
        if given[1].offers_hidden:
            results += _checked(HIDDEN, _hidden(*given), *given)
        return results

    yield from at_once(both, [(backend, heads, dtype) for heads in shapes for dtype in dtypes])


def at_once(check: Callable[[Any], Iterable[Check]], cases: Iterable[Any]) -> Iterator[Check]:
    """The results of `check` for all cases, in order. Several are compiled at once, which takes
    most of the time."""
    with ThreadPoolExecutor() as threads:
        for checks in threads.map(check, cases):
            yield from checks


def check_paged(
    backend: str, dtypes: Sequence[str] = tuple(LIMITS), shapes: Sequence[Heads] = HEADS
) -> Iterator[Check]:
    """Checks of attention over K and V: the decodes of `check_kernels`, and chunks that are long
    enough for kernels with large tiles."""
    for heads in shapes:
        for dtype in dtypes:
            given = backend, heads, dtype
            yield from _checked(KV, chain(_decodes(*given), _long_chunks(*given)), *given)


def _checked(
    kind: int,
    runs: Iterator[Run],
    backend: str,
    heads: Heads,
    dtype: str,
) -> Iterator[Check]:
    """Runs with a kind of cache, or why there are none."""
    rotary = " rotary" if heads.rotary else ""
    shape = f"{heads.num_heads}/{heads.kv_heads} x {heads.head_dim}{rotary}"
    reason = get_backend(backend).supports(kind, heads.shape(BLOCK_SIZE, dtype))
    if reason is not None:
        yield Check("hidden" if kind == HIDDEN else "KV", shape, dtype, 0.0, 0.0, why=reason)
        return
    for run in runs:
        limit = LIMITS[dtype] if run.limit is None else run.limit
        error = (relative_error if limit else wrong_share)(run.got, run.want)
        yield Check(run.name, shape, dtype, error, limit)


class Run(NamedTuple):
    """A kernel's run.

    Attributes:
        name: The kernel's name.
        got: Its result.
        want: The expected result.
        limit: Limit of its error; None for the dtype's, 0 for equal bits.
    """

    name: str
    got: reference.Array
    want: np.ndarray
    limit: float | None = None


DECODES = (Row(1), Row(17, direction=RIGHT), Row(300), Row(16), Row(129, direction=RIGHT))
DRAFTS = (Row(200, 8), Row(33, 2, direction=RIGHT), Row(5, 4))
CHUNKS = (Row(40, 40), Row(150, 21, direction=RIGHT))
LONG_CHUNKS = (Row(150, 150), Row(310, 140, direction=RIGHT))
CUT: dict[str, Any] = {"sliding_window": 33, "soft_cap": 5.0}


def _decodes(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    yield Run("decode attention", *_paged(backend, heads, dtype, DECODES))
    cut = _paged(backend, heads, dtype, DECODES, **CUT)
    yield Run("decode attention, window and cap", *cut)


def _long_chunks(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    rows = (*DECODES, *LONG_CHUNKS)
    yield Run("prefill attention, long chunks", *_paged(backend, heads, dtype, rows))


def _kv(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    yield from _decodes(backend, heads, dtype)
    both = (*DECODES, *CHUNKS)
    yield Run("prefill attention", *_paged(backend, heads, dtype, both))
    sinks = jnp.linspace(-2.0, 4.0, heads.num_heads)
    yield Run("attention with sinks", *_paged(backend, heads, dtype, both, sinks=sinks))
    rows = (*DECODES, *DRAFTS, *CHUNKS)
    yield Run("attention with drafts", *_paged(backend, heads, dtype, rows, drafts=True))


def _paged(
    backend: str,
    heads: Heads,
    dtype: str,
    rows: Sequence[Row],
    *,
    drafts: bool = False,
    **options: Any,
) -> tuple[jax.Array, np.ndarray]:
    scale = heads.head_dim**-0.5
    batch, pool = _inputs(heads, dtype, list(rows), drafts=drafts)
    q = _vectors(batch, heads.num_heads, heads.head_dim, dtype, 1)
    decode_only = len(rows) == batch.max_tokens
    run = _jit(attend.paged_attention, backend, scale=scale, decode_only=decode_only, **options)
    cached = reference.as_numbers(pool)
    want = reference.paged_attention(q, cached, LAYER, batch, scale=scale, **options)
    return run(q, pool, LAYER, batch), want


def _hidden(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    decodes = [Row(1, kind=HIDDEN), Row(200, kind=HIDDEN, direction=RIGHT), Row(48), Row(33)]
    chunk = Row(90, 30, kind=HIDDEN)
    scale = heads.head_dim**-0.5
    batch, pool = _inputs(heads, dtype, decodes)
    qx = _vectors(batch, heads.num_heads, heads.width, dtype, 2)
    # As large as queries with folded random weights.
    qx = qx * jnp.asarray((heads.head_dim / heads.width) ** 0.5, qx.dtype)
    got = _jit(attend.absorbed_attention, backend, scale=scale)(qx, pool, LAYER, batch)
    want = reference.absorbed_attention(qx, reference.as_numbers(pool), LAYER, batch, scale=scale)
    yield Run("absorbed", got, want)
    for rows, decode_only in ((decodes, True), ([*decodes, chunk], False)):
        batch, pool = _inputs(heads, dtype, rows)
        q = _vectors(batch, heads.num_heads, heads.head_dim, dtype, 3)
        drawn = inputs.activations(dtype), inputs.host_vectors
        projection = inputs.make_projection(heads, 512, *drawn)
        run = _jit(attend.projected_attention, backend, scale=scale, decode_only=decode_only)
        cached = reference.as_numbers(pool)
        want = reference.projected_attention(q, cached, LAYER, batch, projection, scale=scale)
        name = "projected decode" if decode_only else "projected prefill"
        yield Run(name, run(q, pool, LAYER, batch, projection), want)


def _copies(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    rows = [Row(17), Row(40, 40, direction=RIGHT)]
    if heads.offers_hidden:
        rows.append(Row(30, 12, kind=HIDDEN))
    batch, pool = _inputs(heads, dtype, rows)
    new = [_vectors(batch, heads.kv_heads, heads.head_dim, dtype, seed) for seed in (4, 5, 6)]

    def write(pool: Pool, k: jax.Array, v: jax.Array, x: jax.Array) -> Pool:
        return attend.write(pool, LAYER, k, v, batch, x=x, backend=backend)

    written, want = jax.jit(write)(pool, *new), _written(pool, new, batch)
    if isinstance(written, ScaledPool):
        yield Run("write", reference.as_numbers(written), want, ROUNDED)
    else:
        yield Run("write", written, want, 0.0)
    slots = np.random.default_rng(7).permutation(pool.shape[1] * BLOCK_SIZE)[:60]
    places = jnp.asarray(np.stack(np.divmod(slots, BLOCK_SIZE), axis=1), jnp.int32)
    moves, count = jnp.concatenate([places[:30], places[30:]], axis=1), 25
    moved = _jit(moving.move_slots, backend)(pool, moves, count)
    yield Run("move", _as_staged(moved), reference.move(_as_staged(pool), moves, count), 0.0)
    staged = _jit(moving.stage_out, backend)(pool, places, count)
    yield Run("stage out", staged, reference.stage_out(_as_staged(pool), places, count), 0.0)
    drawn = np.random.default_rng(8).standard_normal((*staged.shape[:3], heads.head_dim))
    cached = reference.as_cached(drawn.astype(np.float32), pool.dtype)
    fresh = jnp.asarray(_as_staged(cached))
    back = _jit(moving.stage_in, backend)(pool, fresh, places, count)
    want = reference.stage_in(_as_staged(pool), fresh, places, count)
    yield Run("stage in", _as_staged(back), want, 0.0)


def _written(pool: Pool, new: Sequence[jax.Array], batch: AttentionBatch) -> np.ndarray:
    """The pool, with int8 as numbers, after writing new K, V and hidden vectors."""
    if isinstance(pool, ScaledPool):
        wide = (np.asarray(array, np.float32) for array in new)
        k, v, x = (reference.as_numbers(reference.as_cached(array, pool.dtype)) for array in wide)
        return reference.write(reference.as_numbers(pool), LAYER, k, v, x, batch)
    vectors = [array.astype(pool.dtype) for array in new]
    return reference.write(pool, LAYER, vectors[0], vectors[1], vectors[2], batch)


def _as_staged(pool: Pool | np.ndarray) -> np.ndarray:
    """The pool in NumPy, with int8 vectors followed by the bytes of their scales."""
    if not isinstance(pool, ScaledPool):
        return np.asarray(pool)
    scales = np.asarray(pool.scales)[..., None].view(np.int8)
    return np.concatenate([np.asarray(pool.values), scales], axis=-1)


def _inputs(
    heads: Heads, dtype: str, rows: list[Row], *, drafts: bool = False
) -> tuple[AttentionBatch, Pool]:
    rng = np.random.default_rng(9)
    blocks = 2 * len(rows) * -(-max(row.context for row in rows) // BLOCK_SIZE) + 3
    batch = inputs.make_batch(rows, BLOCK_SIZE, blocks, rng, drafts=drafts)
    pool = inputs.poisoned_pool(heads, LAYERS, blocks, BLOCK_SIZE, jnp.dtype(dtype), batch, rng)
    return batch, pool


def _vectors(batch: AttentionBatch, heads: int, width: int, dtype: str, seed: int) -> jax.Array:
    return inputs.host_vectors((batch.max_tokens, heads, width), inputs.activations(dtype), seed)


def _jit(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, backend=backend, **options))


def relative_error(got: reference.Array, want: np.ndarray) -> float:
    """L2 of the difference over L2 of the expected values; infinite if they differ in which
    elements are finite."""
    values, counted = np.asarray(got).astype(np.float64), np.isfinite(want)
    if not np.array_equal(np.isfinite(values), counted):
        return float("inf")
    values, want = values[counted], want[counted]
    return float(np.linalg.norm(values - want) / np.linalg.norm(want))


def wrong_share(got: reference.Array, want: np.ndarray) -> float:
    """The share of elements that are not exactly equal; NaN equals NaN."""
    a, b = np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
    return float(1.0 - np.isclose(a, b, rtol=0, atol=0, equal_nan=True).mean())
