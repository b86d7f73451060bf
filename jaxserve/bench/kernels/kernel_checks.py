"""Are the kernels right on this device? Each against its NumPy reference in float64, over pools
whose every slot that is not the batch's own holds NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.kernels import kernel_inputs as inputs
from jaxserve.bench.kernels.kernel_inputs import Heads, Row
from jaxserve.pallas_kernels import HIDDEN, KV, RIGHT, AttentionBatch, reference
from jaxserve.pallas_kernels import attention as attend
from jaxserve.pallas_kernels import move as moving
from jaxserve.pallas_kernels.backends import get_backend

# Relative error (L2) that is allowed, by dtype.
LIMITS = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 2e-3}
HEADS = (Heads(4, 4, 64), Heads(8, 2, 128), Heads(4, 4, 128, rotary=True))
LAYERS, LAYER, BLOCK_SIZE = 2, 1, 16


@dataclass(frozen=True)
class Check:
    """One kernel against its reference.

    Attributes:
        kernel: its name.
        shape: of the heads, in words.
        dtype: of the inputs and the pool.
        error: relative, L2; for a kernel that only copies, the share of wrong elements.
        limit: the largest error allowed.
        why: why it was not run; "" if it was.
    """

    kernel: str
    shape: str
    dtype: str
    error: float
    limit: float
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran and is right."""
        return not self.why and self.error <= self.limit


def check_kernels(
    backend: str, dtypes: Sequence[str] = tuple(LIMITS), shapes: Sequence[Heads] = HEADS
) -> Iterator[Check]:
    """Every kernel for every shape and dtype that the backend takes; a check with `why` for those
    that it does not."""
    for heads in shapes:
        for dtype in dtypes:
            given = backend, heads, dtype
            yield from _checked(KV, _kv(*given), *given, copies=_copies(*given))
            if heads.offers_hidden:
                yield from _checked(HIDDEN, _hidden(*given), *given)


def check_decodes(
    backend: str, dtypes: Sequence[str] = tuple(LIMITS), shapes: Sequence[Heads] = HEADS
) -> Iterator[Check]:
    """The checks of `check_kernels` that are decode attention over K and V."""
    for heads in shapes:
        for dtype in dtypes:
            given = backend, heads, dtype
            yield from _checked(KV, _decodes(*given), *given)


def _checked(
    kind: int,
    runs: Iterator[Run],
    backend: str,
    heads: Heads,
    dtype: str,
    copies: Iterable[Run] = (),
) -> Iterator[Check]:
    """Runs of a cache kind, or why there are none. copies: runs whose every bit counts."""
    rotary = " rotary" if heads.rotary else ""
    shape = f"{heads.num_heads}/{heads.kv_heads} x {heads.head_dim}{rotary}"
    reason = get_backend(backend).supports(kind, heads.shape(BLOCK_SIZE, dtype))
    if reason is not None:
        yield Check("hidden" if kind == HIDDEN else "KV", shape, dtype, 0.0, 0.0, why=reason)
        return
    for name, got, want in runs:
        yield Check(name, shape, dtype, relative_error(got, want), LIMITS[dtype])
    for name, got, want in copies:
        yield Check(name, shape, dtype, wrong_share(got, want), 0.0)


Run = tuple[str, jax.Array, np.ndarray]


DECODES = (Row(1), Row(17, direction=RIGHT), Row(300), Row(16), Row(129, direction=RIGHT))
CHUNKS = (Row(40, 40), Row(150, 21, direction=RIGHT))
CUT: dict[str, Any] = {"sliding_window": 33, "soft_cap": 5.0}


