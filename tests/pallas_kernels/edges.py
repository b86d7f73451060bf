"""Batches at the edges of what there can be, by hand; each on any shape with so many tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.pallas_kernels import HIDDEN, KV, LEFT, RIGHT, AttentionBatch
from tests.pallas_kernels.batches import Shape, make_batch, with_tables
from tests.pallas_kernels.cases import Case

Edge = Callable[[Shape, int], AttentionBatch]


def _make(
    shape: Shape,
    rows: list[tuple[int, int]],
    kinds: list[int],
    decodes: int,
    *,
    first: int = LEFT,
    placing: list[int] | None = None,
) -> AttentionBatch:
    """Directions alternate, from `first` on; of decodes only as many rows as the shape has."""
    rows, kinds = rows[: shape.rows], kinds[: shape.rows]
    sides = [(first + i) % 2 for i in range(len(rows))]
    rng = np.random.default_rng(len(rows))
    return make_batch(shape, rows, sides, min(decodes, len(rows)), rng, placing, kinds)


def _decodes(
    shape: Shape, contexts: list[int], kinds: list[int], first: int = LEFT
) -> AttentionBatch:
    return _make(shape, [(n, 1) for n in contexts], kinds, len(contexts), first=first)


def _block_edges(shape: Shape) -> list[int]:
    size, most = shape.block_size, shape.longest
    return [size, most, 1, size + 1, most - size + 1]


def nobody(shape: Shape, kind: int) -> AttentionBatch:
    """Padding only."""
    return _decodes(shape, [], [])


def edges_of_blocks(shape: Shape, kind: int) -> AttentionBatch:
    """Contexts that end with a block, or begin one."""
    return _decodes(shape, _block_edges(shape), [kind] * 5)


def edges_of_blocks_mirrored(shape: Shape, kind: int) -> AttentionBatch:
    """The same from the other ends."""
    return _decodes(shape, _block_edges(shape), [kind] * 5, RIGHT)


def far(shape: Shape, kind: int) -> AttentionBatch:
    """The window leaves out whole tiles of all rows' contexts, and begins at a block's edge."""
    most = shape.longest
    return _decodes(shape, [most, most - 3, most // 2 + 11, most - 20, 9], [kind] * 5)


def between_others(shape: Shape, kind: int) -> AttentionBatch:
    """Rows of both kinds, in turns."""
    return _decodes(shape, [9, shape.longest, 17, 12, 1], [kind, 1 - kind] * 3)


def only_others(shape: Shape, kind: int) -> AttentionBatch:
    """Every row is of the other kind."""
    return _decodes(shape, [9, shape.longest, 17], [1 - kind] * 3)


def two_owners(shape: Shape, kind: int) -> AttentionBatch:
    """Row 0 fills a block from the left, row 1 the same block from the right (BROS 5.1)."""
    batch = _decodes(shape, [5, 3], [kind] * 2)
    tables = np.array(batch.tables)
    tables[1] = tables[0]
    return with_tables(batch, tables)


def owners_of_both_kinds(shape: Shape, kind: int) -> AttentionBatch:
    """The same, where row 1 is of the other kind."""
    batch = _decodes(shape, [5, 3], [kind, 1 - kind])
    tables = np.array(batch.tables)
    tables[1, 0] = tables[0, 0]
    return with_tables(batch, tables)


def junk_entries(shape: Shape, kind: int) -> AttentionBatch:
    """Entries past a row's last block name a block of NaN, or another row's."""
    batch = _decodes(shape, [shape.block_size, shape.longest], [kind] * 2)
    tables = np.array(batch.tables)
    tables[0, :, 1::2] = shape.blocks - 1
    tables[0, :, 2::2] = tables[1, 0, 0]
    tables[2:] = tables[1, 0, 0]
    return with_tables(batch, tables)


def prompt(shape: Shape, kind: int) -> AttentionBatch:
    """All tokens are one row's first."""
    return _make(shape, [(shape.tokens, shape.tokens)], [kind], 0)


def any_order(shape: Shape, kind: int) -> AttentionBatch:
    """Tokens not in the order of the rows: a chunk's last tile may not disturb what follows,
    whoever's it is."""
    half = shape.tokens // 2
    rows = [(9, 1), (half + 17, half), (11, 11), (5, 2)]
    return _make(shape, rows, [kind] * 4, 1, placing=[3, 2, 0, 1])


def chunks_of_one_token(shape: Shape, kind: int) -> AttentionBatch:
    """Nothing says that they are decodes."""
    return _make(shape, [(1, 1), (17, 1)], [kind] * 2, 0, first=RIGHT)


def far_chunks(shape: Shape, kind: int) -> AttentionBatch:
    """A window leaves out whole tiles of context."""
    most = shape.longest
    return _make(shape, [(most, 1), (most, shape.tokens // 4), (most - 3, 9)], [kind] * 3, 1)


def chunks_between_others(shape: Shape, kind: int) -> AttentionBatch:
    """Decodes and chunks of both kinds."""
    rows = [(9, 1), (shape.longest, 1), (20, 11), (33, 12)]
    return _make(shape, rows, [kind, 1 - kind, 1 - kind, kind], 2)


def chunks_of_two_owners(shape: Shape, kind: int) -> AttentionBatch:
    """Row 0 reaches into the block that row 1 fills from the other end, in one step."""
    size = shape.block_size
    batch = _make(shape, [(size + 1, 5), (size - 1, 4)], [kind] * 2, 0)
    tables = np.array(batch.tables)
    tables[1, :, 0] = tables[0, :, 1]
    return with_tables(batch, tables)


def chunks_of_v_and_hidden(shape: Shape, kind: int) -> AttentionBatch:
    """The block of row 0's V takes row 1's hidden vectors from the other end, in one step."""
    size = shape.block_size
    batch = _make(shape, [(size + 4, size + 4), (size - 4, 3)], [KV, HIDDEN], 0)
    tables = np.array(batch.tables)
    tables[1, 0, 0] = tables[0, 1, 1]
    return with_tables(batch, tables)


DECODES: tuple[Edge, ...] = (
    nobody,
    edges_of_blocks,
    edges_of_blocks_mirrored,
    between_others,
    only_others,
    two_owners,
    owners_of_both_kinds,
    junk_entries,
)
CHUNKS: tuple[Edge, ...] = (
    prompt,
    any_order,
    chunks_of_one_token,
    chunks_between_others,
    chunks_of_two_owners,
    chunks_of_v_and_hidden,
)


def edges_of(case: Case) -> tuple[Edge, ...]:
    """Those that are for such steps; with a window, also those that are about it."""
    if case.shape.decode_only:
        return DECODES if case.window is None else (*DECODES, far)
    return CHUNKS if case.window is None else (*CHUNKS, far_chunks)
