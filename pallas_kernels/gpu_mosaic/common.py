"""Common parts of the Mosaic GPU kernels: their shape, and contexts in equal shares, one per
program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import common, tuning
from jaxserve.pallas_kernels.gpu_triton.common import (
    BatchRefs,
    Geometry,
    decode_row,
)
from jaxserve.pallas_kernels.gpu_triton.decode import decode_shares
from jaxserve.pallas_kernels.gpu_triton.stream_k import Shares, bounds

plgpu: Any = mosaic_gpu  # jax 0.10 has less in it, which type checkers would mind
OLDEST_JAX = (0, 12)

QUERIES = 64  # rows of a warpgroup's product: the heads of a group, and padding
TILE = 64  # tokens of context per iteration
GRID, WARPGROUP = "program", "warpgroup"  # axes


def missing() -> str | None:
    """Why the kernels cannot be built with the jax that is installed, or None."""
    if jax.__version_info__[:2] >= OLDEST_JAX:
        return None
    wanted = ".".join(map(str, OLDEST_JAX))
    return f"jax: must be {wanted} or newer (Python 3.12) for Mosaic GPU, got {jax.__version__}"


class Options(common.Options):
    """The options of the Triton kernels, and the size of a copy."""

    @property
    def page(self) -> int:
        """Tokens of one copy, all in one block: a power of two."""
        return min(self.geometry.block_size, TILE)


class Piece(NamedTuple):
    """One program's part of one row for one KV head. All fields are scalars.

    Attributes:
        head: KV head.
        row: Row of the batch.
        first: First tile of the part, counted in tiles of the row's context.
        tiles: Number of tiles; 0 for none.
        lower, length: Visible positions, [lower, length).
        whole: Whether the part is everything that the row sees.
        place: If not, index of its partial state: each program has two.
    """

    head: Any
    row: Any
    first: Any
    tiles: Any
    lower: Any
    length: Any
    whole: Any
    place: Any


def plan(batch: AttentionBatch, geometry: Geometry, *, sliding_window: int | None) -> Shares:
    """Plans decodes over a pool of this geometry. An item is a row of the batch; a row without work
    gets one tile, which writes zeros."""
    # One program per multiprocessor, which keeps copies in flight from one row to the next.
    return decode_shares(batch, geometry, tuning.Launch(TILE), sliding_window, decode_only=True)


def each_piece(
    batch: BatchRefs, shares: Shares, options: Options, body: Callable[[Piece, Any], None]
) -> None:
    """Runs a body for every piece of the program that has any tiles.

    Args:
        batch: The batch's refs.
        shares: The work of all programs, as refs.
        options: The kernel's options.
        body: (piece, number of this program's tiles before it).
    """
    program = lax.axis_index(GRID)

    def one(number: Any, before: Any) -> Any:
        piece = _piece(batch, shares, program, number, options)

        @pl.when(piece.tiles > 0)  # a row may have none
        def _run() -> None:
            body(piece, before)

        return before + piece.tiles

    lax.fori_loop(shares.first[program], shares.end[program], one, jnp.int32(0))


def _piece(batch: BatchRefs, shares: Shares, program: Any, number: Any, options: Options) -> Piece:
    head, row, begin, end = bounds(shares, number)
    share = program * shares.size[0]
    low, high = jnp.maximum(begin, share), jnp.minimum(end, share + shares.size[0])
    length, _ = decode_row(batch, row, KV, decode_only=True)
    lower = options.lower(length)
    return Piece(
        head=head,
        row=row,
        first=lax.div(lower, jnp.int32(TILE)) + low - begin,
        tiles=jnp.maximum(high - low, 0),
        lower=lower,
        length=length,
        whole=(low == begin) & (high == end),
        # Only a share's first piece can begin inside a row.
        place=2 * program + (low == begin).astype(jnp.int32),
    )
