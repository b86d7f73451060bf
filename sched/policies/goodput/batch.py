"""The batch being built: what each request would do in it, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.cache.cache_kinds import HIDDEN, KV
from jaxserve.sched.cost.batch_feature_sums import columns, features, longest
from jaxserve.sched.policies.goodput.outlook import Outlook
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import WAITING

FEW = 6  # batches that are priced faster one by one than as an array


@dataclass
class GoodputWork:
    """The work of n requests in the step; arrays [n]. Selections of requests are indices of these.

    Attributes:
        rows: Rows of the table.
        tokens: Tokens that each computes now; initially all its pending ones.
        start: Tokens cached before.
        new: Free blocks that it takes.
        starts: bool, whether it holds no cache yet.
        decodes: bool, whether only its newest generated token is pending.
        reserve: Cache tokens to have room for.
        kinds: `CacheKind` of each.
        loaded: Slots that are restored from the host first.
        paused: bool, whether it has written tokens, and holds no cache.
        due, gap_due, longest, attains, loss, missed, bare: See `Outlook`.
        loads: Whether any has slots to load.
        hidden: Whether any has a hidden cache.
        columns: What each adds to the features of a batch, int64 [columns, n]; see `_columns`.
    """

    rows: np.ndarray
    tokens: np.ndarray
    start: np.ndarray
    new: np.ndarray
    starts: np.ndarray
    decodes: np.ndarray
    reserve: np.ndarray
    kinds: np.ndarray
    loaded: np.ndarray
    paused: np.ndarray
    due: np.ndarray
    gap_due: np.ndarray
    longest: np.ndarray
    attains: np.ndarray
    loss: np.ndarray
    missed: np.ndarray
    bare: np.ndarray
    loads: bool
    hidden: bool
    columns: np.ndarray

    @classmethod
    def of_rows(cls, view: View, rows: np.ndarray, outlook: Outlook, kind: int) -> GoodputWork:
        """All pending tokens of each request, with its tokens on the host restored.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            outlook: Outlook of these rows.
            kind: `CacheKind` of new caches.
        """
        table, host = view.table, view.host
        starts, written = table.state[rows] == WAITING, table.generated[rows] > 0
        fresh = starts & (table.computed[rows] == 0)  # cached prefixes have a kind already
        kinds = np.where(fresh, kind, view.pool.kind[rows]).astype(np.int64)
        if kind == HIDDEN:
            kinds[fresh & (table.adapter[rows] > 0)] = KV
        start, loaded = table.computed[rows], np.zeros(len(rows), np.int64)
        if host.num_used:
            there = np.where(starts, host.tokens[rows], 0)
            kinds = np.where(there > 0, host.kind[rows], kinds)
            start = np.where(there > 0, there, start)
            loaded = slots_for(there, kinds)
        known = table.prompt_len[rows] + table.generated[rows]
        tokens = known - start
        decodes, hidden = (tokens == 1) & written, kinds == HIDDEN
        return cls(
            rows=rows,
            tokens=tokens,
            start=start,
            new=view.pool.needed(rows, known, kinds),
            starts=starts,
            decodes=decodes,
            reserve=known,
            kinds=kinds,
            loaded=loaded,
            paused=starts & written,
            loads=bool(loaded.any()),
            hidden=view.rho is not None and bool(hidden.any()),
            columns=_columns(tokens, start, decodes, loaded, hidden),
            **vars(outlook),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def columns_of(self, one: int, tokens: np.ndarray) -> np.ndarray:
        """What this request would add if it computed each of these numbers of tokens."""
        decodes = self.decodes[one] & (tokens == self.tokens[one])
        hidden = self.kinds[one] == HIDDEN
        return _columns(tokens, self.start[one], decodes, self.loaded[one], hidden)

    def cut(self, one: int, tokens: int) -> None:
        """Limits the tokens that this request computes."""
        self.columns[:, one] = self.columns_of(one, np.array([tokens]))[:, 0]
        self.decodes[one] &= tokens == self.tokens[one]
        self.tokens[one] = tokens


def _columns(
    tokens: np.ndarray, start: Any, decodes: np.ndarray, loaded: Any, hidden: Any
) -> np.ndarray:
    """Columns of `batch_feature_sums`; then slots from the host, and the tokens that decodes and
    prompts read from hidden caches."""
    own = columns(tokens, start, decodes)
    found = np.empty((len(own) + 3, len(tokens)), np.int64)
    found[:-3], found[-3] = own, loaded
    found[-2], found[-1] = own[1] * hidden, own[5] * hidden
    return found


class GoodputBatch:
    """A batch being built, empty or with some requests.

    Args:
        view: What the policy sees.
        work: All requests.
        some: Indices of the requests in it from the start.
    """

    def __init__(self, view: View, work: GoodputWork, some: np.ndarray | None = None) -> None:
        self.parts: list[np.ndarray] = []
        self._view, self._work = view, work
        self._sums = np.zeros((len(work.columns), 1), np.int64)
        self._time: float | None = 0.0  # None after changes
        if some is not None:
            self.add(some)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def tokens(self) -> int:
        """Tokens of all requests in it."""
        return int(self._sums[0, 0])

    @property
    def seconds(self) -> float:
        """How long it takes; 0 if it is empty."""
        if self._time is None:
            self._time = float(self._seconds(self._sums[:, 0].tolist())) if self.parts else 0.0
        return self._time

    def chosen(self) -> np.ndarray:
        """Indices of the requests in it, in order, int64 [n]."""
        return np.concatenate([*self.parts, np.zeros(0, np.int64)])

    def times(self, some: np.ndarray) -> np.ndarray:
        """Seconds with the first of these requests added, with the first two, and so on, float64
        [n]."""
        return self._each(self._sums + self._work.columns.take(some, axis=1).cumsum(axis=1))

    def with_each(self, some: np.ndarray, one: np.ndarray | None = None) -> np.ndarray:
        """Seconds with each of these requests added by itself, float64 [n]. one: index of another
        request that is added, too."""
        sums = self._sums if one is None else self._sums + self._work.columns.take(one, axis=1)
        return self._each(sums + self._work.columns.take(some, axis=1))

    def with_tokens(self, one: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of the batch with each of these numbers of tokens of one request added.

        Args:
            one: Index of the request.
            tokens: int64 [n].

        Returns:
            float64 [n].
        """
        return self._each(self._sums + self._work.columns_of(one, tokens))

    def longest(self, one: int, limit: float, most: int) -> int:
        """Most tokens of a request with which the batch takes no longer than `limit` seconds; at
        most `most`, and 0 if not even one fits."""
        return longest(lambda tokens: self.with_tokens(one, tokens), limit, most)

    def add(self, some: np.ndarray) -> None:
        """Adds these requests; the caller has checked that they fit."""
        if len(some):
            self.parts.append(some)
            self._time = None
            self._sums += self._work.columns.take(some, axis=1).sum(axis=1, keepdims=True)

    def drop(self, some: np.ndarray) -> int:
        """Removes these requests, if they are in. Returns the free blocks that they would have
        taken."""
        gone, parts = np.zeros(len(self._work), bool), []
        gone[some] = True
        given = 0
        for part in self.parts:
            out = part[gone[part]]
            if len(out):
                given += int(self._work.new[out].sum())
                self._sums -= self._work.columns.take(out, axis=1).sum(axis=1, keepdims=True)
                part = part[~gone[part]]
            if len(part):
                parts.append(part)
        self.parts, self._time = parts, None
        return given

    def _each(self, sums: np.ndarray) -> np.ndarray:
        if sums.shape[1] <= FEW:
            return np.array([self._seconds(one) for one in sums.T.tolist()], np.float64)
        return np.broadcast_to(self._seconds(sums), sums.shape[1:])

    def _seconds(self, sums: Any) -> Any:
        batch = features(sums[:-2] if self._work.loads else sums[:-3])
        if self._work.hidden:
            decodes, prompts = sums[-2], sums[-1]
            batch = batch._replace(
                decode_kv=batch.decode_kv - decodes,
                hidden_tokens=decodes,
                prefill_m=batch.prefill_m - prompts,
                hidden_prefill=prompts,
            )
        return self._view.step_time(batch)
