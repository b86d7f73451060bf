"""Shared prefixes of prompts, as columns: the earlier request and the length of the prefix.

Token i of two streams is the same exactly if the columns say so: the streams form a tree, whose
branches are the requests. A stream is a prompt and the output after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NO_PREFIX = -1  # for a request that shares no prefix with earlier ones


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of n requests shared with earlier ones. `Workload` checks them, since it has the
    lengths.

    Attributes:
        prefix_of: int64 [n], index of the earlier request whose stream has the longest prefix in
            common with the prompt, or NO_PREFIX.
        prefix_len: int64 [n], number of tokens of that prefix; 0 for NO_PREFIX.
    """

    prefix_of: np.ndarray
    prefix_len: np.ndarray

    @classmethod
    def none(cls, count: int) -> Prefixes:
        """Prefixes of `count` requests that share nothing."""
        return cls(np.full(count, NO_PREFIX, np.int64), np.zeros(count, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Prefixes]) -> Prefixes:
        """The parts one after another; they share nothing with each other."""
        ends = np.cumsum([0, *map(len, parts)])
        moved = [
            np.where(part.prefix_of >= 0, part.prefix_of + start, NO_PREFIX)
            for part, start in zip(parts, ends[:-1].tolist(), strict=True)
        ]
        return cls(np.concatenate(moved), np.concatenate([part.prefix_len for part in parts]))

    def __len__(self) -> int:
        return len(self.prefix_of)

    def select(self, which: np.ndarray) -> Prefixes:
        """Prefixes of selected requests: ascending indices, a mask, or a permutation that keeps
        each behind the one whose prefix it shares. If that one is not selected, another with the
        longest common prefix takes its place."""
        kept = np.arange(len(self))[which]
        number = np.full(len(self) + 1, NO_PREFIX)  # one more, for NO_PREFIX itself
        number[kept] = np.arange(len(kept))
        found = self
        if (number[self.prefix_of[kept]] < 0)[self.prefix_of[kept] >= 0].any():
            found = self._among(number[:-1] >= 0)
        return Prefixes(number[found.prefix_of[kept]], found.prefix_len[kept])

    def in_order(self, order: np.ndarray, prompt_len: np.ndarray) -> Prefixes:
        """Prefixes of selected requests in another order: each has the longest prefix in common
        with one of those before it.

        Args:
            order: int64 [k], different indices.
            prompt_len: int64 [n], tokens.
        """
        parent = parents(self.prefix_of, self.prefix_len).tolist()
        length, prompts = self.prefix_len.tolist(), prompt_len.tolist()
        # Of each request, the part behind its prefix: how far the streams of those so far have it
        # in common, and which of them the farthest.
        reach: dict[int, tuple[float, int]] = {}
        source, shared = np.full(len(order), NO_PREFIX), np.zeros(len(order), np.int64)
        for place, own in enumerate(order.tolist()):
            one, upto, found = own, math.inf, False
            while one >= 0:
                far, other = reach.get(one, (0.0, NO_PREFIX))
                common = min(far, upto, prompts[own])
                if not found and common > length[one]:
                    source[place], shared[place], found = other, common, True
                if upto > far:
                    reach[one] = upto, place
                one, upto = parent[one], length[one]
        return Prefixes(source, shared)

    def _among(self, kept: np.ndarray) -> Prefixes:
        """The same requests, with prefixes of kept requests, bool [n], redirected to other kept
        ones."""
        stays, length = kept.tolist(), self.prefix_len.tolist()
        parent = parents(self.prefix_of, self.prefix_len).tolist()
        source, shared = self.prefix_of.copy(), self.prefix_len.copy()
        # For each one left out, the kept request with the longest common prefix, and its length.
        heir, long = [NO_PREFIX] * len(self), [0] * len(self)
        for number in np.flatnonzero(kept & (source >= 0)).tolist():
            if stays[source[number]]:
                continue  # has updated the heirs already
            one, common = parent[number], length[number]
            while one >= 0 and not stays[one] and heir[one] < 0:
                heir[one], long[one] = number, common
                one, common = parent[one], length[one]
            if one < 0:
                source[number], shared[number] = NO_PREFIX, 0
            elif stays[one]:
                source[number], shared[number] = one, common
            else:
                source[number], shared[number] = heir[one], min(common, long[one])
                if common > long[one]:
                    heir[one], long[one] = number, common
        return Prefixes(source, shared)


def parents(prefix_of: np.ndarray, prefix_len: np.ndarray) -> np.ndarray:
    """Where each request branches off: the first in its chain of earlier requests that shares less
    with its own, int64 [n]. So prefix_len falls from parent to parent.

    Args:
        prefix_of: int64 [n], see `Prefixes`.
        prefix_len: int64 [n], in tokens or in blocks.
    """
    parent, length = prefix_of.tolist(), prefix_len.tolist()
    for number, common in enumerate(length):
        one = parent[number]
        while one >= 0 and length[one] >= common:
            one = parent[one]
        parent[number] = one
    return np.array(parent, np.int64)
