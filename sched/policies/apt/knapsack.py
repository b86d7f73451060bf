"""Which requests to serve, and with which kind of cache: Apt-Serve's appendix, Algorithm 1.

The problem is a knapsack in which every request can be taken in two ways: with a hidden cache, or
with K and V, which takes more blocks and does not slow the others down (Definition 1). Blocks are
whole, so a hidden cache takes ceil(t / block_size) of them and K and V twice as many.

The value is at least half of the optimum. The proof needs that
1. no request is considered that would not fit alone: the entry that breaks the sequence is then a
solution by itself, and the relaxed optimum over the rest still bounds the true one;
2. the hidden cache of a request comes before its change to K and V: where it does not, since the
refined rule prefers K and V outright, the request has one entry;
3. entries after the break only add to the value. The appendix stops there; here entries that still
fit are taken in the same order, so that no memory stays idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cache.cache_kinds import CacheKind

NOT_SERVED = -1
FIRST_LOOK, LOOK_GROWTH = 128, 8
_KV, _HIDDEN = int(CacheKind.KV), int(CacheKind.HIDDEN)


@dataclass(frozen=True)
class Offers:
    """The value and the cost of each candidate: arrays [n], in the order that breaks ties.

    Attributes:
        value: Pending time p, seconds, 0 or more.
        kv: Blocks with K and V, 1 or more.
        hidden: Blocks with a hidden cache, fewer than kv; None if there are no hidden caches.
        penalty: Seconds by which its hidden cache delays all requests together, n rho t; negative
        if it is faster.
    """

    value: np.ndarray
    kv: np.ndarray
    hidden: np.ndarray | None = None
    penalty: np.ndarray | None = None

    def value_of(self, kinds: np.ndarray) -> float:
        """Total value of serving each with that kind of cache, or not at all (Eq. 7)."""
        total = float(self.value[kinds != NOT_SERVED].sum())
        if self.penalty is not None:
            total -= float(self.penalty[kinds == _HIDDEN].sum())
        return total

    def blocks(self, kinds: np.ndarray) -> int:
        """Blocks that serving each with that kind of cache takes."""
        total = int(self.kv[kinds == _KV].sum())
        if self.hidden is not None:
            total += int(self.hidden[kinds == _HIDDEN].sum())
        return total


@dataclass(frozen=True)
class Choice:
    """Which candidates are served, and how.

    Attributes:
        kinds: int64 [n], `CacheKind`, or NOT_SERVED.
        gain: float64 [n], value per block of each request's first entry.
        served: Indices of the served requests, by falling gain.
    """

    kinds: np.ndarray
    gain: np.ndarray
    served: np.ndarray


@dataclass(frozen=True)
class _Entries:
    """The candidate schedules (Eq. 10). Entry i < n is request i's first, entry n + i its change
    from hidden to KV. weight: blocks. gain: value per block. known: existing entries, in the order
    that breaks ties. kind [n]: kind of the first entries."""

    weight: np.ndarray
    gain: np.ndarray
    known: np.ndarray
    kind: np.ndarray

    def falling(self, entries: np.ndarray) -> np.ndarray:
        """These known entries, by falling gain."""
        return entries[np.argsort(-self.gain[entries], kind="stable")]

    def cut(self, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """All entries by falling gain, split at the first that exceeds the budget. The second part
        may lack entries that do not fit into the rest either."""
        known, weight, most = self.known, self.weight, FIRST_LOOK
        gain, head = self.gain[known], known
        least = -np.inf
        while most < len(known):
            # Many wait, and few fit: it is enough to sort those.
            least = np.partition(gain, len(known) - most)[len(known) - most]
            head = known[gain >= least]
            if int(np.add.reduce(weight[head])) > budget:
                break
            head, most, least = known, most * LOOK_GROWTH, -np.inf
        order = self.falling(head)
        used = np.cumsum(weight[order])
        taken = int(np.searchsorted(used, budget, side="right"))
        rest = order[taken:]
        if len(head) < len(known):
            others = known[gain < least]
            left = budget - (int(used[taken - 1]) if taken else 0)
            rest = np.concatenate([rest, self.falling(others[weight[others] <= left])])
        return order[:taken], rest


def choose(offers: Offers, budget: int) -> Choice:
    """Chooses which requests to serve in `budget` blocks, and with which cache (Algorithm 1). O(n
    log n)."""
    entries, count = _entries(offers, budget), len(offers.value)
    taken, rest = entries.cut(budget)
    kinds = _filled(entries, taken, rest, budget, count)
    if len(rest):
        # The double check: the entry that broke the sequence may outweigh all before it.
        alone = int(rest[0]) % count
        kind = _KV if offers.kv[alone] <= budget else _HIDDEN
        value = float(offers.value[alone])
        if kind == _HIDDEN and offers.penalty is not None:
            value -= float(offers.penalty[alone])
        if offers.value_of(kinds) < value:
            kinds = _with_alone(entries, alone, kind, budget, count, offers)
    served = entries.falling(np.flatnonzero(kinds != NOT_SERVED))
    return Choice(kinds, entries.gain[:count], served)


def _entries(offers: Offers, budget: int) -> _Entries:
    value, kv, hidden, penalty = offers.value, offers.kv, offers.hidden, offers.penalty
    fits = kv <= budget
    if hidden is None or penalty is None:
        return _Entries(kv, value / kv, np.flatnonzero(fits), np.zeros(len(kv), np.int64))
    left = value - penalty
    direct = fits & (penalty > 0) & (left * kv <= value * hidden)  # the refined rule
    half = ~direct & (hidden <= budget) & (left >= 0)
    direct |= fits & ~half
    first = np.where(direct, kv, hidden)
    gain = np.where(direct, value, left) / first
    more = np.maximum(kv - hidden, 1)  # nothing if K and V are found
    upgrade = np.minimum(penalty / more, gain)  # rounding must not put it first
    known = np.concatenate(
        [np.flatnonzero(direct | half), len(kv) + np.flatnonzero(half & fits & (penalty > 0))]
    )
    kind = np.where(direct, _KV, _HIDDEN)
    return _Entries(np.concatenate([first, more]), np.concatenate([gain, upgrade]), known, kind)


def _filled(
    entries: _Entries, taken: np.ndarray, rest: np.ndarray, budget: int, count: int
) -> np.ndarray:
    """Kinds [count] if the entries in `taken` are served, and those of the rest that still fit:
    first requests that are not served yet, then changes to KV."""
    kinds = np.full(count, NOT_SERVED)
    firsts = taken[taken < count]
    kinds[firsts] = entries.kind[firsts]
    kinds[taken[taken >= count] - count] = _KV
    if not len(rest):
        return kinds
    left = budget - int(entries.weight[taken].sum())
    served = fit(rest[rest < count], entries.weight, left)
    kinds[served] = entries.kind[served]
    left -= int(entries.weight[served].sum())
    upgrades = rest[rest >= count]
    upgrades = upgrades[kinds[upgrades - count] == _HIDDEN]
    kinds[fit(upgrades, entries.weight, left) - count] = _KV
    return kinds


def _with_alone(
    entries: _Entries, alone: int, kind: int, budget: int, count: int, offers: Offers
) -> np.ndarray:
    """Kinds [count] if the request `alone` is served before all others."""
    left = budget - int(offers.kv[alone] if kind == _KV or offers.hidden is None else 0)
    if kind == _HIDDEN and offers.hidden is not None:
        left -= int(offers.hidden[alone])
    others = entries.known[entries.known % count != alone]
    others = entries.falling(others[entries.weight[others] <= left])
    kinds = _filled(entries, others[:0], others, left, count)
    kinds[alone] = kind
    return kinds


def fit(entries: np.ndarray, weight: np.ndarray, left: int) -> np.ndarray:
    """Goes through the entries in order and keeps those that fit into the rest of `left`."""
    found = [entries[:0]]
    while len(entries):
        entries = entries[weight[entries] <= left]
        used = np.cumsum(weight[entries])
        count = int(np.searchsorted(used, left, side="right"))
        if not count:
            break
        found.append(entries[:count])
        left -= int(used[count - 1])
        entries = entries[count:]
    return np.concatenate(found)
