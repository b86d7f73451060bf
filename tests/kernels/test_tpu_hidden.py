"""The TPU kernels over hidden blocks, in TPU-interpret mode, against the float64 reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    LEFT,
    RIGHT,
    AttentionBatch,
    HiddenProjection,
    absorbed_attention,
    projected_attention,
    reference,
    tuned_tpu,
)
from tests.kernels.batches import Shape, make_batch, make_pool, make_projection, vectors
from tests.kernels.test_tpu import BFLOAT16, FLOAT32, steps

NARROW = Shape(num_heads=2, kv_heads=2, head_dim=64, block_size=8, rows=4, width=6, tokens=24)
WIDE = Shape(num_heads=2, kv_heads=2, head_dim=128, block_size=16, rows=3, width=3, tokens=20)
KINDS = (HIDDEN, HIDDEN, KV)


@functools.partial(jax.jit, static_argnames=("window", "cap", "mesh", "sizes"))
def absorb(
    qx: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    window: int | None = None,
    cap: float | None = None,
    mesh: Mesh | None = None,
    sizes: tuned_tpu.Sizes = tuned_tpu.INTERPRET,
) -> jax.Array:
    """sizes is there to trace anew for others."""
    return absorbed_attention(
        qx,
        pool,
        layer,
        batch,
        scale=0.3,
        sliding_window=window,
        soft_cap=cap,
        backend="tpu-interpret",
        mesh=mesh,
    )


def check_absorbed(
    shape: Shape,
    step: tuple[AttentionBatch, int],
    precision: tuple[jnp.dtype, float],
    window: int | None = None,
    cap: float | None = None,
    mesh: Mesh | None = None,
    sizes: tuned_tpu.Sizes = tuned_tpu.INTERPRET,
) -> None:
    (batch, seed), (dtype, limit) = step, precision
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype, window)
    wide = dataclasses.replace(shape, head_dim=shape.kv_heads * shape.head_dim)
    qx = vectors(wide, shape.num_heads, rng, dtype) / 4
    layer = seed % shape.layers
    got = absorb(qx, pool, jnp.int32(layer), batch, window, cap, mesh, sizes)
    want = reference.absorbed_attention(
        qx, pool, layer, batch, scale=0.3, sliding_window=window, soft_cap=cap
    )
    assert got.dtype == dtype
    got64 = np.asarray(got).astype(np.float64)
    assert np.all(got64[(want == 0).all(axis=(1, 2))] == 0)
    assert np.linalg.norm(got64 - want) <= limit * np.linalg.norm(want)


@settings(max_examples=4, deadline=None)
@given(step=steps(NARROW, KINDS))
def test_absorbed_in_one_pass(step: tuple[AttentionBatch, int]) -> None:
    check_absorbed(NARROW, step, FLOAT32)


@settings(max_examples=3, deadline=None)
@given(step=steps(WIDE, KINDS))
def test_absorbed_with_window_and_cap_in_bfloat16(step: tuple[AttentionBatch, int]) -> None:
    check_absorbed(WIDE, step, BFLOAT16, window=13, cap=2.0)


@settings(max_examples=3, deadline=None)
@given(step=steps(NARROW, KINDS))
def test_absorbed_in_two_passes_for_a_mesh(step: tuple[AttentionBatch, int]) -> None:
    check_absorbed(NARROW, step, FLOAT32, 13, 2.0, Mesh(jax.devices()[:1], ("tensor",)))


def test_absorbed_in_two_passes_where_vmem_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(tuned_tpu.INTERPRET, vmem=1 << 10)
    monkeypatch.setattr(tuned_tpu, "INTERPRET", small)
    rows, kinds, rng = [(48, 1), (7, 1), (17, 1)], [HIDDEN] * 3, np.random.default_rng(2)
    batch = make_batch(WIDE, rows, [LEFT, RIGHT, RIGHT], 3, rng, None, kinds)
    check_absorbed(WIDE, (batch, 2), FLOAT32, sizes=small)


@functools.partial(jax.jit, static_argnames=("window", "decode_only"))
def project(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    batch: AttentionBatch,
    projection: HiddenProjection,
    window: int | None,
    decode_only: bool,
) -> jax.Array:
    return projected_attention(
        q,
        pool,
        layer,
        batch,
        projection,
        scale=0.3,
        sliding_window=window,
        decode_only=decode_only,
        backend="tpu-interpret",
    )


def check_projected(
    shape: Shape,
    step: tuple[AttentionBatch, int],
    precision: tuple[jnp.dtype, float],
    window: int | None = None,
    **parts: bool,
) -> None:
    (batch, seed), (dtype, limit) = step, precision
    rng = np.random.default_rng(seed)
    pool = make_pool(shape, batch, rng, dtype, window)
    projection = make_projection(shape, rng, dtype, **parts)
    q = vectors(shape, shape.num_heads, rng, dtype)
    layer = seed % shape.layers
    decode_only = shape.tokens == shape.rows
    got = project(q, pool, jnp.int32(layer), batch, projection, window, decode_only)
    want = reference.projected_attention(
        q, pool, layer, batch, projection, scale=0.3, sliding_window=window
    )
    assert got.dtype == dtype
    got64 = np.asarray(got).astype(np.float64)
    assert np.all(got64[(want == 0).all(axis=(1, 2))] == 0)
    assert np.linalg.norm(got64 - want) <= limit * np.linalg.norm(want)


@settings(max_examples=4, deadline=None)
@given(step=steps(NARROW, KINDS))
def test_projected_with_rotation(step: tuple[AttentionBatch, int]) -> None:
    check_projected(NARROW, step, FLOAT32, rotary=True)


@settings(max_examples=3, deadline=None)
@given(step=steps(WIDE, KINDS))
def test_projected_with_bias_norm_and_window_in_bfloat16(step: tuple[AttentionBatch, int]) -> None:
    check_projected(WIDE, step, BFLOAT16, 13, bias=True, norm=True, rotary=True)


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_projected_decodes(data: st.DataObject) -> None:
    shape = dataclasses.replace(WIDE, tokens=WIDE.rows)
    check_projected(shape, data.draw(steps(shape, KINDS)), FLOAT32, bias=True)
