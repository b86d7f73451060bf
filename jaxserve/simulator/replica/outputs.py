"""The outputs of a simulation's requests, and their times."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.row_columns import grow_columns


class Outputs:
    """The outputs of n requests, by number; replicas fill them in.

    Attributes:
        lengths: int64 [n], tokens that each generates; policies do not know this.
        offsets: int64 [n], where each request's tokens begin in `times`.
        times: float64 [sum of lengths], when the host had each token; nan until then.
        over: bool [n], whether the request has ended.
        preemptions: int64 [n].
        moves: int64 [n], how often each went on at another replica while its own was well.
        found: int64 [n], tokens of each prompt that were cached when it first started.
        ended: Numbers of the requests that have ended since its reader last emptied it.
        drafted: int64 [n], drafted tokens that were computed.
        accepted: int64 [n], drafted tokens that were right, and in the output.
    """

    def __init__(self) -> None:
        self.lengths = self.offsets = self.preemptions = self.found = np.zeros(0, np.int64)
        self.drafted = self.accepted = self.moves = np.zeros(0, np.int64)
        self.times, self.over = np.zeros(0), np.zeros(0, bool)
        self.ended: list[int] = []

    def add(self, lengths: np.ndarray) -> None:
        """Adds requests by their output lengths, int64 [m]."""
        before, count = len(self.times), len(lengths)
        offsets = before + np.cumsum(lengths) - lengths
        self.lengths = np.concatenate([self.lengths, lengths])
        self.offsets = np.concatenate([self.offsets, offsets])
        self.times = np.concatenate([self.times, np.full(int(lengths.sum()), np.nan)])
        self.over = np.concatenate([self.over, np.zeros(count, bool)])
        grow_columns(self, len(self.lengths), preemptions=0, found=0, drafted=0, accepted=0)
        grow_columns(self, len(self.lengths), moves=0)

    def end(self, number: int) -> None:
        """Notes that a request has ended."""
        self.over[number] = True
        self.ended.append(number)

    def so_far(self, number: int) -> list[float]:
        """When the tokens of a request came that has not ended."""
        first = int(self.offsets[number])
        times = self.times[first : first + int(self.lengths[number])]
        return list(times[~np.isnan(times)].tolist())

    def cut(self, end: float) -> None:
        """Forgets tokens that came after `end`."""
        self.times[self.times > end] = np.nan

    def last_times(self, numbers: np.ndarray) -> np.ndarray:
        """When the last token of each of these requests came, float64 [k]; nan if it has not."""
        return np.asarray(self.times[self.offsets[numbers] + self.lengths[numbers] - 1])

    def in_order(self, order: np.ndarray) -> np.ndarray:
        """The token times of the requests with these numbers, one request after the other."""
        counts = self.lengths[order]
        each = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.asarray(self.times[np.repeat(self.offsets[order], counts) + each])