def _decodes(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    yield "decode attention", *_paged(backend, heads, dtype, DECODES)
    yield "decode attention, window and cap", *_paged(backend, heads, dtype, DECODES, **CUT)


def _kv(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    yield from _decodes(backend, heads, dtype)
    yield "prefill attention", *_paged(backend, heads, dtype, (*DECODES, *CHUNKS))


def _paged(
    backend: str, heads: Heads, dtype: str, rows: Sequence[Row], **options: Any
) -> tuple[jax.Array, np.ndarray]:
    scale = heads.head_dim**-0.5
    batch, pool = _inputs(heads, dtype, list(rows))
    q = _vectors(batch, heads.num_heads, heads.head_dim, dtype, 1)
    decode_only = len(rows) == batch.max_tokens
    run = _jit(attend.paged_attention, backend, scale=scale, decode_only=decode_only, **options)
    want = reference.paged_attention(q, pool, LAYER, batch, scale=scale, **options)
    return run(q, pool, LAYER, batch), want


def _hidden(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    decodes = [Row(1, kind=HIDDEN), Row(200, kind=HIDDEN, direction=RIGHT), Row(48), Row(33)]
    chunk = Row(90, 30, kind=HIDDEN)
    scale = heads.head_dim**-0.5
    batch, pool = _inputs(heads, dtype, decodes)
    qx = _vectors(batch, heads.num_heads, heads.width, dtype, 2)
    # Of the size that folding random weights into a query gives.
    qx = qx * jnp.asarray((heads.head_dim / heads.width) ** 0.5, qx.dtype)
    got = _jit(attend.absorbed_attention, backend, scale=scale)(qx, pool, LAYER, batch)
    want = reference.absorbed_attention(qx, pool, LAYER, batch, scale=scale)
    yield "absorbed", got, want
    for rows, decode_only in ((decodes, True), ([*decodes, chunk], False)):
        batch, pool = _inputs(heads, dtype, rows)
        q = _vectors(batch, heads.num_heads, heads.head_dim, dtype, 3)
        projection = inputs.make_projection(heads, 512, jnp.dtype(dtype), inputs.host_vectors)
        run = _jit(attend.projected_attention, backend, scale=scale, decode_only=decode_only)
        want = reference.projected_attention(q, pool, LAYER, batch, projection, scale=scale)
        name = "projected decode" if decode_only else "projected prefill"
        yield name, run(q, pool, LAYER, batch, projection), want


def _copies(backend: str, heads: Heads, dtype: str) -> Iterator[Run]:
    rows = [Row(17), Row(40, 40, direction=RIGHT)]
    if heads.offers_hidden:
        rows.append(Row(30, 12, kind=HIDDEN))
    batch, pool = _inputs(heads, dtype, rows)
    k, v, x = (_vectors(batch, heads.kv_heads, heads.head_dim, dtype, seed) for seed in (4, 5, 6))

    def write(pool: jax.Array, k: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return attend.write(pool, LAYER, k, v, batch, x=x, backend=backend)

    yield "write", jax.jit(write)(pool, k, v, x), reference.write(pool, LAYER, k, v, x, batch)
    slots = np.random.default_rng(7).permutation(pool.shape[1] * BLOCK_SIZE)[:60]
    places = jnp.asarray(np.stack(np.divmod(slots, BLOCK_SIZE), axis=1), jnp.int32)
    moves, count = jnp.concatenate([places[:30], places[30:]], axis=1), 25
    moved = _jit(moving.move_slots, backend)(pool, moves, count)
    yield "move", moved, reference.move(pool, moves, count)
    staged = _jit(moving.stage_out, backend)(pool, places, count)
    yield "stage out", staged, reference.stage_out(pool, places, count)
    fresh = inputs.host_vectors(staged.shape, staged.dtype, 8)
    back = _jit(moving.stage_in, backend)(pool, fresh, places, count)
    yield "stage in", back, reference.stage_in(pool, fresh, places, count)


def _inputs(heads: Heads, dtype: str, rows: list[Row]) -> tuple[AttentionBatch, jax.Array]:
    rng = np.random.default_rng(9)
    blocks = 2 * len(rows) * -(-max(row.context for row in rows) // BLOCK_SIZE) + 3
    batch = inputs.make_batch(rows, BLOCK_SIZE, blocks, rng)
    pool = inputs.poisoned_pool(heads, LAYERS, blocks, BLOCK_SIZE, jnp.dtype(dtype), batch, rng)
    return batch, pool


def _vectors(batch: AttentionBatch, heads: int, width: int, dtype: str, seed: int) -> jax.Array:
    return inputs.host_vectors((batch.max_tokens, heads, width), jnp.dtype(dtype), seed)


def _jit(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, backend=backend, **options))


def relative_error(got: jax.Array, want: np.ndarray) -> float:
    """L2 of the difference over L2 of what is wanted; infinite if something is not a number."""
    values = np.asarray(got).astype(np.float64)
    if not np.isfinite(values).all():
        return float("inf")
    return float(np.linalg.norm(values - want) / np.linalg.norm(want))


def wrong_share(got: jax.Array, want: np.ndarray) -> float:
    """The share of elements that are not exactly equal; NaN equals NaN."""
    a, b = np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
    return float(1.0 - np.isclose(a, b, rtol=0, atol=0, equal_nan=True).mean())
