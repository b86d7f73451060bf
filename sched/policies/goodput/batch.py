"""The batch being built: what each request would do in it, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.cache_kinds import HIDDEN, KV
from jaxserve.sched.cost.batch_feature_sums import columns, longest
from jaxserve.sched.cost.cost_model import BatchFeatures
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
        kinds = view.pool.kind[rows].astype(np.int64)
        kinds[fresh] = kind
        if kind == HIDDEN:
            kinds[fresh & (table.adapter[rows] > 0)] = KV
        start, loaded = table.computed[rows], np.zeros(len(rows), np.int64)
        if host.num_used:
            there = np.where(starts, host.tokens[rows], 0)
            kinds = np.where(there > 0, host.kind[rows], kinds)
            start = np.where(there > 0, there, start)
            loaded = host.slots_for(there, kinds)
        known = table.prompt_len[rows] + table.generated[rows]
        tokens = known - start
        decodes, hidden = (tokens == 1) & written, kinds == HIDDEN
        moves = bool(loaded.any()) or (view.rho is not None and bool(hidden.any()))
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
            columns=_columns(tokens, start, decodes, loaded, hidden, moves=moves),
            **vars(outlook),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def columns_of(self, one: int, tokens: Any) -> list[Any]:
        """What this request would add if it computed so many tokens, one number or several: its
        column, in which entries that depend on them are arrays if `tokens` is."""
        if self.decodes[one]:  # a single token
            return [tokens, *self.columns[1:, one].tolist()]
        start, loaded = int(self.start[one]), int(self.loaded[one])
        quad, before = tokens * (tokens + 2 * start), start * int(self.kinds[one] == HIDDEN)
        return [tokens, 0, 0, quad, 1, start, loaded, 0, before][: len(self.columns)]

    def cut(self, one: int, tokens: int) -> None:
        """Limits the tokens that this request computes."""
        self.columns[:, one] = self.columns_of(one, tokens)
        self.decodes[one] &= tokens == self.tokens[one]
        self.tokens[one] = tokens


def _columns(
    tokens: np.ndarray,
    start: np.ndarray,
    decodes: np.ndarray,
    loaded: np.ndarray,
    hidden: np.ndarray,
    *,
    moves: bool,
) -> np.ndarray:
    """Columns of `batch_feature_sums`; if any is not 0 (`moves`), then slots from the host, and the
    tokens that decodes and prompts read from hidden caches."""
    own = columns(tokens, start, decodes)
    if not moves:
        return own
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
            self._time = float(self._seconds(*self._sums[:, 0].tolist())) if self.parts else 0.0
        return self._time

    def chosen(self) -> np.ndarray:
        """Indices of the requests in it, in order, int64 [n]."""
        return np.concatenate([*self.parts, np.zeros(0, np.int64)])

    def times(self, some: np.ndarray) -> np.ndarray:
        """Seconds with the first of these requests added, with the first two, and so on, float64
        [n]."""
        sums = self._sums + self._work.columns.take(some, axis=1).cumsum(axis=1)
        return self._each(sums, sums[:, :1] != sums[:, -1:])

    def with_each(self, some: np.ndarray, one: np.ndarray | None = None) -> np.ndarray:
        """Seconds with each of these requests added by itself, float64 [n]. one: index of another
        request that is added, too."""
        sums = self._sums if one is None else self._sums + self._work.columns.take(one, axis=1)
        added = self._work.columns.take(some, axis=1)
        return self._each(sums + added, added != added[:, :1])

    def with_tokens(self, one: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of the batch with each of these numbers of tokens of one request added.

        Args:
            one: Index of the request.
            tokens: int64 [n].

        Returns:
            float64 [n].
        """
        added = self._work.columns_of(one, tokens)
        sums = [a + b for a, b in zip(self._sums[:, 0].tolist(), added, strict=True)]
        return np.asarray(self._seconds(*sums) + np.zeros(len(tokens)))

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
        if not self.parts:
            return 0
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

    def _each(self, sums: np.ndarray, varies: np.ndarray) -> np.ndarray:
        """Seconds of n batches, float64 [n].

        Args:
            sums: int64 [columns, n].
            varies: bool [columns, m], where they differ from the first batch's. What is equal in
                all batches is priced as one number.
        """
        if sums.shape[1] <= FEW:
            return np.array([self._seconds(*one) for one in sums.T.tolist()], np.float64)
        alike = sums[:, 0].tolist()
        several = np.logical_or.reduce(varies, axis=1).tolist()
        several[0] |= any(several)  # the tokens are an array if anything is
        floats = [
            row.astype(np.float64) if many else one
            for row, many, one in zip(sums, several, alike, strict=True)
        ]
        return np.asarray(self._seconds(*floats) + np.zeros(sums.shape[1]))

    def _seconds(
        self,
        tokens: Any,
        read: Any,
        decodes: Any,
        quad: Any,
        prefills: Any,
        before: Any,
        *moves: Any,
    ) -> Any:
        """Seconds of batches with these sums of `_columns`."""
        loaded, hidden, hidden_before = moves or (0, 0, 0)
        batch = BatchFeatures(
            num_tokens=tokens,
            padded_tokens=tokens,
            decode_kv=read - hidden,
            num_decodes=decodes,
            prefill_quad=quad,
            num_prefills=prefills,
            prefill_m=before - hidden_before,
            hidden_tokens=hidden,
            loaded_slots=loaded,
            hidden_prefill=hidden_before,
        )
        return self._view.step_time(batch)
