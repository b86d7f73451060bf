"""One step of each kernel, by any backend, held against its reference in float64.

What no batch may read holds NaN and infinities: unused slots of the pool, queries and new vectors
of tokens that do not count. So a stray read shows in the result, and so does output that was not
written, which both interpreters fill with NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    AttentionBatch,
    absorbed_attention,
    get_backend,
    paged_attention,
    projected_attention,
    reference,
    write,
)
from jaxserve.pallas_kernels.pool import FLOAT8, ScaledPool, halves_wide
from jaxserve.pallas_kernels.reference import as_cached, as_numbers
from tests.pallas_kernels.batches import (
    Shape,
    in_bytes,
    make_pool,
    make_projection,
    tokens_of,
    vectors,
)
from tests.pallas_kernels.cases import LATENT, NARROW, Case, compiled

Check = Callable[[str, Case, AttentionBatch, int], None]
# The shared cases of each function: those that reach code of its own.
BOTH = ("decodes", "cut-decodes", "cut-mixed", "odd", *NARROW)
WRITES = ("decodes", "mixed", "cut-mixed", "odd", *NARROW)


def put(backend: str, *arguments: Any, **more: Any) -> jax.Array:
    """`write`, in place; a pool in NumPy is copied first."""
    pool, *rest = arguments
    return compiled(write, backend, donate=True)(jax.tree.map(jnp.array, pool), *rest, **more)


def same(got: jax.Array | np.ndarray, want: np.ndarray) -> None:
    """A copy is one of bits: NaN and the sign of zeros count."""
    assert got.dtype == want.dtype
    found, wanted = np.asarray(got).astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def near(got: ScaledPool, before: ScaledPool, want: np.ndarray, written: np.ndarray) -> None:
    """The vectors that were written, bool [layers, blocks, kv_heads, block_size], are off by half a
    step at most, their largest elements by next to nothing; the others are what they were."""
    same(got.values[~written], before.values[~written])
    same(got.scales[~written], before.scales[~written])
    found, wanted = as_numbers(got)[written], want[written]
    top = np.abs(wanted).max(axis=-1, keepdims=True)
    assert np.all(np.abs(found - wanted) <= top / 127 * 0.50001)
    np.testing.assert_allclose(np.abs(found).max(axis=-1, keepdims=True), top, rtol=1e-6)


def close(
    got: jax.Array, want: np.ndarray, used: np.ndarray, case: Case, limit: float | None = None
) -> None:
    """Within a limit of the reference (None: the case's), and zero for tokens that do not count,
    bool [T]."""
    assert got.dtype == case.dtype
    found = np.asarray(got).astype(np.float64)
    assert np.all(found[~used] == 0)
    assert np.linalg.norm(found - want) <= (limit or case.limit) * np.linalg.norm(want)


def wide(shape: Shape) -> Shape:
    """The shape whose vectors are as wide as a hidden vector."""
    return dataclasses.replace(shape, head_dim=shape.head_dim * shape.kv_heads)


def check_write(
    backend: str, case: Case, batch: AttentionBatch, seed: int, *, with_x: bool = True
) -> None:
    """Every slot that is not written keeps what it has, NaN included. with_x: whether rows of the
    batch can be hidden."""
    rng, shape = np.random.default_rng(seed), case.shape
    pool = as_cached(make_pool(shape, batch, rng, np.float32), case.cached)
    used = tokens_of(batch, KV) | tokens_of(batch, HIDDEN)
    k, v, x = (vectors(shape, shape.kv_heads, rng, np.float32, used) for _ in range(3))
    layer, given = seed % shape.layers, x if with_x else None
    got = put(backend, pool, jnp.int32(layer), k, v, batch, x=given)
    if isinstance(pool, ScaledPool):
        wide = reference.write(as_numbers(pool), layer, k, v, given, batch)
        marks = (None if one is None else np.ones_like(one) for one in (k, v, given))
        written = reference.write(np.zeros(pool.shape), layer, *marks, batch).any(axis=-1)
        near(got, pool, wide, written)
        return
    same(got, reference.write(pool, layer, k, v, given, batch))


def _sinks(num_heads: int) -> jax.Array:
    """Some that take all, some that take next to nothing, and others."""
    return jnp.asarray([40.0, -40.0, 0.5, 2.0, -1.0, 1.0] * num_heads, jnp.float32)[:num_heads]


# Of K and V that are rounded to 8 bits as a pool would hold them, see test_attention_invariance.py.
_AS_STORED = {"int8": 0.01, FLOAT8: 0.05}


@dataclasses.dataclass(frozen=True)
class Attention:
    """One of the attention functions with its reference, and the shared cases that reach code of
    its own. purpose: of `Backend`'s fields. kind: of the rows that it is about."""

    name: str
    purpose: str
    kind: int
    cases: tuple[str, ...]
    function: Callable[..., jax.Array]
    reference: Callable[..., np.ndarray]

    def arguments(self, case: Case, batch: AttentionBatch, seed: int) -> tuple[Any, ...]:
        """(queries, pool, layer, batch), and the projection where it takes one."""
        rng, shape = np.random.default_rng(seed), case.shape
        drawn = make_pool(shape, batch, rng, np.float32, case.window)
        pool = as_cached(drawn, case.cached)
        if halves_wide(case.cached, case.halves):
            pool = in_bytes(drawn, batch, case.cached, case.halves)
        heads = shape.num_heads if self.kind == KV else shape.kv_heads
        width = wide(shape) if self.name == "absorbed" else shape
        if case.halves:
            width = dataclasses.replace(shape, head_dim=2 * shape.head_dim)
        queries = vectors(width, heads, rng, case.dtype, self.used(batch))
        given = queries, pool, jnp.int32(seed % shape.layers), batch
        if self.name != "projected":
            return given
        parts = dict.fromkeys(case.parts, True)
        return (*given, make_projection(shape, rng, case.dtype, **parts))

    def used(self, batch: AttentionBatch) -> np.ndarray:
        """bool [T]: the tokens that it is about; it gives zeros for the others."""
        return tokens_of(batch, self.kind, decodes=self.name == "absorbed")

    def options(self, case: Case) -> dict[str, Any]:
        """What the function and its reference take besides."""
        found = {"scale": case.scale, "sliding_window": case.window, "soft_cap": case.cap}
        if self.name == "paged" and case.sinks:
            found["sinks"] = _sinks(case.shape.num_heads)
        if case.halves:
            found["halves"] = case.halves
        return found

    def step_options(self, case: Case) -> dict[str, Any]:
        """What the function takes besides, of steps of this case."""
        only = {} if self.name == "absorbed" else {"decode_only": case.shape.decode_only}
        return self.options(case) | only

    def check(self, backend: str, case: Case, batch: AttentionBatch, seed: int) -> None:
        """On arguments drawn by the seed."""
        run = functools.partial(call, self, backend, case)
        limit = None
        if self.name == "projected" and get_backend(backend).batch_invariant:
            limit = _AS_STORED.get(case.cached)
        self.check_run(run, case, batch, seed, limit)

    def check_run(
        self,
        run: Callable[..., jax.Array],
        case: Case,
        batch: AttentionBatch,
        seed: int,
        limit: float | None = None,
    ) -> None:
        """Of anything that takes the function's arguments and gives its result. limit: see
        `close`."""
        given = self.arguments(case, batch, seed)
        queries, pool, layer, *rest = given
        numbers = as_numbers(pool, case.halves)
        want = self.reference(queries, numbers, int(layer), *rest, **self.options(case))
        close(run(*given), want, self.used(batch), case, limit)


@functools.cache
def _with_options(attention: Attention, case: Case) -> Callable[..., jax.Array]:
    return functools.partial(attention.function, **attention.step_options(case))


def call(attention: Attention, backend: str, case: Case, *arguments: Any) -> jax.Array:
    """The function by this backend with the case's options; compiled once for each of them."""
    return compiled(_with_options(attention, case), backend)(*arguments)


PAGED = Attention(
    "paged", "attend", KV, (*BOTH, "mixed", *LATENT), paged_attention, reference.paged_attention
)
ABSORBED = Attention(
    "absorbed", "absorbed", HIDDEN, BOTH, absorbed_attention, reference.absorbed_attention
)
PROJECTED = Attention(
    "projected",
    "projected",
    HIDDEN,
    (*BOTH, "mixed"),
    projected_attention,
    reference.projected_attention,
)
ATTENTION = (PAGED, ABSORBED, PROJECTED)
