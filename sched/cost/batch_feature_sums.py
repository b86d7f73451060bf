"""Costs of hypothetical batches, from sums over the requests in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures

NUM_COLUMNS = 6
MOVED = ("loaded_slots", "copied_slots", "saved_slots")  # columns that may follow these
LOOK = 64  # sizes that are tried at once


def columns(tokens: np.ndarray, start: np.ndarray, decodes: np.ndarray) -> np.ndarray:
    """What requests with K and V add to the features of a batch, int64 [NUM_COLUMNS, n].

    Args:
        tokens: int64 [n], tokens computed in the batch.
        start: int64 [n], tokens cached before.
        decodes: bool [n], which requests decode; the others are prefills.
    """
    found = np.empty((NUM_COLUMNS, len(tokens)), np.int64)
    found[0], found[2] = tokens, decodes
    found[4] = 1 - found[2]
    found[1] = found[2] * (start + 1)
    found[3] = found[4] * tokens * (tokens + 2 * start)
    found[5] = found[4] * start
    return found


def features(sums: np.ndarray) -> BatchFeatures:
    """The features of m batches, from the sums of their requests' columns, [NUM_COLUMNS, m],
    optionally followed by those of MOVED."""
    tokens, read, decodes, quad, prefills, before = sums[:NUM_COLUMNS]
    moved = dict(zip(MOVED, sums[NUM_COLUMNS:], strict=False))
    return BatchFeatures(tokens, tokens, read, decodes, quad, prefills, before, **moved)


def prefix(ok: np.ndarray) -> int:
    """Number of entries before the first False."""
    if not len(ok):
        return 0
    first = int(ok.argmin())
    return len(ok) if ok[first] else first


def longest(seconds: Callable[[np.ndarray], np.ndarray], limit: float, most: int) -> int:
    """The most tokens that a piece of a prompt may have; 0 if not even one fits.

    Args:
        seconds: Maps the piece's tokens, int64 [n], to seconds of the batch, float64 [n]; must not
            decrease.
        limit: Seconds that the batch may take.
        most: The most tokens.
    """
    if limit == np.inf:
        return max(most, 0)
    low, high = 0, most + 1  # `low` fits, `high` does not
    while high - low > 1:
        between = min(LOOK, high - low - 1)
        tokens = low + 1 + np.arange(between) * (high - low - 2) // max(between - 1, 1)
        count = prefix(seconds(tokens) <= limit)
        if count < len(tokens):
            high = int(tokens[count])
        if count:
            low = int(tokens[count - 1])
    return low
