"""What the interface refuses, by name and limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    HIDDEN,
    block_bytes,
    make_pool,
    paged_attention,
    read_tokens,
    resolve_backend,
    write_kv,
)
from tests.kernels.batches import Shape, make_batch, vectors

SHAPE = Shape(num_heads=4, kv_heads=2)
RNG = np.random.default_rng(0)
BATCH = make_batch(SHAPE, [(3, 1)], [0], 1, RNG)
POOL = make_pool(2, SHAPE.blocks, 2, SHAPE.block_size, SHAPE.head_dim, jnp.float32)
Q = vectors(SHAPE, 4, RNG, jnp.float32)
K = vectors(SHAPE, 2, RNG, jnp.float32)


def attend(**changes: Any) -> jax.Array:
    given = {"q": Q, "pool": POOL, "layer": 0, "batch": BATCH, "scale": 1.0, "decode_only": True}
    return paged_attention(**{**given, **changes})


def changed(**fields: jax.Array) -> dict[str, Any]:
    return {"batch": dataclasses.replace(BATCH, **fields)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[:, :, :8]}, r"q: want .*\(5, \*, 16\)"),
        ({"q": Q[:4]}, "q: want"),
        ({"q": Q[:, :3]}, "q: 3 heads are not a multiple of the pool's 2"),
        ({"pool": POOL[0]}, "pool: want"),
        ({"pool": POOL.astype(jnp.int32)}, "pool: want a floating dtype"),
        ({"layer": 2}, r"layer: must be in \[0, 2\), got 2"),
        ({"layer": 0.0}, "layer: want an integer"),
        ({"sliding_window": 0}, "sliding_window: must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap: must be positive"),
        ({"kind": 7}, "kind: must be KV"),
        ({"backend": "cuda"}, "backend: must be auto or one of .*xla"),
        ({"mesh": jax.make_mesh((1,), ("data",))}, "mesh: needs an axis 'tensor'"),
        (changed(tables=BATCH.tables[:, 0]), "batch.tables: want"),
        (changed(direction=BATCH.direction[:3]), r"batch.direction: want \[5\]"),
        (changed(num_rows=BATCH.direction), "batch.num_rows: want a scalar"),
        (changed(token_row=BATCH.token_row.astype(jnp.uint8)), "batch.token_row: want int32"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**changes)


def test_hidden_blocks_are_not_readable_yet() -> None:
    with pytest.raises(NotImplementedError, match="kind: hidden"):
        attend(kind=HIDDEN)


def test_decode_only_needs_a_token_a_row() -> None:
    shape = dataclasses.replace(SHAPE, tokens=8)
    batch = make_batch(shape, [(3, 3)], [0], 0, RNG)
    with pytest.raises(ValueError, match="decode_only: needs as many tokens as rows, got 8 and 5"):
        attend(q=vectors(shape, 4, RNG, jnp.float32), batch=batch)


def test_write_refuses_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"v: want .*\(5, 2, 16\), got \(5, 4, 16\)"):
        write_kv(POOL, 0, K, Q, BATCH)
    with pytest.raises(ValueError, match="backend: must be"):
        write_kv(POOL, 0, K, K, BATCH, backend="none")


def test_pool() -> None:
    assert block_bytes(12, 12, 16, 64, jnp.bfloat16) == 12 * 12 * 16 * 64 * 2
    with pytest.raises(ValueError, match="num_blocks: must be at least 1, got 0"):
        make_pool(1, 0, 1, 1, 1, jnp.float32)
    with pytest.raises(ValueError, match=r"dtype: must be one of .*float16.*, got int8"):
        make_pool(1, 1, 1, 1, 1, jnp.int8)
    table = np.arange(2)
    with pytest.raises(ValueError, match=r"length: must be in \[0, 16\]"):
        read_tokens(POOL, 0, table, 17, 0)
    with pytest.raises(ValueError, match="direction: must be LEFT"):
        read_tokens(POOL, 0, table, 1, 2)
    with pytest.raises(ValueError, match=r"table_row: block ids must be in"):
        read_tokens(POOL, 0, table - 1, 16, 0)
    assert read_tokens(POOL, 0, table, 0, 0).shape == (0, 2, 16)


def test_auto_is_a_backend() -> None:
    assert resolve_backend("auto") == "xla"
    np.testing.assert_array_equal(attend(backend="auto"), attend(backend="xla"))
