"""The batch being built: what each request would do in it, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import columns, longest
from jaxserve.sched.policy import View
from jaxserve.sched.unified.batch_builder import BatchBuilder, PlannedWork


@dataclass
class AccelGenWork(PlannedWork):
    """What requests would do in the step.

    Attributes:
        reserve: Cache tokens to have room for.
        long: bool, which requests take blocks chunk by chunk.
        key: Seconds; the lowest is the most urgent.
        limit: Longest time that the step may take for the request's target, seconds.
        late: The limit to use instead if that cannot be met.
        spare: Seconds for which the request could do without its cache.
        lost: bool, whether the request has missed its target for good.
    """

    reserve: np.ndarray
    long: np.ndarray
    key: np.ndarray
    limit: np.ndarray
    late: np.ndarray
    spare: np.ndarray
    lost: np.ndarray

    @classmethod
    def of_rows(
        cls, view: View, rows: np.ndarray, key: np.ndarray, long: np.ndarray
    ) -> AccelGenWork:
        """All that each request has pending, with no limits on the step yet.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            key: float64 [n], see `AccelGenWork`.
            long: bool [n], see `AccelGenWork`.
        """
        table, never = view.table, np.full(len(rows), np.inf)
        return cls.pending(
            view,
            rows,
            table.computed[rows],
            reserve=table.prompt_len[rows] + table.generated[rows],
            long=long,
            key=key,
            limit=never,
            late=never,
            spare=never,
            lost=np.zeros(len(rows), bool),
        )

    def cut(self, view: View, tokens: np.ndarray) -> AccelGenWork:
        """The same work cut to these tokens, int64 [n]. Long requests take blocks only for
        these."""
        reserve = np.where(self.long, self.start + tokens, self.reserve)
        new = self.new
        if self.long.any():
            new = view.pool.needed(self.rows, reserve, np.zeros(len(self), np.int64))
        return replace(self, tokens=tokens, reserve=reserve, new=new)


class AccelGenBatch(BatchBuilder[AccelGenWork]):
    """Starts empty."""

    def __init__(self, view: View) -> None:
        rows = np.zeros(0, np.int64)
        super().__init__(view, AccelGenWork.of_rows(view, rows, np.zeros(0), rows > 0))

    def longest(self, start: int, limit: float, most: int) -> int:
        """Most tokens of a prompt, after `start` cached ones, with which the batch takes no longer
        than `limit` seconds; at most `most`."""

        def seconds(tokens: np.ndarray) -> np.ndarray:
            nothing = np.zeros(len(tokens), bool)
            return self._seconds(self._sums + columns(tokens, np.full_like(tokens, start), nothing))

        return longest(seconds, limit, most)

    def drop(self, row: int) -> None:
        """Removes the row, if it is in the batch."""
        for i, part in enumerate(self.parts):
            stays = part.rows != row
            if not stays.all():
                self._sums -= part[~stays].columns().sum(axis=1, keepdims=True)
                self.parts[i] = part[stays]
        self.parts = [part for part in self.parts if len(part)]
