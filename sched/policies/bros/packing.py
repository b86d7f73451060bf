"""The batch being packed: its content, what still fits, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.cost.batch_feature_sums import MOVED, NUM_COLUMNS, longest, prefix
from jaxserve.sched.policy import View
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import WAITING
from jaxserve.sched.unified.batch_builder import BatchBuilder, PlannedWork, seconds_of

BEST_EFFORT = int(Tier.BEST_EFFORT)  # faster than looking up the enum's member
_SAVED = NUM_COLUMNS + MOVED.index("saved_slots")


@dataclass
class BrosWork(PlannedWork):
    """The work of requests in the step.

    Attributes:
        loaded: Slots that come back from the host. `start` counts their tokens as cached.
        copied: Slots copied from other blocks.
    """

    loaded: np.ndarray
    copied: np.ndarray

    @classmethod
    def of_rows(cls, view: View, rows: np.ndarray, start: np.ndarray | None = None) -> BrosWork:
        """The work of these rows, with whole prompts. start: tokens cached; by default those in the
        pool, and for waiting rows those on the host."""
        table, kept = view.table, view.host.tokens[rows]
        if start is None:
            start = table.computed[rows] + np.where(table.state[rows] == WAITING, kept, 0)
        copied = np.zeros(len(rows), np.int64)
        return cls.pending(view, rows, start, loaded=slots_for(kept), copied=copied)

    @property
    def cheap(self) -> np.ndarray:
        """Which rows decode and restore nothing, bool [n]."""
        return self.decodes & (self.loaded == 0)

    def cut(self, view: View, tokens: np.ndarray) -> BrosWork:
        """The same work cut to these tokens, int64 [n], with blocks only for these."""
        kinds = np.zeros(len(self), np.int64)
        all_of_it, piece = (
            view.pool.needed(self.rows, self.start + n, kinds) for n in (self.tokens, tokens)
        )
        return replace(self, tokens=tokens, new=self.new - all_of_it + piece)

    def columns(self) -> np.ndarray:
        """What each request adds to the features of a batch, including those of MOVED."""
        moved = np.stack([self.loaded, self.copied, np.zeros_like(self.tokens)])
        return np.concatenate([super().columns(), moved])


def alone(view: View, work: BrosWork) -> np.ndarray:
    """Seconds that each request would take in a batch of its own, float64 [n]."""
    return seconds_of(view, work.columns())


class BrosBatch(BatchBuilder[BrosWork]):
    """A batch being built. size: most requests in it (B of BROS section 4.2)."""

    def __init__(self, view: View, size: int) -> None:
        super().__init__(view, BrosWork.of_rows(view, np.zeros(0, np.int64)))
        self.rows_left = min(size, view.limits.max_rows)
        self.tokens_left = view.limits.max_batch_tokens
        self.chosen = np.zeros(view.table.capacity, bool)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def fits(self, work: BrosWork) -> int:
        """How many requests, in order, stay within the rows and tokens of a batch."""
        return prefix(np.cumsum(work.tokens[: self.rows_left]) <= self.tokens_left)

    def piece(self, one: BrosWork, limit: float, beside: BrosWork | None = None) -> BrosWork | None:
        """As much of a prompt as keeps the batch, with `beside`, within rows, tokens and `limit`
        seconds; None if that is nothing."""
        beside = self._nothing if beside is None else beside
        sums = self._sums + beside.columns().sum(axis=1, keepdims=True)
        left = min(int(one.tokens[0]), self.tokens_left - int(beside.tokens.sum()))

        def seconds(tokens: np.ndarray) -> np.ndarray:
            parts = replace(one[np.zeros(len(tokens), np.int64)], tokens=tokens)
            return self._seconds(sums + parts.columns())

        tokens = longest(seconds, limit, left) if len(beside) < self.rows_left else 0
        return one.cut(self.view, np.array([tokens])) if tokens > 0 else None

    def add(self, work: BrosWork) -> None:
        """Adds the requests; the caller has checked that they fit."""
        super().add(work)
        self.chosen[work.rows] = True
        self.rows_left -= len(work)
        self.tokens_left -= int(work.tokens.sum())

    def save(self, slots: int) -> None:
        """Adds slots that go to the host during the step."""
        self._sums[_SAVED] += slots
