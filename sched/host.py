"""Accounting of the host memory that holds checkpoints of caches (BROS section 5.2)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from jaxserve.sched.block_sizes import slots_for
from jaxserve.sched.kinds import CacheKind, Direction


class Segment(NamedTuple):
    """Tokens [first, end) of a request's cache on the host. key: its own for ever."""

    key: int
    first: int
    end: int
    kind: CacheKind
    direction: Direction

    @property
    def slots(self) -> int:
        """Slots that it takes, of one plane each."""
        return int(slots_for(self.end - self.first, self.kind))


class HostMemory:
    """Segments by row of the request table, of `rows` rows. capacity: slots, of one plane each.

    tokens: int64 [rows], how many of each row's are here. Those below what the row has computed are
    missing from its cache until they are restored. Since the start: num_saved, num_restored: slots;
    num_full: preemptions of requests whose lost tokens found no room here."""

    def __init__(self, capacity: int = 0, rows: int = 0) -> None:
        self.capacity = capacity
        self.num_used = 0
        self.num_saved = self.num_restored = self.num_full = 0
        self.tokens = np.zeros(rows, np.int64)
        self._segments: dict[int, list[Segment]] = {}
        self._next_key = 0
        self._dropped: list[int] = []

    def follow(self, rows: int) -> None:
        """Makes room for rows up to `rows`."""
        more = rows - len(self.tokens)
        if more > 0:
            self.tokens = np.concatenate([self.tokens, np.zeros(more, np.int64)])

    @property
    def num_free(self) -> int:
        """Slots in no use."""
        return self.capacity - self.num_used

    def segments(self, row: int) -> tuple[Segment, ...]:
        """The row's, by first token; they do not overlap."""
        return tuple(self._segments.get(row, ()))

    def find(self, row: int, first: int) -> Segment | None:
        """The row's segment that begins at that token."""
        for segment in self._segments.get(row, ()):
            if segment.first == first:
                return segment
        return None

    def overlaps(self, row: int, first: int, end: int) -> bool:
        """Whether any of these tokens of the row are here already."""
        return any(s.first < end and first < s.end for s in self._segments.get(row, ()))

    def add(self, row: int, first: int, end: int, kind: CacheKind, side: Direction) -> Segment:
        """A new segment. ValueError if there is no room, or some of it is here already."""
        segment = Segment(self._next_key, first, end, kind, side)
        mine = self._segments.setdefault(row, [])
        if mine and self.overlaps(row, first, end):
            raise ValueError(f"row {row}: tokens {first} to {end} are on the host already")
        if (slots := segment.slots) > self.num_free:
            raise ValueError(f"{slots} host slots wanted, {self.num_free} free")
        self._next_key += 1
        self.num_used += slots
        self.num_saved += slots
        self.tokens[row] += end - first
        mine.append(segment)
        if len(mine) > 1:
            mine.sort(key=lambda s: s.first)
        return segment

    def restore(self, row: int, segment: Segment) -> None:
        """It goes back to the pool."""
        self.num_restored += segment.slots
        self.remove(row, segment)

    def remove(self, row: int, segment: Segment) -> None:
        """It is no longer needed."""
        self._segments[row].remove(segment)
        self._drop(row, segment)

    def keep_chain(self, row: int, first: int) -> None:
        """Of the row's, those that begin at token `first` or later are no longer needed but for
        those that go on there without a gap."""
        for segment in self.segments(row):
            if segment.first == first:
                first = segment.end
            elif segment.first > first:
                self.remove(row, segment)

    def note_loss(self, row: int, first: int, end: int, kind: CacheKind) -> None:
        """The row's cached tokens [first, end) are lost, but for those of them that are here. If
        the others would not have found room, that is why they are."""
        here = sum(s.end - s.first for s in self.segments(row) if s.first >= first)
        if int(slots_for(end - first - here, kind)) > self.num_free:
            self.num_full += 1

    def release(self, row: int) -> None:
        """All of the row's are no longer needed."""
        for segment in self._segments.pop(row, ()):
            self._drop(row, segment)

    def _drop(self, row: int, segment: Segment) -> None:
        self.num_used -= segment.slots
        self.tokens[row] -= segment.end - segment.first
        self._dropped.append(segment.key)

    def take_dropped(self) -> tuple[int, ...]:
        """Keys whose contents may be forgotten, since this was last asked."""
        keys, self._dropped = tuple(self._dropped), []
        return keys

    def check(self) -> None:
        """AssertionError if counts or segments do not add up."""
        every = [(row, s) for row, mine in self._segments.items() for s in mine]
        assert self.num_used == sum(s.slots for _, s in every), "host slots are miscounted"
        assert 0 <= self.num_used <= self.capacity, "more on the host than fits"
        assert len({s.key for _, s in every}) == len(every), "two segments have one key"
        for row, mine in self._segments.items():
            assert self.tokens[row] == sum(s.end - s.first for s in mine), "tokens are miscounted"
            for before, after in itertools.pairwise(mine):
                assert before.end <= after.first, "segments overlap"
