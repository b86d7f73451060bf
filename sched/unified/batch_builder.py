"""A batch in the making: what requests would do in it, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import columns, features
from jaxserve.sched.parallel_arrays import ParallelArrays
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import WAITING


@dataclass
class PlannedWork(ParallelArrays):
    """What requests would do in the step, in order: parallel arrays [n]. Policies add their own.

    Attributes:
        rows: Rows of the table.
        tokens: How many each computes now; at first all that it has pending.
        start: Tokens cached before.
        new: Free blocks that it takes.
        starts: bool, whether it holds no cache yet.
        decodes: bool, whether only its newest generated token is pending.
    """

    rows: np.ndarray
    tokens: np.ndarray
    start: np.ndarray
    new: np.ndarray
    starts: np.ndarray
    decodes: np.ndarray

    @classmethod
    def pending(cls, view: View, rows: np.ndarray, start: np.ndarray, **own: Any) -> Self:
        """All that each has beyond `start` tokens, in K and V. own: a policy's own arrays."""
        table = view.table
        generated = table.generated[rows]
        known = table.prompt_len[rows] + generated
        tokens = known - start
        new = view.pool.needed(rows, known, np.zeros(len(rows), np.int64))
        starts, decodes = table.state[rows] == WAITING, (tokens == 1) & (generated > 0)
        return cls(rows, tokens, start, new, starts, decodes, **own)

    def columns(self) -> np.ndarray:
        """What each adds to the features of a batch, int64 [NUM_COLUMNS or more, n]."""
        return columns(self.tokens, self.start, self.decodes)


_Work = TypeVar("_Work", bound=PlannedWork)


class BatchBuilder(Generic[_Work]):
    """A batch in the making, and how long it takes. nothing: empty work."""

    def __init__(self, view: View, nothing: _Work) -> None:
        self.view = view
        self.parts: list[_Work] = []
        self._nothing = nothing
        self._sums = nothing.columns().sum(axis=1, keepdims=True)

    @property
    def tokens(self) -> int:
        """Tokens of all requests in it."""
        return int(self._sums[0, 0])

    @property
    def seconds(self) -> float:
        """How long it takes; 0 if it is empty."""
        return float(self._seconds(self._sums)[0]) if self.parts else 0.0

    def times(self, work: _Work) -> np.ndarray:
        """Seconds with the first of them added, with the first two, and so on, float64 [n]. It asks
        the cost model once."""
        return self._seconds(self._sums + np.cumsum(work.columns(), axis=1))

    def with_each(self, work: _Work) -> np.ndarray:
        """Seconds with each of them, and none of the others, added, float64 [n]."""
        return self._seconds(self._sums + work.columns())

    def add(self, work: _Work) -> None:
        """Puts them in; the caller has checked that they fit."""
        if len(work):
            self.parts.append(work)
            self._sums += work.columns().sum(axis=1, keepdims=True)

    def work(self) -> _Work:
        """All that is in it."""
        return self._nothing.joined(self.parts or [self._nothing])

    def _seconds(self, sums: np.ndarray) -> np.ndarray:
        return seconds_of(self.view, sums)


def seconds_of(view: View, sums: np.ndarray) -> np.ndarray:
    """How long batches take whose columns sum up to these, float64 [m]."""
    seconds = view.step_time(features(sums))
    return np.full(sums.shape[1], seconds) if np.ndim(seconds) == 0 else np.asarray(seconds)
