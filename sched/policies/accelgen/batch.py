"""The batch being put together: what each would do in it, and how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import NUM_COLUMNS, columns, features, longest
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import WAITING


@dataclass(frozen=True)
class Work:
    """What requests would do in the step, parallel arrays [n], in order. tokens: to compute now;
    start: cached before; reserve: cache tokens to have room for; new: free blocks that this takes;
    decodes, starts, long: bool, which ones have one token pending, hold no cache yet, and take
    blocks for a chunk at a time. key: seconds, the least is the most urgent; limit: how long the
    step may take for it; late: the same where that cannot be met; spare: seconds that it may be
    without its cache; lost: bool, whether it cannot be in time any more."""

    rows: np.ndarray
    tokens: np.ndarray
    start: np.ndarray
    reserve: np.ndarray
    new: np.ndarray
    decodes: np.ndarray
    starts: np.ndarray
    long: np.ndarray
    key: np.ndarray
    limit: np.ndarray
    late: np.ndarray
    spare: np.ndarray
    lost: np.ndarray

    @classmethod
    def of(cls, view: View, rows: np.ndarray, key: np.ndarray, long: np.ndarray) -> Work:
        """All that each has pending, in K and V. long: bool [n]. They limit no step yet."""
        table, start, nothing = view.table, view.table.computed[rows], np.zeros(len(rows), np.int64)
        known = table.prompt_len[rows] + table.generated[rows]
        return cls(
            rows,
            known - start,
            start,
            known,
            view.pool.needed(rows, known, nothing),
            (known - start == 1) & (table.generated[rows] > 0),
            table.state[rows] == WAITING,
            long,
            key,
            np.full(len(rows), np.inf),
            np.full(len(rows), np.inf),
            np.full(len(rows), np.inf),
            np.zeros(len(rows), bool),
        )

    @classmethod
    def joined(cls, parts: Sequence[Work]) -> Work:
        """All of several, of which there must be one."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in _NAMES))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | np.ndarray) -> Work:
        """A slice of them, or those that a mask or indices choose."""
        return Work(*[getattr(self, name)[part] for name in _NAMES])

    def cut(self, view: View, tokens: np.ndarray) -> Work:
        """So many tokens of each now, int64 [n]. Long ones take blocks for no more."""
        reserve = np.where(self.long, self.start + tokens, self.reserve)
        new = self.new
        if self.long.any():
            new = view.pool.needed(self.rows, reserve, np.zeros(len(self), np.int64))
        return replace(self, tokens=tokens, reserve=reserve, new=new)

    def columns(self) -> np.ndarray:
        """What each adds to the features of a batch, int64 [NUM_COLUMNS, n]."""
        return columns(self.tokens, self.start, self.decodes)


_NAMES = tuple(field.name for field in fields(Work))


class Batch:
    """Starts empty. tokens, rows: how many there are in it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._parts: list[Work] = []
        self._sums = np.zeros((NUM_COLUMNS, 1), np.int64)

    @property
    def tokens(self) -> int:
        """Of all requests in it."""
        return int(self._sums[0, 0])

    @property
    def seconds(self) -> float:
        """How long it takes; 0 with nobody in it."""
        return float(self._seconds(self._sums)[0]) if self._parts else 0.0

    def times(self, work: Work) -> np.ndarray:
        """Seconds with the first of them added, with the first two, and so on, float64 [n]."""
        return self._seconds(self._sums + np.cumsum(work.columns(), axis=1))

    def with_each(self, work: Work) -> np.ndarray:
        """Seconds with each of them added, without the others, float64 [n]."""
        return self._seconds(self._sums + work.columns())

    def longest(self, start: int, limit: float, most: int) -> int:
        """The most tokens of a prompt, `start` of them cached, with which it takes no longer than
        `limit` seconds; at most `most`."""

        def seconds(tokens: np.ndarray) -> np.ndarray:
            nothing = np.zeros(len(tokens), bool)
            return self._seconds(self._sums + columns(tokens, np.full_like(tokens, start), nothing))

        return longest(seconds, limit, most)

    def add(self, work: Work) -> None:
        """Puts them in; the caller has checked that they fit."""
        if len(work):
            self._parts.append(work)
            self._sums += work.columns().sum(axis=1, keepdims=True)

    def drop(self, row: int) -> None:
        """Takes the row out, if it is in."""
        for i, part in enumerate(self._parts):
            stays = part.rows != row
            if not stays.all():
                self._sums -= part[~stays].columns()
                self._parts[i] = part[stays]
        self._parts = [part for part in self._parts if len(part)]

    def work(self) -> Work:
        """All that is in it."""
        nothing = np.zeros(0, np.int64)
        empty = Work.of(self._view, nothing, np.zeros(0), nothing > 0)
        return Work.joined([*self._parts, *([] if self._parts else [empty])])

    def _seconds(self, sums: np.ndarray) -> np.ndarray:
        seconds = self._view.step_time(features(sums))
        return np.full(sums.shape[1], seconds) if np.ndim(seconds) == 0 else np.asarray(seconds)
