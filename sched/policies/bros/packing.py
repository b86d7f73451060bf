"""The batch being packed: what is in it, what still fits, and how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.cost.batch_feature_sums import NUM_COLUMNS, columns, features, longest, prefix
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.policy import View
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import WAITING

BEST_EFFORT = int(Tier.BEST_EFFORT)  # looking a member up takes longer than comparing
SAVED = NUM_COLUMNS + 2  # the column of slots that go to the host


@dataclass
class Work:
    """What requests would do in the step, parallel arrays [n], in order. tokens: all that each has
    pending; start: tokens cached before it, once what is on the host is back; new: free blocks that
    it takes; starts: bool, who holds no cache yet; decodes: bool; loaded, copied: slots that come
    from the host, and from another block."""

    rows: np.ndarray
    tokens: np.ndarray
    start: np.ndarray
    new: np.ndarray
    starts: np.ndarray
    decodes: np.ndarray
    loaded: np.ndarray
    copied: np.ndarray

    @classmethod
    def of(cls, view: View, rows: np.ndarray, start: np.ndarray | None = None) -> Work:
        """Of these rows: whole prompts, in K and V. start: tokens that each has cached, by default
        what it has in the pool, or if it waits on the host."""
        table = view.table
        starts = table.state[rows] == WAITING
        if start is None:
            start = table.computed[rows] + np.where(starts, view.host.tokens[rows], 0)
        generated = table.generated[rows]
        known = table.prompt_len[rows] + generated
        tokens, nothing = known - start, np.zeros(len(rows), np.int64)
        return cls(
            rows,
            tokens,
            start,
            view.pool.needed(rows, known, nothing),
            starts,
            (tokens == 1) & (generated > 0),
            slots_for(view.host.tokens[rows]),
            nothing,
        )

    @classmethod
    def joined(cls, parts: Sequence[Work]) -> Work:
        """All of several, of which there must be one."""
        return cls(
            *(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(cls))
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | np.ndarray) -> Work:
        """A slice of them, or those that a mask or indices choose."""
        return Work(*(getattr(self, field.name)[part] for field in fields(self)))

    @property
    def cheap(self) -> np.ndarray:
        """Who decodes, and brings nothing back, bool [n]."""
        return self.decodes & (self.loaded == 0)

    def cut(self, view: View, tokens: np.ndarray) -> Work:
        """So many tokens of each now, int64 [n], and blocks for these."""
        kinds = np.zeros(len(self), np.int64)
        all_of_it, piece = (
            view.pool.needed(self.rows, self.start + n, kinds) for n in (self.tokens, tokens)
        )
        return replace(self, tokens=tokens, new=self.new - all_of_it + piece)

    def columns(self) -> np.ndarray:
        """What each adds to the features of a batch, int64 [SAVED + 1, n]; see `_features`."""
        moved = np.stack([self.loaded, self.copied, np.zeros_like(self.tokens)])
        return np.concatenate([columns(self.tokens, self.start, self.decodes), moved])


def alone(view: View, work: Work) -> np.ndarray:
    """Seconds that each would take in a batch of its own, float64 [n]."""
    return np.asarray(view.step_time(_features(work.columns())), np.float64)


class Batch:
    """A batch in the making. size: requests that it may hold (B of BROS section 4.2)."""

    def __init__(self, view: View, size: int) -> None:
        self.view = view
        self.rows_left = min(size, view.limits.max_rows)
        self.tokens_left = view.limits.max_batch_tokens
        self.parts: list[Work] = []
        self._nothing = Work.of(view, np.zeros(0, np.int64))
        self.chosen = np.zeros(view.table.capacity, bool)
        self._sums = np.zeros((SAVED + 1, 1), np.int64)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def seconds(self) -> float:
        """How long it takes; 0 with nobody in it."""
        return float(self.view.step_time(_features(self._sums))[0]) if self.parts else 0.0

    def fits(self, work: Work) -> int:
        """How many of them, in order, stay within the rows and tokens of a batch."""
        return prefix(np.cumsum(work.tokens[: self.rows_left]) <= self.tokens_left)

    def times(self, work: Work) -> np.ndarray:
        """Seconds of the batch with the first of them added, with the first two, and so on, float64
        [n]: one question to the cost model."""
        sums = self._sums + np.cumsum(work.columns(), axis=1)
        return np.asarray(self.view.step_time(_features(sums)), np.float64)

    def with_each(self, work: Work) -> np.ndarray:
        """Seconds of the batch with each of them, and none of the others, added, float64 [n]."""
        sums = self._sums + work.columns()
        return np.asarray(self.view.step_time(_features(sums)), np.float64)

    def piece(self, one: Work, limit: float, beside: Work | None = None) -> Work | None:
        """As much of a prompt as leaves the batch, and `beside`, within rows, tokens and `limit`
        seconds; None if that is nothing."""
        beside = self._nothing if beside is None else beside
        sums = self._sums + beside.columns().sum(axis=1, keepdims=True)
        left = min(int(one.tokens[0]), self.tokens_left - int(beside.tokens.sum()))

        def seconds(tokens: np.ndarray) -> np.ndarray:
            parts = replace(one[np.zeros(len(tokens), np.int64)], tokens=tokens)
            return np.asarray(self.view.step_time(_features(sums + parts.columns())), np.float64)

        tokens = longest(seconds, limit, left) if len(beside) < self.rows_left else 0
        return one.cut(self.view, np.array([tokens])) if tokens > 0 else None

    def add(self, work: Work) -> None:
        """Puts them in; the caller has checked that they fit."""
        if not len(work):
            return
        self.parts.append(work)
        self.chosen[work.rows] = True
        self.rows_left -= len(work)
        self.tokens_left -= int(work.tokens.sum())
        self._sums += work.columns().sum(axis=1, keepdims=True)

    def save(self, slots: int) -> None:
        """So many slots go to the host meanwhile."""
        self._sums[SAVED] += slots

    def work(self) -> Work:
        """All that is in it."""
        return Work.joined([self._nothing, *self.parts])


def _features(sums: np.ndarray) -> BatchFeatures:
    """Of batches whose columns of `Work` sum up to these, [SAVED + 1, n]."""
    loaded, copied, saved = sums[NUM_COLUMNS:]
    return features(sums[:NUM_COLUMNS], copied_slots=copied, saved_slots=saved, loaded_slots=loaded)
