"""Who was in the batches of a simulated replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Who was in a batch: requests [n] by their number, the tokens each computed
    and whether it was a decode; preempted: requests that lost their cache since the batch before it
    was planned; lengthening: seconds that it took longer for those of best effort, see
    `sched.tiers`."""

    requests: np.ndarray
    tokens: np.ndarray
    decoding: np.ndarray
    preempted: np.ndarray
    lengthening: float = 0.0

    @classmethod
    def of_decodes(cls, requests: np.ndarray, steps: np.ndarray) -> list[BatchRows]:
        """Batches of nothing but decodes, one after the other. steps: int64 [n], in how many of
        them, from the first on, each of the requests is."""
        nobody, found = np.zeros(0, np.int64), []
        for step in range(1, int(steps.max()) + 1):
            here = requests[steps >= step]
            ones = np.ones(len(here), np.int64)
            found.append(cls(here, ones, ones > 0, nobody))
        return found
