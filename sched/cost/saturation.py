"""The forward size from which on a larger batch hardly computes more tokens a second."""

from __future__ import annotations

import numpy as np

SHARE = 0.95  # of the most throughput, at which it counts as flat
INSTANT = 1e-100  # seconds, of a step without a price


def flat_from(sizes: np.ndarray, seconds: np.ndarray) -> int:
    """The index of the first size with SHARE of the best throughput ("nearly saturates", AccelGen
    section 3.1). sizes: int64 [n], tokens, ascending. seconds: float64 [n], of a batch of each
    size."""
    rate = sizes / np.maximum(seconds, INSTANT)
    return int(np.argmax(rate >= SHARE * rate.max()))
