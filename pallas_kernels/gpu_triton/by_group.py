"""Products of rows with the weights of their group, see `grouped_matmul`, on Pallas-Triton. XLA for
GPUs would multiply all rows with the weights of every group. A program computes a tile of the
result with rows of one group. It reads only that group's weights; weights of groups without rows
are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels.gpu_triton import common

_LEAST = 16  # of each side of a tensor core's product
_COLUMNS, _TURN = 128, 64  # most columns of a tile, and inputs per iteration
_ROWS = (16, 32, 64, 128)  # of a tile: the smallest that fits the mean group


class Tiles(NamedTuple):
    """The rows of each tile.

    Attributes:
        group: int32 [tiles], the group.
        start: int32 [tiles], the first row.
        stop: int32 [tiles], the end of the rows.
    """

    group: jax.Array
    start: jax.Array
    stop: jax.Array


def choose(
    weights: Any, *, transposed: bool, interpret: bool = False
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None:
    """The kernel for weights of this shape; None if there is none. Those of float32 are XLA's."""
    _, inputs, outputs = weights.shape
    whole = inputs % _TURN == 0 and outputs % _LEAST == 0
    if transposed or weights.dtype not in (jnp.bfloat16, jnp.float16) or not whole:
        return None
    return functools.partial(_matmul, interpret=interpret)


def tiles_of(sizes: jax.Array, rows: int, count: int) -> Tiles:
    """Cuts groups of these sizes, int32 [groups], into tiles.

    Args:
        sizes: rows of each group, one group after the other.
        rows: rows of a tile.
        count: number of all rows.

    Returns:
        The most tiles that there may be; surplus tiles have no rows.
    """
    most = count // rows + min(count, len(sizes))
    each = (sizes + rows - 1) // rows
    last, begin = jnp.cumsum(each), jnp.cumsum(sizes) - sizes
    index = jnp.arange(most, dtype=jnp.int32)
    # Compares with all groups: a search is a loop, for which GPUs would return to the host.
    group = jnp.searchsorted(last, index, side="right", method="compare_all")
    group = jnp.minimum(group, len(sizes) - 1)
    start = begin[group] + rows * (index - (last - each)[group])
    stop = jnp.minimum(start + rows, (begin + sizes)[group])
    used = index < last[-1]
    found = (group, jnp.where(used, start, 0), jnp.where(used, stop, 0))
    return Tiles(*(one.astype(jnp.int32) for one in found))


def _matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array, *, interpret: bool) -> jax.Array:
    """x [T, in] by group, weights [groups, in, out] -> float32 [T, out]."""
    count, (groups, _, outputs) = len(x), weights.shape
    each = common.cdiv(count, groups)
    rows = next((rows for rows in _ROWS if each <= rows), _ROWS[-1])
    columns = _COLUMNS
    while outputs % columns:
        columns //= 2
    tiles = tiles_of(sizes, rows, count)
    call = pl.pallas_call(
        functools.partial(_kernel, rows=rows, columns=columns),
        out_shape=jax.ShapeDtypeStruct((count, outputs), jnp.float32),
        grid=(outputs // columns, len(tiles.group)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="by_group",
    )
    y: jax.Array = call(x, weights, *tiles)
    # No tile writes the rows after the last group.
    return jnp.where(jnp.arange(count)[:, None] < sizes.sum(), y, 0)


def _kernel(
    x_ref: Any, w_ref: Any, group_ref: Any, start_ref: Any, stop_ref: Any, out_ref: Any,
    *, rows: int, columns: int,
) -> None:  # fmt: skip
    tile = pl.program_id(1)
    group, start, stop = group_ref[tile], start_ref[tile], stop_ref[tile]
    row = start + jnp.arange(rows)
    inside = row < stop
    first = pl.program_id(0) * columns
    mine, column = pl.ds(first, columns), first + jnp.arange(columns)

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        depth = index * _TURN + jnp.arange(_TURN)
        at = x_ref.at[row[:, None], depth[None, :]]
        x = plgpu.load(at, mask=jnp.broadcast_to(inside[:, None], (rows, _TURN)), other=0)
        return total + plgpu.dot(x, w_ref[group, pl.ds(index * _TURN, _TURN), mine])

    @pl.when(start < stop)
    def _has_rows() -> None:
        total = lax.fori_loop(
            0, x_ref.shape[1] // _TURN, one, jnp.zeros((rows, columns), jnp.float32)
        )
        at = out_ref.at[row[:, None], column[None, :]]
        plgpu.store(at, total, mask=jnp.broadcast_to(inside[:, None], total.shape))
