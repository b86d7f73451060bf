"""Mosaic GPU: shared memory, and the warpgroup that fills it by the copy engine (TMA). K and V go
through a ring of tiles, so that several are in flight while one is multiplied (as in
FlashAttention-3, Shah et al. 2024, section 3.1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.batch import RIGHT
from jaxserve.pallas_kernels.gpu_mosaic.common import (
    QUERIES,
    TILE,
    Options,
    Piece,
    each_piece,
    operand,
    plgpu,
)
from jaxserve.pallas_kernels.gpu_triton.common import BatchRefs, PoolRefs, Ref
from jaxserve.pallas_kernels.gpu_triton.stream_k import Shares

# Shared memory of an sm_90 multiprocessor, without that of barriers and reductions.
SHARED_BYTES = (227 - 8) * 1024
MOST_STAGES = 6


class Scratch(NamedTuple):
    """Refs in shared memory, and the barriers that synchronize the warpgroups.

    Attributes:
        q: [QUERIES, D], queries.
        k, v: [stages, TILE, D], the ring of tiles in the pool's dtype.
        wide: [2, TILE, D], a tile of K and V from a pool of 8 bits, in the queries' dtype.
        scales: float32 [stages, 2, TILE], those of the ring's K and V, if they have any.
        weights: [QUERIES, TILE], softmax weights in the queries' dtype.
        acc: float32 [QUERIES, D], stages partial sums on their way out.
        out: [QUERIES, D], stages outputs in their dtype.
        ready: Barriers, one a stage: its tile has arrived.
        free: Barriers, one a stage: its tile has been read.
    """

    q: Ref
    k: Ref
    v: Ref
    wide: Ref | None
    scales: Ref | None
    weights: Ref
    acc: Ref
    out: Ref
    ready: Ref
    free: Ref


def scratch(options: Options, dtype: Any, wide: Any, out_dtype: Any) -> Scratch:
    """The scratch types of a kernel, for `plgpu.kernel`.

    Args:
        options: The kernel's options.
        dtype: The pool's dtype.
        wide: Dtype of the matrix unit's operands.
        out_dtype: Dtype of the output.
    """
    width, narrow = options.geometry.head_dim, dtype != wide
    copied = 2 * TILE * width * jnp.dtype(dtype).itemsize
    rest = QUERIES * width * (4 + jnp.dtype(out_dtype).itemsize)
    rest += (QUERIES * (width + TILE) + 2 * TILE * width * narrow) * jnp.dtype(wide).itemsize
    stages = min(MOST_STAGES, (SHARED_BYTES - rest) // copied)
    scaled = options.geometry.scaled
    copies = (2 + 2 * scaled) * (TILE // options.page)
    return Scratch(
        q=operand(wide, QUERIES, width),
        k=operand(dtype, stages, TILE, width),
        v=operand(dtype, stages, TILE, width),
        wide=operand(wide, 2, TILE, width) if narrow else None,
        scales=plgpu.SMEM((stages, 2, TILE), jnp.float32) if scaled else None,
        weights=operand(wide, QUERIES, TILE),
        acc=plgpu.SMEM((QUERIES, width), jnp.float32),
        out=plgpu.SMEM((QUERIES, width), out_dtype),
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
    )


def stage_of(memory: Scratch, number: Any) -> Any:
    """The ring's stage for this tile, numbered through the whole program."""
    return lax.rem(number, jnp.int32(memory.k.shape[0]))


def fill(
    batch: BatchRefs,
    shares: Shares,
    pool: PoolRefs,
    memory: Scratch,
    options: Options,
) -> None:
    """The copying warpgroup's work: brings all tiles of the program into the ring, piece by piece.

    Args:
        batch: The batch's refs.
        shares: The work of all programs, as refs.
        pool: [layers, blocks, kv_heads, block_size, D] in HBM, and its scales if it has any.
        memory: The program's shared memory.
        options: The kernel's options.
    """
    stages = memory.k.shape[0]

    def bring(piece: Piece) -> None:
        def one(i: Any, _: None) -> None:
            number, stage = piece.before + i, stage_of(memory, piece.before + i)
            # Read before the wait, so that they have arrived when it ends.
            pages = _pages(batch, piece, piece.first + i, options)

            @pl.when(number >= stages)
            def _tile_is_read() -> None:
                plgpu.barrier_wait(memory.free.at[stage])

            for plane, page, block, slot in pages:
                ring = memory.v if plane else memory.k
                here = pl.ds(pl.multiple_of(slot, options.page), options.page)
                source = batch.layer[0], block, piece.head, here
                target, ready = pl.ds(page * options.page, options.page), memory.ready.at[stage]
                plgpu.copy_gmem_to_smem(pool.values.at[source], ring.at[stage, target], ready)
                if memory.scales is not None:
                    assert pool.scales is not None
                    plgpu.copy_gmem_to_smem(
                        pool.scales.at[source],
                        memory.scales.at[stage, plane, target],
                        ready,
                        # The copies of arrays, which fill up with zeros, begin at every 128 bytes.
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                    )

        lax.fori_loop(0, piece.tiles, one, None)

    each_piece(batch, shares, options, bring)


def _pages(
    batch: BatchRefs, piece: Piece, tile: Any, options: Options
) -> list[tuple[int, int, Any, Any]]:
    """(0 for K or 1 for V, number of the page in the tile, its block, its first slot there) of all
    pages of a tile of the row's context."""
    size, page = options.geometry.block_size, options.page
    last = jnp.maximum(lax.div(piece.length - 1, jnp.int32(size)), 0)
    found = []
    for i in range(TILE // page):
        position = tile * TILE + i * page
        # Beyond the context the last block is copied again, since a barrier counts the copies of a
        # tile.
        entry = jnp.minimum(lax.div(position, jnp.int32(size)), last)
        slot = lax.rem(position, jnp.int32(size))
        slot = jnp.where(batch.direction[piece.row] == RIGHT, size - page - slot, slot)
        for plane in (0, 1):
            block = batch.tables[piece.row, plane, entry]
            # An empty row may have any number in its table.
            block = jnp.minimum(jnp.maximum(block, 0), options.geometry.blocks - 1)
            found.append((plane, i, block, slot))
    return found
