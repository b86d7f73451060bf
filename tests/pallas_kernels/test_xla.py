"""What is only XLA's: tiles of queries wider than the shared cases' steps, single rows, and updates
in place."""

from __future__ import annotations

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    LEFT,
    RIGHT,
    AttentionBatch,
    get_backend,
    move_slots,
    paged_attention,
    write,
)
from jaxserve.pallas_kernels.xla import attention as xla_attention
from jaxserve.pallas_kernels.xla.gather import chunk_blocks
from tests.compiling import OPTIMISED
from tests.pallas_kernels import edges
from tests.pallas_kernels.batches import Shape, make_batch
from tests.pallas_kernels.cases import Case
from tests.pallas_kernels.conformance import PAGED, PROJECTED, Attention
from tests.pallas_kernels.edges import Edge

LONG = Case("long", Shape(4, 2, rows=4, width=20, tokens=150), window=40, parts=("rotary",))


@pytest.mark.parametrize("edge", [edges.prompt, edges.any_order, edges.far_chunks])
@pytest.mark.parametrize("attention", [PAGED, PROJECTED], ids=lambda attention: attention.name)
def test_chunks_of_more_than_one_tile(attention: Attention, edge: Edge) -> None:
    assert LONG.shape.tokens > xla_attention.TILE_QUERIES
    attention.check("xla", LONG, edge(LONG.shape, attention.kind), 1)


@pytest.mark.parametrize("direction", [LEFT, RIGHT])
def test_a_single_rows_blocks_are_read_one_by_one(direction: int) -> None:
    case = Case("one-row", Shape(4, 1, rows=1, width=12, tokens=1))
    for context in (0, 1, 8, 9, 95, 96):
        rows, rng = [(context, 1)] if context else [], np.random.default_rng(context)
        batch = make_batch(case.shape, rows, [direction], len(rows), rng)
        PAGED.check("xla", case, batch, context)


def assert_in_place(compiled: jax.stages.Compiled, pool: jax.ShapeDtypeStruct) -> None:
    """A copy of the pool would show as temporary memory of its size."""
    memory, size = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 4


def test_writes_in_a_scan_are_in_place() -> None:
    """The engine's pattern: layers scanned with the donated pool as carry."""
    shape = Shape(num_heads=2, kv_heads=2, rows=4, tokens=4, width=4, layers=3)
    batch = make_batch(shape, [(9, 1), (32, 1)], [LEFT, RIGHT], 2, np.random.default_rng(2))
    x = jax.ShapeDtypeStruct((4, 2, shape.head_dim), jnp.float32)

    def step(pool: jax.Array, x: jax.Array, batch: AttentionBatch) -> tuple[jax.Array, jax.Array]:
        def layer(
            carry: tuple[jax.Array, jax.Array], i: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            pool, x = carry
            pool = write(pool, i, x, x, batch)
            return (pool, paged_attention(x, pool, i, batch, scale=1.0, decode_only=True)), None

        (pool, x), _ = jax.lax.scan(layer, (pool, x), jnp.arange(3))
        return pool, x

    pool = jax.ShapeDtypeStruct((3, 4000, 2, shape.block_size, shape.head_dim), jnp.float32)
    assert_in_place(jax.jit(step, donate_argnums=0).lower(pool, x, batch).compile(OPTIMISED), pool)


def test_moves_are_in_place() -> None:
    pool = jax.ShapeDtypeStruct((3, 4000, 2, 8, 16), jnp.float32)
    moves = jax.ShapeDtypeStruct((16, 4), jnp.int32)
    assert_in_place(
        jax.jit(move_slots, donate_argnums=0).lower(pool, moves, 3).compile(OPTIMISED), pool
    )


@pytest.mark.parametrize(("block_size", "width"), [(16, 32), (16, 3), (24, 9), (128, 2)])
def test_the_cost_model_is_told_how_much_a_group_reads_at_once(block_size: int, width: int) -> None:
    batch = Mock(spec=AttentionBatch, table_width=width)
    chunk = chunk_blocks(xla_attention.DECODE_CONTEXT, block_size, batch)
    assert get_backend("xla").chunk_tokens(block_size, width) == chunk * block_size
