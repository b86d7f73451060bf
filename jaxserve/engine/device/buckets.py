"""The static shapes that steps are compiled for: row buckets for decode steps, token buckets for
all others.

A decode step has as many tokens as rows. Any other step has a token bucket and as many rows as
could be in it. So the number of compiled steps is the sum of both lists, not their product.

Hidden caches need more steps, so that steps without them cost nothing extra and steps with few of
them cost little. Each decode step is then also compiled for few hidden rows, for many, and for
hidden rows only. Every second token bucket is also compiled for few and for many. If not `fitted`,
each of these is compiled only once more, for any number of hidden rows.

Where XLA's order of additions depends on shapes, a row's bits depend on the bucket. There is only
one deterministic step, the largest: its rows are always computed by the same instructions, whatever
else is in the batch.

A server starts with few of the steps, which any batch fits into, and compiles the others while it
serves (`Buckets.stages`).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from jaxserve.config import ConfigError
from jaxserve.engine.device.batch_layout import Layout
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.speculation.choice import MOST

_LINEAR_FROM = 256
"""Above this many tokens, buckets grow in steps of this size, so that padding stays small."""

FEW_HIDDEN = 8
"""Steps for few hidden rows have room for one row in this many."""

NEVER, ASKED, ALWAYS = range(3)
"""Deterministic step: none, one beside the others, or the only one."""

PROJECTED_TOKENS = 128
"""Hidden vectors projected to K and V at once; then those of all layers are held twice."""


@dataclass(frozen=True)
class Buckets:
    """The compiled layouts of an engine.

    Attributes:
        rows: sizes of decode steps, ascending.
        tokens: sizes of the other steps, ascending.
        width: blocks per row of a block table.
        slots: device slots.
        hidden: whether there are steps for rows with hidden caches.
        fitted: whether there are steps for few hidden rows and for hidden rows only.
        decode_group: see `Padding`.
        decode_chunk: see `Padding`.
        block_size: see `Layout`.
        drafts: whether rows of the other steps may have drafts.
        lora: numbers of columns of adapters for which each step is also compiled, ascending, see
        `Layout`; empty: no row has an adapter. Rows without an adapter are not affected.
        deterministic: NEVER; ASKED: one more step, for batches in which a request asks for it;
        ALWAYS: it is the only one. It has the largest bucket, room for all adapters, and the
        kernels of `pallas_kernels.deterministic_backend`. Only without hidden caches.
        row_sizes: numbers of rows that steps other than decode steps have, ascending; empty: those
        of `rows`. Other than these while only some decode steps are compiled.
        planes, states: see `Layout`.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    width: int
    slots: int
    hidden: bool = False
    fitted: bool = True
    decode_group: int = 1
    decode_chunk: int = 1
    block_size: int = 0
    drafts: bool = False
    lora: tuple[int, ...] = ()
    deterministic: int = NEVER
    row_sizes: tuple[int, ...] = ()
    planes: int = 2
    states: int = 0

    @property
    def padding(self) -> Padding:
        """The rounding of batches, for the cost models."""
        return Padding(self.rows, self.tokens, self.decode_group, self.decode_chunk)

    def decode(self, rows: int, *, hidden: int = 0) -> Layout:
        """The smallest decode step for this many rows, `hidden` of them with hidden caches. Raises
        IndexError beyond the last bucket."""
        size = self.rows[bisect.bisect_left(self.rows, rows)]
        if hidden == rows and self.fitted:
            return self._decodes(size, size, kv=False)
        return self._decodes(size, self._room(size, hidden))

    def _decodes(self, rows: int, hidden: int, *, kv: bool = True) -> Layout:
        return self._layout(rows, rows, True, hidden, kv)

    def mixed(self, tokens: int, *, hidden: int = 0) -> Layout:
        """The smallest step for this many tokens in any number of rows. hidden: decodes with hidden
        caches, at least 1 if any row has one. Raises IndexError beyond the last bucket."""
        sizes = self.padding.hidden_tokens if hidden else self.tokens
        size = sizes[bisect.bisect_left(sizes, tokens)]
        return self._mixed(size, self._room(self._rows_for(size), hidden))

    def _mixed(self, tokens: int, hidden: int) -> Layout:
        return self._layout(tokens, self._rows_for(tokens), False, hidden)

    def _layout(
        self, tokens: int, rows: int, decode_only: bool, hidden: int, kv: bool = True
    ) -> Layout:
        return Layout(
            tokens=tokens,
            rows=rows,
            width=self.width,
            slots=self.slots,
            decode_only=decode_only,
            hidden=hidden,
            kv=kv,
            block_size=self.block_size,
            drafts=self.drafts and not decode_only,
            planes=self.planes,
            states=self.states,
        )

    def deterministic_step(self) -> Layout:
        """The step for rows whose bits must not depend on anything else."""
        widest = max(self.lora, default=0)
        return dataclasses.replace(self._mixed(self.tokens[-1], 0), lora=widest, deterministic=True)

    def fitting(
        self,
        counts: np.ndarray,
        kinds: np.ndarray,
        *,
        mixed: bool = False,
        columns: int = 0,
        deterministic: bool = False,
    ) -> Layout:
        """The smallest step for these rows.

        Args:
            counts: their tokens, [n].
            kinds: kinds of their caches, [n].
            mixed: whether to avoid decode steps, even if every row has one token.
            columns: number of leading columns that contain all their adapters; 0: none has one.
            deterministic: whether a row asks for the deterministic step.
        """
        if self.deterministic == ALWAYS or (deterministic and self.deterministic):
            return self.deterministic_step()
        total, hidden = int(counts.sum()), hidden_decodes(counts, kinds)
        alone = total == len(counts) and not mixed
        found = self.decode(total, hidden=hidden) if alone else self.mixed(total, hidden=hidden)
        if not columns:
            return found
        return dataclasses.replace(found, lora=next(w for w in self.lora if columns <= w))

    def projection_layout(self) -> Layout:
        """The layout for projecting hidden caches to K and V: at most PROJECTED_TOKENS tokens."""
        return self._mixed(self._projected_tokens(), 0)

    def _projected_tokens(self) -> int:
        return next(n for n in self.tokens if n >= min(PROJECTED_TOKENS, self.tokens[-1]))

    def stages(self) -> list[Buckets]:
        """These buckets as they grow while a server compiles them: first the smallest and the
        largest sizes of both kinds, then one more size each; all of them last. With hidden caches
        there are two stages: every second bucket has steps for these, whichever buckets there
        are."""
        if self.deterministic == ALWAYS:
            return [self]
        least = self._projected_tokens() if self.hidden else self.tokens[0]
        rows, tokens = {self.rows[0], self.rows[-1]}, {least, self.tokens[-1]}
        found = [self._with(rows, tokens)]
        left = zip_longest(_middle_first(self.tokens), _middle_first(self.rows))
        for token_size, row_size in () if self.hidden else left:
            for sizes, size in ((tokens, token_size), (rows, row_size)):
                if size is not None and size not in sizes:
                    sizes.add(size)
                    found.append(self._with(rows, tokens))
        # The last one has the sizes of `self`, and is the same.
        return [*(each for each in found if each.sizes < self.sizes), self]

    @property
    def sizes(self) -> int:
        """Number of sizes of decode steps and of the others."""
        return len(self.rows) + len(self.tokens)

    def _with(self, rows: Collection[int], tokens: Collection[int]) -> Buckets:
        """Only these sizes, whose layouts are as in `self`."""
        some = tuple(sorted(rows)), tuple(sorted(tokens))
        return dataclasses.replace(self, rows=some[0], tokens=some[1], row_sizes=self.rows)

    def all(self) -> list[Layout]:
        """Every layout, those without adapters and decode steps first."""
        alone = [self.deterministic_step()] if self.deterministic else []
        if self.deterministic == ALWAYS:
            return alone
        found = self._all()
        more = [dataclasses.replace(each, lora=width) for width in self.lora for each in found]
        return found + more + alone

    def sampled(self) -> list[Layout]:
        """One layout for each number of rows, a decode step if there is one."""
        if self.deterministic == ALWAYS:
            return self.all()
        return list({layout.rows: layout for layout in reversed(self._all())}.values())

    def _all(self) -> list[Layout]:
        decodes = [self.decode(rows) for rows in self.rows]
        mixed = [self.mixed(tokens) for tokens in self.tokens]
        if not self.hidden:
            return decodes + mixed
        for rows in self.rows:
            # A single row has one of the kinds, so its step is fitted to that.
            single = self.fitted and rows == 1
            decodes += [self._decodes(rows, room) for room in self._rooms(rows) if not single]
            if self.fitted:
                decodes.append(self._decodes(rows, rows, kv=False))
        for size in self.padding.hidden_tokens:
            mixed += [self._mixed(size, room) for room in self._rooms(self._rows_for(size))]
        return decodes + mixed

    def _rooms(self, rows: int) -> tuple[int, ...]:
        """Numbers of hidden decodes for which steps of this many rows are compiled, ascending."""
        few = rows // FEW_HIDDEN if self.fitted else 0
        return (few, rows) if few > 1 else (rows,)

    def _room(self, rows: int, hidden: int) -> int:
        return next(room for room in (0, *self._rooms(rows)) if hidden <= room)

    def _rows_for(self, tokens: int) -> int:
        sizes = self.row_sizes or self.rows
        return sizes[min(bisect.bisect_left(sizes, tokens), len(sizes) - 1)]


