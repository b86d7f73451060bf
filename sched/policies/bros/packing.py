"""The batch being packed: what is in it, what still fits, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from jaxserve.sched.cost_model import BatchFeatures
from jaxserve.sched.policy import View
from jaxserve.sched.table import WAITING


@dataclass
class Work:
    """What requests would do in the step, parallel arrays [n], in order. tokens: all that each has
    pending; start: tokens cached before it; new: free blocks that it takes; starts: bool, who holds
    no cache yet; decodes: bool."""

    rows: np.ndarray
    tokens: np.ndarray
    start: np.ndarray
    new: np.ndarray
    starts: np.ndarray
    decodes: np.ndarray

    @classmethod
    def of(cls, view: View, rows: np.ndarray) -> Work:
        """Of these rows: whole prompts, in K and V."""
        table = view.table
        start = table.computed[rows]
        generated = table.generated[rows]
        known = table.prompt_len[rows] + generated
        tokens = known - start
        return cls(
            rows,
            tokens,
            start,
            view.pool.needed(rows, known, np.zeros(len(rows), np.int64)),
            table.state[rows] == WAITING,
            (tokens == 1) & (generated > 0),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | np.ndarray) -> Work:
        """A slice of them, or those that a mask or indices choose."""
        return Work(*(getattr(self, field.name)[part] for field in fields(self)))

    def columns(self) -> np.ndarray:
        """What each adds to the features of a batch, int64 [6, n]; see `_features`."""
        tokens, start, decodes = self.tokens, self.start, self.decodes
        read = np.where(decodes, start + 1, 0)
        quad = np.where(decodes, 0, tokens * (tokens + 2 * start))
        before = np.where(decodes, 0, start)
        return np.stack([tokens, read, decodes, quad, ~decodes, before])


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
        self.chosen = np.zeros(view.table.capacity, bool)
        self._sums = np.zeros((6, 1), np.int64)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def rows(self) -> np.ndarray:
        """Those in it, int64 [n]."""
        return self._joined("rows")

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

    def add(self, work: Work) -> None:
        """Puts them in; the caller has checked that they fit."""
        if not len(work):
            return
        self.parts.append(work)
        self.chosen[work.rows] = True
        self.rows_left -= len(work)
        self.tokens_left -= int(work.tokens.sum())
        self._sums += work.columns().sum(axis=1, keepdims=True)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, tokens that each computes, and cached ones afterwards, int64 [n]."""
        rows, tokens = self._joined("rows"), self._joined("tokens")
        return rows, tokens, self._joined("start") + tokens

    def _joined(self, name: str) -> np.ndarray:
        found = [getattr(part, name) for part in self.parts]
        return np.concatenate(found) if found else np.zeros(0, np.int64)


def prefix(ok: np.ndarray) -> int:
    """How many there are before the first that is not."""
    return len(ok) if ok.all() else int(np.argmin(ok))


def _features(sums: np.ndarray) -> BatchFeatures:
    """Of batches whose columns of `Work` sum up to these, [6, n]."""
    tokens, read, decodes, quad, prefills, before = sums
    return BatchFeatures(tokens, tokens, read, decodes, quad, prefills, before)
