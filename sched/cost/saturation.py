"""The batch size from which on larger batches hardly increase throughput."""

from __future__ import annotations

import numpy as np

SHARE = 0.95  # share of the best throughput that counts as saturated
INSTANT = 1e-100  # seconds of a step that the cost model says is free


def flat_from(sizes: np.ndarray, seconds: np.ndarray) -> int:
    """Index of the first size with SHARE of the best throughput ("nearly saturates", AccelGen
    section 3.1). sizes: int64 [n], tokens, ascending. seconds: float64 [n], time of a batch of each
    size."""
    rate = sizes / np.maximum(seconds, INSTANT)
    return int(np.argmax(rate >= SHARE * rate.max()))
