"""How many calls a program still makes, learned from programs that have ended."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

ENOUGH = 8
"""Least ended programs of a kind for their numbers to be used."""
KEPT = 128
"""Ended programs kept of each kind, the latest."""
MOST_KINDS = 4096
"""Kinds kept, those last used."""

Kind = tuple[str, str, bool]
"""Tenant, SLO class, and whether its calls name it."""


class CallCounts:
    """Numbers of calls of ended programs, by kind."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, deque[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, kind: Kind, calls: int) -> None:
        """Learns from a program that has ended after so many calls."""
        self._kinds.setdefault(kind, deque(maxlen=KEPT)).append(calls)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)

    def left(self, kind: Kind, calls: int) -> float:
        """Mean number of further calls of programs that have made so many; 0 if too few programs
        have ended, or none of them had as many."""
        counts = self._kinds.get(kind, ())
        if len(counts) < ENOUGH:
            return 0.0
        longer = [count - calls for count in counts if count >= calls]
        return sum(longer) / len(longer) if longer else 0.0

    def memory(self, kind: Kind) -> float:
        """How well the calls that a program has made tell how many are left: 1 if all programs make
        as many, 0 if the calls made tell nothing, or if too few programs have ended (Continuum's
        memoryfulness, the negative correlation of the two)."""
        counts = self._kinds.get(kind, ())
        if len(counts) < ENOUGH:
            return 0.0
        total = np.repeat(np.array(counts), counts)
        made = np.concatenate([np.arange(1, count + 1) for count in counts])
        left = total - made
        if not (made.std() and left.std()):
            return 0.0
        return -float(np.corrcoef(made, left)[0, 1])
