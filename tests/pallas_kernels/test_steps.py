"""What holds of several functions together: what one writes another reads, and a batch's decodes
are those of the batch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    LEFT,
    RIGHT,
    make_pool,
    read_tokens,
    reference,
)
from tests.pallas_kernels import batches
from tests.pallas_kernels.batches import make_batch, vectors
from tests.pallas_kernels.cases import BY_NAME
from tests.pallas_kernels.conformance import ABSORBED, call, put, wide


def test_what_is_written_is_read_back() -> None:
    rng, shape = np.random.default_rng(0), BY_NAME["mixed"].shape
    batch = make_batch(shape, [(21, 21), (19, 19)], [LEFT, RIGHT], 0, rng)
    pool = make_pool(2, shape.blocks, 2, shape.block_size, shape.head_dim, jnp.float32)
    k, v = (vectors(shape, 2, rng, np.float32) for _ in range(2))
    pool = put("xla", pool, jnp.int32(1), k, v, batch, x=None)
    for row, start, end in ((0, 0, 21), (1, 21, 40)):
        for plane, value in enumerate((k, v)):
            table = np.asarray(batch.tables)[row, plane]
            found = read_tokens(pool, 1, table, end - start, int(batch.direction[row]))
            np.testing.assert_array_equal(found, value[start:end])
    assert not np.asarray(pool)[0].any()


def test_the_decodes_of_a_batch_alone() -> None:
    """Absorbed queries are wide, so they are made for a batch's decodes, not for all its tokens."""
    whole, case = BY_NAME["mixed"].shape, BY_NAME["decodes"]
    rows = [(9, 1), (40, 1), (41, 1), (16, 13)]
    sides, kinds = [LEFT, RIGHT, RIGHT, LEFT], [HIDDEN, KV, HIDDEN, HIDDEN]
    rng = np.random.default_rng(3)
    batch = make_batch(whole, rows, sides, 3, rng, placing=[3, 2, 0, 1], kinds=kinds)
    alone = batch.decodes()
    alone.validate()
    assert alone.max_tokens == alone.max_rows == whole.rows
    pool = batches.make_pool(whole, batch, rng, np.float32)
    qx = vectors(wide(whole), whole.kv_heads, rng, np.float32)
    want = reference.absorbed_attention(qx, pool, 0, batch, scale=case.scale)
    tokens = np.asarray(batch.query_start)
    got = np.asarray(call(ABSORBED, "xla", case, qx[tokens], pool, jnp.int32(0), alone))
    for row, kind in enumerate(kinds[:3]):
        np.testing.assert_allclose(got[row], want[tokens[row]], rtol=1e-4, atol=1e-5)
        assert np.any(got[row]) == (kind == HIDDEN)
    assert not got[3:].any()
