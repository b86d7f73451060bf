"""How a step's inputs travel to the device: in a single int32 buffer, one transfer per step.

If block tables are large, the device keeps one for each of its slots (`empty_tables`). A step then
sends only new ids, in a compact buffer, which `expand` turns into the whole buffer on the device.
So transfers do not grow with the contexts. Steps with more new ids than fit send the whole buffer,
from which `keep` takes the tables.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import KV, AttentionBatch, StateRows

PLACEHOLDER = -1
"""A token that is still on the device: the last one sampled in its row's slot."""
NO_TARGET = -1
"""No request asks for the log-probability of the following token."""

_SMALL_TABLES = 1 << 14
"""Tables with at most this many ids are always sent whole: cheaper than expanding them."""
_COMPACT_PART = 16
"""Share of the ids that a large compact buffer holds; a small one holds those of new tokens."""


@dataclass(frozen=True)
class Rows:
    """n rows of a batch, in any order.

    Attributes:
        counts: tokens that each row computes.
        contexts: tokens of each row that are cached before.
        tables: block ids, [m, planes, width].
        table_rows: the table of each row, [n]; None: they are in the rows' order.
        direction, kind: of the cache, [n] or one number; LEFT and KV by default.
        tokens: each row's tokens, as far as the host knows them; the newest may be missing: the
        last token sampled in its slot.
        slots, emits: slot in which each row samples, and whether it does, [n].
        drafts: number of each row's last tokens that are drafts, [n]; None for none. The host knows
        all tokens of these rows.
        adapters: number of each row's adapter, [n], or 0; see `jaxserve.models.lora`.
        mirrored: blocks per plane of each row's table that are on the device already, in its slot,
        [n]; None if tables are to be sent whole.
        states: blocks of states before and behind the step, [m, 2, states]; None for none.
    """

    counts: np.ndarray
    contexts: np.ndarray
    tables: np.ndarray
    table_rows: np.ndarray | None = None
    direction: np.ndarray | int = 0
    kind: np.ndarray | int = 0
    tokens: Sequence[Sequence[int]] = ()
    slots: np.ndarray | None = None
    emits: np.ndarray | int = 0
    drafts: np.ndarray | None = None
    adapters: np.ndarray | int = 0
    mirrored: np.ndarray | None = None
    states: np.ndarray | None = None


@dataclass(frozen=True)
class PackedBatch:
    """A batch as a buffer.

    Attributes:
        buffer: int32, of one of the layout's `sizes`.
        order: int64 [n]; row i of the batch was number order[i] of the packed rows.
        begins: int64 [n], where row i's tokens begin among the tokens whose logits are wanted: its
        last token that is not a draft, then its drafts.
    """

    buffer: np.ndarray
    order: np.ndarray
    begins: np.ndarray


