"""Work of unequal length as one sequence of tiles, cut into equal shares, one a program.

Stream-K (Osama et al. 2023, section 4), on attention as in Lean Attention (Sanovar et al. 2024): an
item of work (a decode row, a tile of queries) is some tiles of context, once for each head. All of
them lie one after another, head by head, and a program takes the next so many, wherever an item
begins or ends: no program has more to read than another, however long the longest context is. What
a program has of an item that others have the rest of is a part, merged by `triton_merge`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.gpu_triton.common import BatchRefs, Ref, cdiv
from jaxserve.pallas_kernels.gpu_triton.tuning import Cutting


class Shares(NamedTuple):
    """Who takes what: int32 arrays, or refs of them. An item is counted once for each head: that of
    number head * used + i is item i of a head."""

    starts: Any  # [N + 1], where in a head's tiles each item begins; last: tiles of a head
    used: Any  # [1], items of a head, without the empty ones at the end
    size: Any  # [1], tiles of a share
    first: Any  # [P], number of the first item of each share,
    end: Any  # [P], and of the first that is not in it


class Segment(NamedTuple):
    """What one program has of one item, scalars.

    begin, end: of the item's tiles. whole: that is all of them. place: where its part goes, if not,
    of two places a program.
    """

    head: jax.Array
    item: jax.Array
    begin: jax.Array
    end: jax.Array
    whole: jax.Array
    place: jax.Array


def unpacked(
    refs: tuple[Ref, ...], others: int = 0
) -> tuple[BatchRefs, tuple[Ref, ...], Shares, tuple[Ref, ...]]:
    """A kernel's refs: the batch, so many others, the shares, and the rest."""
    first = len(BatchRefs._fields)
    second, third = first + others, first + others + len(Shares._fields)
    return BatchRefs(*refs[:first]), refs[first:second], Shares(*refs[second:third]), refs[third:]


def cut(tiles: jax.Array, heads: int, cutting: Cutting) -> Shares:
    """Items of `tiles` int32 [N] (0: none) tiles, for each of `heads` heads, in equal shares."""
    number = jnp.arange(1, len(tiles) + 1, dtype=jnp.int32)
    # A sum of its own for each, since XLA makes several kernels of a running one.
    ends = jnp.sum(jnp.where(number <= number[:, None], tiles, 0), axis=1, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    used = jnp.max(jnp.where(tiles > 0, number, 0))
    total = ends[-1] * heads
    size = jnp.minimum(cutting.most, cdiv(total, cutting.fill))
    size = jnp.maximum(jnp.maximum(size, cutting.least), cdiv(total, cutting.programs))
    begin = jnp.minimum(jnp.arange(cutting.programs, dtype=jnp.int32) * size, total)
    end = jnp.minimum(begin + size, total)

    def item_of(place: jax.Array) -> jax.Array:
        head, rest = jnp.divmod(place, jnp.maximum(ends[-1], 1))
        return head * used + jnp.sum(ends <= rest[:, None], axis=1, dtype=jnp.int32)

    first = item_of(begin)
    return Shares(
        starts,
        used.reshape(1),
        size.reshape(1),
        first,
        jnp.where(begin < end, item_of(end - 1) + 1, first),
    )


def bounds(shares: Shares, number: jax.Array) -> tuple[jax.Array, ...]:
    """(head, item, begin, end) of the item of this number, begin and end in the sequence of all
    heads' tiles; of refs, in a kernel."""
    items = shares.starts.shape[0] - 1
    head, item = lax.div(number, shares.used[0]), lax.rem(number, shares.used[0])
    before = head * shares.starts[items]
    return head, item, before + shares.starts[item], before + shares.starts[item + 1]


def for_each_segment(shares: Shares, body: Callable[[Segment], None]) -> None:
    """Run the body for every segment of the share of program pl.program_id(0), which may have none:
    then it is for something else."""
    program, size = pl.program_id(0), shares.size[0]
    share_begin = program * size
    share_end = share_begin + size

    def one_item(number: jax.Array, _: None) -> None:
        head, item, begin, end = bounds(shares, number)
        low, high = jnp.maximum(begin, share_begin), jnp.minimum(end, share_end)

        @pl.when(low < high)  # an item may be empty
        def _run() -> None:
            whole = (low == begin) & (high == end)
            # Only a share's first segment can begin inside an item.
            place = 2 * program + (low == begin).astype(jnp.int32)
            body(Segment(head, item, low - begin, high - begin, whole, place))

    @pl.when(program < shares.first.shape[0])
    def _has_share() -> None:
        lax.fori_loop(shares.first[program], shares.end[program], one_item, None)