def make_buckets(
    max_rows: int,
    max_tokens: int,
    *,
    width: int,
    rows: tuple[int, ...] = (),
    tokens: tuple[int, ...] = (),
    hidden: bool = False,
    fitted: bool = True,
    decode_group: int = 1,
    decode_chunk: int = 1,
    block_size: int = 0,
    drafts: bool = False,
    lora: tuple[int, ...] = (),
    deterministic: int = NEVER,
    planes: int = 2,
    states: int = 0,
) -> Buckets:
    """Buckets up to max_rows and max_tokens. Default sizes are powers of two up to 256, multiples
    of 256 above, and the maximum itself; steps that are not decode steps have at least 16 tokens,
    or 2 with drafts.

    Args:
        max_rows: rows of the largest decode step, and device slots.
        max_tokens: tokens of the largest step.
        width: blocks per row of a block table.
        rows: sizes of decode steps; empty for the default.
        tokens: sizes of the other steps; empty for the default.
        hidden: see `Buckets`.
        fitted: see `Buckets`.
        decode_group: see `Padding`.
        decode_chunk: see `Padding`.
        block_size: see `Layout`.
        drafts: see `Buckets`.
        lora: see `Buckets`.
        deterministic: see `Buckets`.
        planes, states: see `Layout`.

    Raises:
        ConfigError: given sizes are not ascending, or do not reach their maximum.
    """
    given = {
        "engine.row_buckets": (rows or _sizes(1, max_rows), max_rows),
        "engine.token_buckets": (tokens or _sizes(2 if drafts else 16, max_tokens), max_tokens),
    }
    for name, (sizes, maximum) in given.items():
        if sorted(set(sizes)) != list(sizes) or sizes[0] < 1:
            raise ConfigError(f"{name} must be positive and ascending, got {sizes}")
        if sizes[-1] < maximum:
            raise ConfigError(f"{name} must reach {maximum}, got {sizes}")
    row_sizes, token_sizes = (_up_to(sizes, maximum) for sizes, maximum in given.values())
    if drafts and row_sizes[-1] <= MOST:  # a single request may have the usual number
        row_sizes = (*row_sizes, MOST + 1)
    if deterministic == ALWAYS:
        row_sizes, token_sizes = row_sizes[-1:], token_sizes[-1:]
    return Buckets(
        row_sizes,
        token_sizes,
        width,
        max_rows,
        hidden,
        fitted,
        decode_group,
        decode_chunk,
        block_size,
        drafts,
        lora,
        deterministic,
        planes=planes,
        states=states,
    )


def hidden_decodes(counts: np.ndarray, kinds: np.ndarray) -> int:
    """Rows of one token with hidden caches; at least 1 if any row has one."""
    hidden = kinds == CacheKind.HIDDEN
    return max(int(hidden.any()), int(np.count_nonzero(hidden & (counts == 1))))


def _middle_first(sizes: tuple[int, ...]) -> list[int]:
    """Those in the middle save most padding while the smallest and the largest are there."""
    order = sorted(range(len(sizes)), key=lambda i: abs(2 * i + 1 - len(sizes)))
    return [sizes[i] for i in order]


def _up_to(sizes: tuple[int, ...], maximum: int) -> tuple[int, ...]:
    """The sizes up to the first that holds the maximum."""
    return sizes[: bisect.bisect_left(sizes, maximum) + 1]


def _sizes(first: int, last: int) -> tuple[int, ...]:
    sizes, size = [], first
    while size < last:
        sizes.append(size)
        size = size * 2 if size < _LINEAR_FROM else size + _LINEAR_FROM
    return (*sizes, last)
