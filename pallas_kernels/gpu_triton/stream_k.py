"""Work of unequal length as one sequence of tiles, cut into equal shares, one per program.

Stream-K (Osama et al. 2023, section 4), on attention as in Lean Attention (Sanovar et al. 2024): an
item of work (a decode row, a tile of queries) is some tiles of context, once for each head. All of
them lie one after another, head by head, and a program takes the next tiles up to its share,
wherever an item begins or ends: no program reads more than another, however long the longest
context is. If several programs share an item, each has a part of it, merged by `merge`.
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
    """Work as a sequence of items, and each program's share of it: int32 arrays, or refs of them.

    Each head has the same N items. Item i of a head has the number head * used + i.

    Attributes:
        starts: [N + 1], each item's first tile in the head's sequence, then the head's number of
            tiles.
        used: [1], items of a head, without the empty ones at the end.
        size: [1], tiles of a share.
        first: [P], number of the first item of each share.
        end: [P], number after the last item of each share.
    """

    starts: Any
    used: Any
    size: Any
    first: Any
    end: Any


class Segment(NamedTuple):
    """One program's part of one item. All fields are scalars.

    Attributes:
        head: Head of the item.
        item: Index of the item, the same for all heads.
        begin, end: Tiles of the part, counted from the item's first; end not included.
        whole: Whether the part is the whole item.
        place: If not, index of its partial state: each program has two.
        before: Tiles of the program before it.
    """

    head: jax.Array
    item: jax.Array
    begin: jax.Array
    end: jax.Array
    whole: jax.Array
    place: jax.Array
    before: jax.Array


def unpacked(
    refs: tuple[Ref, ...], others: int = 0
) -> tuple[BatchRefs, tuple[Ref, ...], Shares, tuple[Ref, ...]]:
    """Splits a kernel's refs into the batch, `others` refs of its own, the shares, and the rest."""
    first = len(BatchRefs._fields)
    second, third = first + others, first + others + len(Shares._fields)
    return BatchRefs(*refs[:first]), refs[first:second], Shares(*refs[second:third]), refs[third:]


def cut(tiles: jax.Array, heads: int, cutting: Cutting) -> Shares:
    """Cuts items into equal shares. tiles: int32 [N], tiles of each item (0: none), the same for
    each of `heads` heads."""
    number = jnp.arange(1, len(tiles) + 1, dtype=jnp.int32)
    # A separate sum for each, since XLA makes several kernels of a cumulative sum.
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
    """(head, item, begin, end) of the item with this number. begin and end count through the tiles
    of all heads. For refs, inside a kernel."""
    items = shares.starts.shape[0] - 1
    head, item = lax.div(number, shares.used[0]), lax.rem(number, shares.used[0])
    before = head * shares.starts[items]
    return head, item, before + shares.starts[item], before + shares.starts[item + 1]


def for_each_segment(
    shares: Shares, body: Callable[[Segment], None], program: jax.Array | None = None
) -> None:
    """Runs the body for every segment of a program (None: pl.program_id(0)). Programs after the
    shares have none."""
    program = pl.program_id(0) if program is None else program
    share_begin = program * shares.size[0]
    share_end = share_begin + shares.size[0]

    def one_item(number: jax.Array, _: None) -> None:
        head, item, begin, end = bounds(shares, number)
        low, high = jnp.maximum(begin, share_begin), jnp.minimum(end, share_end)

        @pl.when(low < high)  # an item may be empty
        def _run() -> None:
            whole = (low == begin) & (high == end)
            # Only a share's first segment can begin inside an item.
            place = 2 * program + (low == begin).astype(jnp.int32)
            before = low - share_begin
            body(Segment(head, item, low - begin, high - begin, whole, place, before))

    @pl.when(program < shares.first.shape[0])
    def _has_share() -> None:
        lax.fori_loop(shares.first[program], shares.end[program], one_item, None)