@dataclass(frozen=True)
class Layout:
    """A static bucket: T tokens in R rows, block tables W wide, S device slots. Hashable, so that
    it can be a static jit argument.

    Attributes:
        tokens, rows, width, slots: T, R, W and S.
        decode_only: T == R, and token i is row i.
        hidden: 0 if no row has a hidden cache; otherwise, all decodes with hidden caches are among
        this many first rows.
        kv: whether any row may have a KV cache.
        block_size: tokens of a block; 0: unknown, so that tables are always sent whole.
        drafts: whether rows may have drafts, so that logits of several tokens of a row are wanted.
        planes: block tables of a row: of K and V, of each group of layers.
        states: blocks of a row's states; 0: layers have none.
        lora: number of leading columns of adapters that contain all adapters of its rows, see
        `jaxserve.models.lora`; 0: no row has an adapter.
        deterministic: a row's bits depend on nothing else in the batch, see `Buckets`.
    """

    tokens: int
    rows: int
    width: int
    slots: int
    decode_only: bool
    hidden: int = 0
    kv: bool = True
    block_size: int = 0
    drafts: bool = False
    lora: int = 0
    deterministic: bool = False
    planes: int = 2
    states: int = 0

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        t, r = (self.tokens,), (self.rows,)
        return {
            "tokens": t,
            "token_row": t,
            "context_lens": r,
            "query_start": r,
            "query_lens": r,
            "direction": r,
            "kind": r,  # kind of the row's cache: KV or HIDDEN
            "last": r,  # flat index of each token whose logits are wanted: a row's last, and drafts
            "slots": r,
            "emit": r,  # whether such a token is followed by a sampled one
            **({"adapters": r} if self.lora else {}),
            **({"states": (self.rows, 2, self.states)} if self.states else {}),
            "num_decodes": (),
            "num_rows": (),
            "greedy": (),  # whether the step itself draws the tokens, greedily
            "tables": (
                self.rows,
                self.planes,
                self.width,
            ),  # last, so that compact buffers have the others
        }

    @property
    def size(self) -> int:
        """Elements of a whole buffer, int32."""
        return _places(self).sizes[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the buffers that can be sent, ascending: compact ones, if any, and the whole
        one."""
        return _places(self).sizes

    @property
    def mirrors(self) -> bool:
        """Whether the device keeps the tables of its slots, so that only new ids are sent."""
        return len(self.sizes) > 1

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """The fields as writable views of a buffer; of a compact one, all but the tables."""
        return self._fields(buffer)

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """`views` inside a jitted function."""
        return self._fields(packed)

    def _fields(self, buffer: Any) -> dict[str, Any]:
        return {
            name: buffer[a:b].reshape(shape)
            for name, a, b, shape in _places(self).fields
            if b <= len(buffer)
        }

    def pack(self, rows: Rows) -> PackedBatch:
        """Packs rows into a buffer. Rows of one token come first, as the kernels require, and of
        these the ones with hidden caches."""
        single = rows.counts == 1
        order = np.argsort(np.where(single, np.equal(rows.kind, KV), 2), kind="stable")
        counts, contexts = rows.counts[order], rows.contexts[order]
        n, total = len(order), int(counts.sum())
        first = np.cumsum(counts) - counts
        blocks, there = self._blocks(contexts + counts), None
        begin, size = _places(self).tables, self.size
        if self.mirrors and rows.mirrored is not None:
            there = np.minimum(rows.mirrored[order], blocks)
            used = begin + self.rows + self.planes * int((blocks - there).sum())
            size = self.sizes[min(bisect.bisect_left(self.sizes, used), len(self.sizes) - 1)]
        buffer = self.padding(size)
        fields = self.views(buffer)
        fields["token_row"][:total] = np.repeat(np.arange(n, dtype=np.int32), counts)
        which = order if rows.table_rows is None else rows.table_rows[order]
        if there is None or "tables" in fields:
            width = blocks.max(initial=0)
            fields["tables"][:n, :, :width] = rows.tables[which, :, :width]
        else:
            ids = begin + self.rows
            buffer[begin : begin + n] = there
            buffer[ids:used] = _new_ids(rows.tables, which, there, blocks - there)
        if rows.states is not None:
            fields["states"][:n] = rows.states[which]
        fields["context_lens"][:n] = contexts + counts
        fields["query_start"][:n] = first
        fields["query_lens"][:n] = counts
        last, begins = first + counts - 1, np.arange(n)
        emits = np.broadcast_to(rows.emits, n)[order]
        if rows.drafts is not None:
            drafts = rows.drafts[order]
            begins, several = (
                begins + np.cumsum(drafts) - drafts,
                np.repeat(np.arange(n), drafts + 1),
            )
            last = (last - drafts)[several] + np.arange(len(several)) - begins[several]
            emits = emits[several]
        fields["last"][: len(last)], fields["emit"][: len(last)] = last, emits
        for name in ("direction", "kind", "slots", *(("adapters",) if self.lora else ())):
            values = getattr(rows, name)
            if values is not None:
                fields[name][:n] = values[order] if isinstance(values, np.ndarray) else values
        fields["num_decodes"][...] = np.count_nonzero(single)
        fields["num_rows"][...] = n
        if rows.tokens:
            tokens = fields["tokens"]
            tokens[:total] = PLACEHOLDER
            for at, number in zip(first.tolist(), order.tolist(), strict=True):
                known = rows.tokens[number]
                if known:
                    tokens[at : at + len(known)] = known
        return PackedBatch(buffer, order, begins)

    def empty(self) -> np.ndarray:
        """A whole buffer of padding: no rows, no tokens."""
        return self.padding(self.size)

    def _blocks(self, contexts: np.ndarray) -> np.ndarray:
        """Blocks in use per plane for rows with these context lengths."""
        if not self.block_size:
            return np.full(len(contexts), self.width)
        return -(-contexts // self.block_size)

    def padding(self, size: int) -> np.ndarray:
        """A buffer of one of the layout's `sizes`, without rows."""
        buffer = np.zeros(size, np.int32)
        fields = self.views(buffer)
        fields["token_row"][:] = self.rows
        fields["slots"][:] = self.slots
        return buffer

    def greedy(self, buffer: np.ndarray) -> np.ndarray:
        """A copy of a packed batch whose step samples its tokens itself, greedily."""
        buffer = buffer.copy()
        self.views(buffer)["greedy"][...] = 1
        return buffer

    def as_expanded(self) -> Layout:
        """The part that `expand` and `keep` depend on: the same for all layouts with such
        buffers."""
        usual = dataclasses.replace(self, decode_only=False, hidden=0, kv=True, drafts=False)
        return dataclasses.replace(usual, deterministic=False)

    def no_targets(self) -> np.ndarray:
        """int32 [tokens] of NO_TARGET, see `Executor.submit`."""
        return np.full(self.tokens, NO_TARGET, np.int32)


class _Places(NamedTuple):
    """Positions of the fields in a buffer.

    Attributes:
        fields: (name, begin, end, shape) of each.
        tables: begin of the tables, the last field.
        sizes: see `Layout.sizes`.
    """

    fields: list[tuple[str, int, int, tuple[int, ...]]]
    tables: int
    sizes: tuple[int, ...]


@lru_cache(maxsize=1024)
def _places(layout: Layout) -> _Places:
    fields, begin, end = [], 0, 0
    for name, shape in layout._shapes().items():
        begin, end = end, end + math.prod(shape)
        fields.append((name, begin, end, shape))
    ids = end - begin
    if not layout.block_size or ids <= _SMALL_TABLES:
        return _Places(fields, begin, (end,))
    begun = -(-layout.tokens // layout.block_size) + layout.rows  # most blocks per plane
    # Twice that: rows may switch to other rows' blocks with the same tokens.
    rooms = (2 * layout.planes * begun, ids // _COMPACT_PART)
    compact = {begin + layout.rows + room for room in rooms}
    return _Places(fields, begin, (*sorted(size for size in compact if size < end), end))


def _new_ids(
    tables: np.ndarray, rows: np.ndarray, first: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Ids first[i] to first[i] + count[i] of all planes of row rows[i], row after row."""
    _, planes, width = tables.shape
    counts = np.repeat(count, planes)
    of_row = width * np.arange(planes)
    begins = (planes * width * rows[:, None] + of_row + first[:, None]).ravel()
    begins -= np.cumsum(counts) - counts
    return tables.ravel()[np.repeat(begins, counts) + np.arange(counts.sum())]


def empty_tables(layout: Layout) -> np.ndarray:
    """The device's block tables before any step: int32 [slots + 1, planes * width], the last row
    for rows without a slot. Zeros, since kernels may read ids past a row's own."""
    return np.zeros((layout.slots + 1, layout.planes * layout.width), np.int32)


def keep(whole: jax.Array, tables: jax.Array, *, layout: Layout) -> jax.Array:
    """The tables of all slots after a whole buffer was sent, inside a jitted function. tables:
    those before; donated."""
    fields, width = layout.unpack(whole), layout.planes * layout.width
    new = fields["tables"].reshape(layout.rows, width)

    def one(i: jax.Array, tables: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(tables, new[i][None], (fields["slots"][i], 0))

    return jax.lax.platform_dependent(
        tables,
        cpu=lambda tables: jax.lax.fori_loop(0, layout.rows, one, tables),
        default=lambda tables: tables.at[fields["slots"]].set(new),
    )


def expand(packed: jax.Array, tables: jax.Array, *, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Turns a compact buffer into the whole one, inside a jitted function.

    Args:
        packed: int32, of any of the layout's sizes but the last.
        tables: int32 [slots + 1, planes * width], of all slots before; donated.
        layout: `Layout.as_expanded` of the step's layout.

    Returns:
        The buffer [layout.size], whose tables contain arbitrary ids past a row's own blocks; and
        the tables of all slots.
    """
    fields, begin, width = layout.unpack(packed), _places(layout).tables, layout.width
    rows, slots, planes = layout.rows, fields["slots"], layout.planes
    there, ids = packed[begin : begin + rows], packed[begin + rows :]
    counts = jnp.repeat(-(-fields["context_lens"] // layout.block_size) - there, planes)
    ends = jnp.cumsum(counts)
    # Target of the first id of each row and plane, less its index among all new ids.
    firsts = [slots * planes * width + there]
    firsts += [(slots * planes + plane) * width + there for plane in range(1, planes)]
    moved = jnp.stack(firsts, axis=1).reshape(-1) - (ends - counts)
    at = jnp.arange(len(ids), dtype=jnp.int32)
    of = jnp.searchsorted(ends, at, side="right", method="scan_unrolled")
    last = planes * rows
    target = jnp.where(of < last, moved[jnp.minimum(of, last - 1)] + at, tables.size)
    tables = tables.reshape(-1).at[target].set(ids, mode="drop", unique_indices=True)
    tables = tables.reshape(layout.slots + 1, planes * width)

    def gathered(whole: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, tables[slots].reshape(-1), (begin,))

    def copied(whole: jax.Array) -> jax.Array:
        def one(i: jax.Array, whole: jax.Array) -> jax.Array:
            table = jax.lax.dynamic_slice(tables, (slots[i], 0), (1, planes * width)).reshape(-1)
            return jax.lax.dynamic_update_slice(whole, table, (begin + i * planes * width,))

        return jax.lax.fori_loop(0, rows, one, whole)

    # A gather copies single numbers on CPUs; a loop launches a kernel per round on GPUs.
    whole = jnp.zeros(layout.size, jnp.int32)
    whole = jax.lax.platform_dependent(whole, cpu=copied, default=gathered)
    return jax.lax.dynamic_update_slice(whole, packed[:begin], (0,)), tables


def attention_batch(
    fields: dict[str, jax.Array], *, drafts: bool = False, group: int = 0
) -> AttentionBatch:
    """The kernels' view of a batch from `Layout.unpack`. drafts: see `Layout`. group: the group of
    layers whose block tables it has."""
    names = AttentionBatch.__dataclass_fields__.keys() - {"drafts"}
    given = {name: fields[name] for name in names}
    if given["tables"].shape[1] > 2:
        given["tables"] = given["tables"][:, 2 * group : 2 * group + 2]
    return AttentionBatch(**given, drafts=drafts)


def state_rows(fields: dict[str, jax.Array], layout: Layout, group: int, blocks: int) -> StateRows:
    """The kernels' view of the states of a batch.

    Args:
        fields: From `Layout.unpack`.
        layout: The batch's.
        group: The group of layers whose states these are, from 1.
        blocks: Blocks of a state in each group.
    """
    tables = fields["states"][:, :, (group - 1) * blocks : group * blocks]
    names = ("context_lens", "query_start", "query_lens", "token_row")
    given: dict[str, Any] = {name: fields[name] for name in names}
    return StateRows(tables, **given, decode_only=layout.decode_only)


def positions(fields: dict[str, jax.Array]) -> jax.Array:
    """Each token's position in its sequence, int32 [T]; 0 for padding tokens."""
    rows = fields["context_lens"].shape[0]
    row = jnp.minimum(fields["token_row"], rows - 1)
    first = fields["context_lens"] - fields["query_lens"] - fields["query_start"]
    flat = jnp.arange(fields["tokens"].shape[0], dtype=jnp.int32)
    return jnp.where(fields["token_row"] < rows, first[row] + flat, 0)
