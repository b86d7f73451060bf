"""The batch in the making: what each request would do in it, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.cache.cache_kinds import HIDDEN
from jaxserve.sched.cost.batch_feature_sums import columns, features, longest
from jaxserve.sched.policies.goodput.outlook import Outlook
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import WAITING
from jaxserve.sched.unified.batch_builder import BatchBuilder, PlannedWork


@dataclass
class Work(PlannedWork):
    """What requests would do in the step.

    Attributes:
        reserve: Cache tokens to have room for.
        kinds: `CacheKind` of each.
        loaded: Slots that come back from the host first.
        paused: bool, whether it has written something, and holds no cache.
        spare: Blocks that it leaves free for others.
        due, gap_due, attains, loss: See `Outlook`.
    """

    reserve: np.ndarray
    kinds: np.ndarray
    loaded: np.ndarray
    paused: np.ndarray
    spare: np.ndarray
    due: np.ndarray
    gap_due: np.ndarray
    attains: np.ndarray
    loss: np.ndarray

    @classmethod
    def of_rows(cls, view: View, rows: np.ndarray, outlook: Outlook) -> Work:
        """All that each has pending, with what it has on the host restored."""
        table, host = view.table, view.host
        starts, written = table.state[rows] == WAITING, table.generated[rows] > 0
        there = np.where(starts, host.tokens[rows], 0)
        kinds = np.where(there > 0, host.kind[rows], view.pool.kind[rows]).astype(np.int64)
        start = np.where(starts, there, table.computed[rows])
        known = table.prompt_len[rows] + table.generated[rows]
        return cls(
            rows=rows,
            tokens=known - start,
            start=start,
            new=view.pool.needed(rows, known, kinds),
            starts=starts,
            decodes=(known - start == 1) & written,
            reserve=known,
            kinds=kinds,
            loaded=slots_for(there, kinds),
            paused=starts & written,
            spare=np.zeros(len(rows), np.int64),
            **vars(outlook),
        )

    def columns(self) -> np.ndarray:
        """As `PlannedWork.columns`; then slots from the host, and what decodes and prompts read
        from hidden caches."""
        hidden = self.kinds == HIDDEN
        decodes = np.where(hidden & self.decodes, self.start + 1, 0)
        prompts = np.where(hidden & ~self.decodes, self.start, 0)
        own = columns(self.tokens, self.start, self.decodes)
        return np.vstack([own, self.loaded, decodes, prompts])

    def cut(self, tokens: int) -> Work:
        """One request, with so many tokens."""
        if tokens == self.tokens[0]:
            return self
        return replace(self, tokens=np.array([tokens]), decodes=np.array([False]))

    def with_kind(self, view: View, kind: int) -> Work:
        """The same, where those that start anew get a cache of this kind."""
        kinds = np.where(self.starts & (self.loaded == 0), kind, self.kinds)
        return replace(self, kinds=kinds, new=view.pool.needed(self.rows, self.reserve, kinds))


class Batch(BatchBuilder[Work]):
    """Starts empty, or with some work.

    Args:
        view: What the policy sees.
        nothing: Empty work.
        work: What is in it from the start.
    """

    def __init__(self, view: View, nothing: Work, work: Work | None = None) -> None:
        super().__init__(view, nothing)
        if work is not None:
            self.add(work)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def longest(self, one: Work, limit: float, most: int) -> int:
        """The most tokens of one request with which the batch takes no longer than `limit` seconds;
        at most `most`, and 0 if not even one fits."""

        def seconds(tokens: np.ndarray) -> np.ndarray:
            each = one[np.zeros(len(tokens), np.int64)]
            decodes = each.decodes & (tokens == each.tokens)
            return self._seconds(
                self._sums + replace(each, tokens=tokens, decodes=decodes).columns()
            )

        return longest(seconds, limit, most)

    def drop(self, rows: np.ndarray) -> int:
        """Takes these rows out, if they are in. Returns the free blocks that they were to take."""
        given, parts = 0, []
        for part in self.parts:
            gone = np.isin(part.rows, rows)
            if gone.any():
                given += int(part.new[gone].sum())
                self._sums = self._sums - part[gone].columns().sum(axis=1, keepdims=True)
                part = part[~gone]
            if len(part):
                parts.append(part)
        self.parts = parts
        return given

    def _seconds(self, sums: np.ndarray) -> np.ndarray:
        *_, decodes, prompts = sums
        batch = features(sums[:-2])
        seconds = self.view.step_time(
            batch._replace(
                decode_kv=batch.decode_kv - decodes,
                hidden_tokens=decodes,
                prefill_m=batch.prefill_m - prompts,
                hidden_prefill=prompts,
            )
        )
        return np.broadcast_to(seconds, sums.shape[1:])
