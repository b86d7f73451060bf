"""Common parts of the Mosaic GPU kernels: their shape, and contexts in equal shares, one per
program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels import online_softmax
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import common, tuning
from jaxserve.pallas_kernels.gpu_triton.common import (
    BatchRefs,
    Geometry,
    Ref,
    decode_row,
)
from jaxserve.pallas_kernels.gpu_triton.decode import decode_shares
from jaxserve.pallas_kernels.gpu_triton.stream_k import Segment, Shares, for_each_segment
from jaxserve.pallas_kernels.online_softmax import Softmax

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
        return math.gcd(self.geometry.block_size, self.tile)


class Piece(NamedTuple):
    """One program's part of one row for one KV head. All fields are scalars.

    Attributes:
        head: KV head.
        row: Row of the batch.
        first: First tile of the part, counted in tiles of the row's context.
        tiles: Number of tiles.
        before: Tiles of the program before it.
        lower, length: Visible positions, [lower, length).
        whole: Whether the part is everything that the row sees.
        place: If not, index of its partial state: each program has two.
    """

    head: Any
    row: Any
    first: Any
    tiles: Any
    before: Any
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
    batch: BatchRefs, shares: Shares, options: Options, body: Callable[[Piece], None]
) -> None:
    """Runs a body for every piece of the program.

    Args:
        batch: The batch's refs.
        shares: The work of all programs, as refs.
        options: The kernel's options.
        body: Takes the piece.
    """

    def one(segment: Segment) -> None:
        row = segment.item
        length, _ = decode_row(batch, row, KV, decode_only=True)
        lower = options.lower(length)
        first = lax.div(lower, jnp.int32(TILE)) + segment.begin
        tiles, whole, place = segment.end - segment.begin, segment.whole, segment.place
        where = (segment.head, row, first, tiles, segment.before)
        body(Piece(*where, lower, length, whole, place))

    for_each_segment(shares, one, lax.axis_index(GRID))


def operand(dtype: DTypeLike, *shape: int) -> Any:
    """The type of shared memory [..., M, K] in the matrix unit's layout."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def multiply(a: Ref, b: Ref) -> jax.Array:
    """a @ b of shared memory -> float32, in the register layout of wgmma."""

    def run(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        product: jax.Array = acc[...]
        return product

    shape = (a.shape[0], b.shape[1])
    product: jax.Array = pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
    return product


def across(values: jax.Array, width: int) -> jax.Array:
    """[M] -> [M, width]."""
    return lax.broadcast_in_dim(values, (values.shape[0], width), (0,))


def start(rows: int, width: int) -> Softmax:
    """`online_softmax.start` in the register layout of wgmma."""
    products = plgpu.Layout.WGMMA
    peak, total, acc = online_softmax.start(rows, width)
    return Softmax(
        plgpu.layout_cast(peak, products.reduce(1)),
        plgpu.layout_cast(total, products.reduce(1)),
        plgpu.layout_cast(acc, products),
    )


def finished(state: Softmax) -> jax.Array:
    """`online_softmax.finish` in the register layout of wgmma."""
    total = jnp.where(state.total == 0, 1.0, state.total)
    return state.acc / across(total, state.acc.shape[1])
