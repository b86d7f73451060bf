"""Which static shapes exist. Additive: row buckets for decode steps, token buckets for the others.

A decode step has as many tokens as rows. Any other step has a token bucket, and as many rows as
could be in it. So the number of compiled steps is the sum, not the product, of the two lists. Where
there are hidden caches, each decode step is there for steps with some, with many and with nothing
else, and every other of the others a second time, so that steps without one pay nothing for them.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.errors import ConfigError
from jaxserve.engine.layout import Layout
from jaxserve.sched.padding import Padding

_LINEAR_FROM = 256
"""Above this many tokens buckets grow by steps of this size, so that padding stays small."""

FEW_HIDDEN = 8
"""Decode steps with hidden rows are there for as much as this part of their rows, and for all."""

WIDEN_TOKENS = 128
"""Hidden vectors that become K and V at once; those of all layers are on the device twice then."""


@dataclass(frozen=True)
class Buckets:
    """rows, tokens: ascending sizes. width: block table width. slots: device slots. hidden: there
    are steps for rows with hidden caches, too. decode_group, decode_chunk: as in `Padding`."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    width: int
    slots: int
    hidden: bool = False
    decode_group: int = 1
    decode_chunk: int = 1

    @property
    def padding(self) -> Padding:
        """How batches are rounded up, as the cost models see it."""
        return Padding(self.rows, self.tokens, self.decode_group, self.decode_chunk)

    def decode(self, rows: int, *, hidden: int = 0) -> Layout:
        """The smallest decode step for that many rows, `hidden` of them with hidden caches. Raises
        IndexError beyond the last bucket."""
        size = self.rows[bisect.bisect_left(self.rows, rows)]
        if hidden == rows:
            return self._decodes(size, size, kv=False)
        return self._decodes(size, next((n for n in _some(size) if hidden <= n), size))

    def _decodes(self, rows: int, hidden: int, *, kv: bool = True) -> Layout:
        return Layout(rows, rows, self.width, self.slots, True, hidden, kv)

    def mixed(self, tokens: int, *, hidden: bool = False) -> Layout:
        """The smallest step for that many tokens in any number of rows. hidden: some row has a
        hidden cache. Raises IndexError beyond the last bucket."""
        sizes = self.padding.hidden_tokens if hidden else self.tokens
        size = sizes[bisect.bisect_left(sizes, tokens)]
        rows = self._rows_for(size)
        return Layout(size, rows, self.width, self.slots, False, rows if hidden else 0)

    def fitting(self, counts: np.ndarray, *, hidden: int = 0) -> Layout:
        """The smallest step for rows of so many tokens each, `hidden` of them with hidden
        caches."""
        total = int(counts.sum())
        if total == len(counts):
            return self.decode(total, hidden=hidden)
        return self.mixed(total, hidden=hidden > 0)

    def widening(self) -> Layout:
        """The batch in which hidden caches become KV: WIDEN_TOKENS tokens at most."""
        return self.mixed(min(WIDEN_TOKENS, self.tokens[-1]))

    def all(self) -> list[Layout]:
        """Every step there is, decode steps first."""
        decodes = [self.decode(rows) for rows in self.rows]
        mixed = [self.mixed(tokens) for tokens in self.tokens]
        if self.hidden:
            for rows in self.rows:
                decodes += [self._decodes(rows, n) for n in _some(rows)[1:]]
                decodes.append(self._decodes(rows, rows, kv=False))
            mixed += [self.mixed(n, hidden=True) for n in self.padding.hidden_tokens]
        return decodes + mixed

    def _rows_for(self, tokens: int) -> int:
        return self.rows[min(bisect.bisect_left(self.rows, tokens), len(self.rows) - 1)]


def make_buckets(
    max_rows: int,
    max_tokens: int,
    *,
    width: int,
    rows: tuple[int, ...] = (),
    tokens: tuple[int, ...] = (),
    hidden: bool = False,
    decode_group: int = 1,
    decode_chunk: int = 1,
) -> Buckets:
    """Buckets up to max_rows and max_tokens; an empty list means the default sizes.

    Defaults: powers of two, and above 256 steps of 256. ConfigError if a given list does not
    reach its maximum.
    """
    given = {
        "engine.row_buckets": (rows or _sizes(1, max_rows), max_rows),
        "engine.token_buckets": (tokens or _sizes(16, max_tokens), max_tokens),
    }
    for name, (sizes, maximum) in given.items():
        if sorted(set(sizes)) != list(sizes) or sizes[0] < 1:
            raise ConfigError(f"{name} must be positive and ascending, got {sizes}")
        if sizes[-1] < maximum:
            raise ConfigError(f"{name} must reach {maximum}, got {sizes}")
    row_sizes, token_sizes = (_up_to(sizes, maximum) for sizes, maximum in given.values())
    return Buckets(row_sizes, token_sizes, width, max_rows, hidden, decode_group, decode_chunk)


def _some(rows: int) -> tuple[int, ...]:
    """Ascending: how many of the first rows of a decode step may have hidden caches, beside others
    that have none."""
    few = rows // FEW_HIDDEN
    return tuple(sorted({0, few if few > 1 else 0, rows if rows > 1 else 0}))


def _up_to(sizes: tuple[int, ...], maximum: int) -> tuple[int, ...]:
    """The sizes that can be needed: up to the first that holds the maximum."""
    return sizes[: bisect.bisect_left(sizes, maximum) + 1]


def _sizes(first: int, last: int) -> tuple[int, ...]:
    sizes, size = [], first
    while size < last:
        sizes.append(size)
        size = size * 2 if size < _LINEAR_FROM else size + _LINEAR_FROM
    return (*sizes, last)
