"""Accounting of the host memory that holds checkpoints of caches (BROS section 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.cache.cache_kinds import CacheKind, Direction
from jaxserve.sched.row_columns import grow_columns

_SEGMENT = np.dtype(
    [(name, np.int64) for name in ("key", "first", "end")]
    + [(name, np.int8) for name in ("kind", "side")]
)


class Segment(NamedTuple):
    """Tokens [first, end) of a request's cache that are in host memory.

    Attributes:
        key: Unique, never reused.
        first: First token.
        end: Token after the last.
        kind: Kind of the cache.
        direction: Side from which the request fills its blocks.
    """

    key: int
    first: int
    end: int
    kind: CacheKind
    direction: Direction


class HostMemory:
    """The segments in host memory, by row of the request table.

    Args:
        capacity: Slots, each in one plane.
        rows: Rows of the request table.
        slots_for: From tokens and the kinds of their caches to the slots that they take, each in
            one plane; numbers or arrays.

    Attributes:
        tokens: int64 [rows], tokens of each row that are in host memory. Those below the row's
            computed tokens are missing from its cache until they are restored.
        kind: int8 [rows], `CacheKind` of each row's tokens in host memory; stale if there are none.
        num_used: Slots in use.
        num_saved, num_restored: Slots copied to the host and back since the start.
        num_full: Preemptions so far that lost tokens because host memory was full.
    """

    def __init__(
        self, capacity: int = 0, rows: int = 0, slots_for: Callable[[Any, Any], Any] = slots_for
    ) -> None:
        self.capacity, self.slots_for = capacity, slots_for
        self.num_used = 0
        self.num_saved = self.num_restored = self.num_full = 0
        self.tokens = np.zeros(rows, np.int64)
        self.kind = np.zeros(rows, np.int8)
        # Most rows have at most one segment, stored as columns. Rows with several have lists.
        self._one = np.zeros(rows, _SEGMENT)
        self._several: dict[int, list[Segment]] = {}
        self._next_key = 0
        self._dropped: list[int] = []

    def follow(self, rows: int) -> None:
        """Makes room for rows up to `rows`."""
        grow_columns(self, rows, tokens=0, kind=0, _one=0)

    @property
    def num_free(self) -> int:
        """Unused slots."""
        return self.capacity - self.num_used

    def segments(self, row: int) -> tuple[Segment, ...]:
        """The row's segments, by first token; they do not overlap."""
        if row in self._several:
            return tuple(self._several[row])
        return (_segment(self._one[row]),) if self.tokens[row] else ()

    def find(self, row: int, first: int) -> Segment | None:
        """The row's segment that begins at that token."""
        return next((s for s in self.segments(row) if s.first == first), None)

    def slots(self, segment: Segment) -> int:
        """Slots that the segment takes."""
        return int(self.slots_for(segment.end - segment.first, segment.kind))

    def add(
        self, rows: np.ndarray, first: np.ndarray, end: np.ndarray, kinds: Any, sides: Any
    ) -> np.ndarray:
        """Adds a segment for each of these rows.

        Args:
            rows: int64 [n]; a row may occur several times.
            first: int64 [n], first token of each.
            end: int64 [n], token after the last.
            kinds: int [n], `CacheKind` of each.
            sides: int [n], `Direction` of each.

        Returns:
            Their keys, int64 [n].

        Raises:
            ValueError: There is no room, or some of the tokens are already on the host; nothing is
                added.
        """
        slots = int(self.slots_for(end - first, kinds).sum())
        if slots > self.num_free:
            raise ValueError(f"{slots} host slots wanted, {self.num_free} free")
        new = np.zeros(len(rows), _SEGMENT)
        new["key"] = keys = np.arange(self._next_key, self._next_key + len(rows))
        new["first"], new["end"], new["kind"], new["side"] = first, end, kinds, sides
        if np.count_nonzero(self.tokens[rows]) or len(set(rows.tolist())) < len(rows):
            self._add_to_several(rows, new)
        else:
            self._one[rows] = new
        self.kind[rows] = kinds
        self._next_key += len(rows)
        self.num_used += slots
        self.num_saved += slots
        np.add.at(self.tokens, rows, end - first)
        return np.asarray(keys)

    def new_key(self) -> int:
        """A key for an entry that is not a segment of a row."""
        self._next_key += 1
        return self._next_key - 1

    def _add_to_several(self, rows: np.ndarray, new: np.ndarray) -> None:
        lists = {row: list(self.segments(row)) for row in rows.tolist()}
        for row, segment in zip(rows.tolist(), map(_segment, new), strict=True):
            if any(s.first < segment.end and segment.first < s.end for s in lists[row]):
                taken = f"{segment.first} to {segment.end}"
                raise ValueError(f"row {row}: tokens {taken} are on the host already")
            lists[row].append(segment)
        for mine in lists.values():
            mine.sort(key=lambda s: s.first)
        self._several |= lists

    def restore(self, rows: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Removes the rows' segments that begin at these tokens, since they go back to the pool.
        Returns records [n] of key, first, end, kind and side. KeyError if a segment does not
        exist."""
        found = self._one[rows]
        sole = (self.tokens[rows] > 0) & (found["first"] == first)
        for i in np.flatnonzero(~sole | self._is_among_several(rows)).tolist():
            row, segment = int(rows[i]), self.find(int(rows[i]), int(first[i]))
            if segment is None:
                raise KeyError(f"row {row} has nothing on the host from token {first[i]} on")
            found[i] = segment
        self.num_restored += int(self._slots(found).sum())
        self._remove(rows, found)
        return found

    def keep_chains(self, rows: np.ndarray, first: np.ndarray) -> None:
        """Drops each row's segments from token first[i] on, except for a gapless chain of segments
        that starts there. The rows are distinct."""
        if not self.num_used:
            return
        among = self._is_among_several(rows)
        gone = ~among & (self.tokens[rows] > 0) & (self._one["first"][rows] > first)
        self._remove(rows[gone], self._one[rows[gone]])
        for row, keep in zip(rows[among].tolist(), first[among].tolist(), strict=True):
            for segment in self.segments(row):
                if segment.first == keep:
                    keep = segment.end
                elif segment.first > keep:
                    self._remove(np.array([row]), np.array([segment], _SEGMENT))

    def note_losses(
        self, rows: np.ndarray, first: np.ndarray, end: np.ndarray, kinds: np.ndarray
    ) -> None:
        """Counts in `num_full` the preempted rows that lose tokens because there is no room on the
        host.

        Args:
            rows: int64 [n].
            first: int64 [n]; cached tokens [first, end) are lost unless they are on the host.
            end: int64 [n].
            kinds: int [n], `CacheKind` of each.
        """
        lost = end - first
        if self.num_used:
            here = np.where(self._one["first"][rows] >= first, self.tokens[rows], 0)
            for i in np.flatnonzero(self._is_among_several(rows)).tolist():
                mine = self.segments(int(rows[i]))
                here[i] = sum(s.end - s.first for s in mine if s.first >= first[i])
            lost = lost - here
        lost = self.slots_for(lost, kinds)
        self.num_full += int(np.count_nonzero(lost > self.num_free))

    def release(self, row: int) -> None:
        """Drops all segments of the row."""
        for segment in self.segments(row):
            self._remove(np.array([row]), np.array([segment], _SEGMENT))

    def _is_among_several(self, rows: np.ndarray) -> np.ndarray:
        """Which rows' segments are in a list, bool [n]."""
        if not self._several:
            return np.zeros(len(rows), bool)
        return np.isin(rows, list(self._several))

    def _remove(self, rows: np.ndarray, segments: np.ndarray) -> None:
        if self._several:
            for row, segment in zip(rows.tolist(), map(_segment, segments), strict=True):
                if mine := self._several.get(row):
                    mine.remove(segment)
                    if not mine:
                        del self._several[row]
        self.num_used -= int(self._slots(segments).sum())
        np.subtract.at(self.tokens, rows, segments["end"] - segments["first"])
        self._dropped += segments["key"].tolist()

    def _slots(self, segments: np.ndarray) -> np.ndarray:
        return np.asarray(self.slots_for(segments["end"] - segments["first"], segments["kind"]))

    def take_dropped(self) -> tuple[int, ...]:
        """Keys of the segments dropped since the last call; their contents may be freed."""
        keys, self._dropped = tuple(self._dropped), []
        return keys

    def drop_again(self, keys: Sequence[int]) -> None:
        """Makes `take_dropped` return these keys again, since their contents were not freed after
        all."""
        self._dropped += keys


def _segment(record: Any) -> Segment:
    key, first, end, kind, side = record.tolist()
    return Segment(key, first, end, CacheKind(kind), Direction(side))
