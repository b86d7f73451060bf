"""How one step's numbers travel to the device: a single int32 buffer, one transfer a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import KV, AttentionBatch

PLACEHOLDER = -1
"""A token that is still on the device: the one its row's slot sampled last."""
NO_TARGET = -1
"""Nobody asks what the model thinks of the token that follows."""


@dataclass(frozen=True)
class Rows:
    """n rows of a batch, in any order. counts: tokens that each computes. contexts: its tokens in
    the cache before. tables [n, 2, width]; direction, kind [n] of the cache, LEFT and KV where not
    given. tokens: each row's, as far as the host knows them; the rest, the newest, is what its slot
    sampled last. slots, emits [n]: where it samples, and whether."""

    counts: np.ndarray
    contexts: np.ndarray
    tables: np.ndarray
    direction: np.ndarray | int = 0
    kind: np.ndarray | int = 0
    tokens: Sequence[Sequence[int]] = ()
    slots: np.ndarray | None = None
    emits: np.ndarray | int = 0


@dataclass(frozen=True)
class PackedBatch:
    """buffer: int32 [size of the layout]. order int64 [n]: row i of the batch was number order[i]
    of those that were packed."""

    buffer: np.ndarray
    order: np.ndarray


@dataclass(frozen=True)
class Layout:
    """A static bucket: T tokens in R rows, block tables W wide, S device slots.

    decode_only: T == R and token i is row i. hidden: 0 where no row has a hidden cache; else those
    decodes that have one are among the first so many rows. kv: some row may have a KV cache.
    Hashable, so that it is a static jit argument.
    """

    tokens: int
    rows: int
    width: int
    slots: int
    decode_only: bool
    hidden: int = 0
    kv: bool = True

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        t, r = (self.tokens,), (self.rows,)
        return {
            "tokens": t,
            "token_row": t,
            "tables": (self.rows, 2, self.width),
            "context_lens": r,
            "query_start": r,
            "query_lens": r,
            "direction": r,
            "kind": r,  # what the row has cached: KV or HIDDEN
            "last": r,  # flat index of the row's last token, whose logits are wanted
            "slots": r,
            "emit": r,
            "num_decodes": (),
            "num_rows": (),
            "greedy": (),  # whether the step itself draws the tokens, greedily
        }

    @property
    def size(self) -> int:
        """Elements of a packed batch, int32: 4 bytes each go to the device a step."""
        return sum(math.prod(shape) for shape in self._shapes().values())

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """The fields as writable views of an int32 [size] buffer."""
        return {name: buffer[a:b].reshape(shape) for name, a, b, shape in self._slices()}

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """The same inside a jitted function."""
        return {name: packed[a:b].reshape(shape) for name, a, b, shape in self._slices()}

    def _slices(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        out, at = [], 0
        for name, shape in self._shapes().items():
            end = at + math.prod(shape)
            out.append((name, at, end, shape))
            at = end
        return out

    def pack(self, rows: Rows) -> PackedBatch:
        """The rows in a buffer, those of one token first, as the kernels want them, and of these
        the ones with hidden caches before the others."""
        single = rows.counts == 1
        order = np.argsort(np.where(single, np.equal(rows.kind, KV), 2), kind="stable")
        counts, contexts = rows.counts[order], rows.contexts[order]
        n, total = len(order), int(counts.sum())
        first = np.cumsum(counts) - counts
        buffer = self.empty()
        fields = self.views(buffer)
        fields["token_row"][:total] = np.repeat(np.arange(n, dtype=np.int32), counts)
        fields["tables"][:n] = rows.tables[order]
        fields["context_lens"][:n] = contexts + counts
        fields["query_start"][:n] = first
        fields["query_lens"][:n] = counts
        fields["last"][:n] = first + counts - 1
        for name in ("direction", "kind", "slots", "emits"):
            values = getattr(rows, name)
            if values is not None:
                field = fields["emit" if name == "emits" else name]
                field[:n] = values[order] if isinstance(values, np.ndarray) else values
        fields["num_decodes"][...] = np.count_nonzero(single)
        fields["num_rows"][...] = n
        if rows.tokens:
            tokens = fields["tokens"]
            tokens[:total] = PLACEHOLDER
            for at, number in zip(first.tolist(), order.tolist(), strict=True):
                known = rows.tokens[number]
                if known:
                    tokens[at : at + len(known)] = known
        return PackedBatch(buffer, order)

    def empty(self) -> np.ndarray:
        """A buffer of padding: no rows, no tokens."""
        buffer = np.zeros(self.size, np.int32)
        fields = self.views(buffer)
        fields["token_row"][:] = self.rows
        fields["slots"][:] = self.slots
        return buffer

    def greedy(self, buffer: np.ndarray) -> np.ndarray:
        """A copy of a packed batch that has the step draw its tokens itself, greedily."""
        buffer = buffer.copy()
        self.views(buffer)["greedy"][...] = 1
        return buffer

    def no_targets(self) -> np.ndarray:
        """int32 [tokens] of NO_TARGET, see `Executor.submit`."""
        return np.full(self.tokens, NO_TARGET, np.int32)


def attention_batch(fields: dict[str, jax.Array]) -> AttentionBatch:
    """What the kernels take of a batch that `Layout.unpack` gave."""
    names = AttentionBatch.__dataclass_fields__
    return AttentionBatch(**{name: fields[name] for name in names})


def positions(fields: dict[str, jax.Array]) -> jax.Array:
    """int32 [T]; 0 for padding tokens."""
    rows = fields["context_lens"].shape[0]
    row = jnp.minimum(fields["token_row"], rows - 1)
    first = fields["context_lens"] - fields["query_lens"] - fields["query_start"]
    flat = jnp.arange(fields["tokens"].shape[0], dtype=jnp.int32)
    return jnp.where(fields["token_row"] < rows, first[row] + flat, 0)
