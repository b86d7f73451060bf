"""The best set of requests for what a batch has left: the 0/1 knapsack, solved exactly."""

from __future__ import annotations

import numpy as np

UNITS = 256  # into which a capacity is divided, if it is larger


def most_valuable(weights: np.ndarray, values: np.ndarray, capacity: int) -> np.ndarray:
    """Which items to take. Dynamic programming over the items and the capacity; weights are rounded
    up to a UNITS-th of it, so that what is taken always fits.

    Args:
        weights: int64 [n], 1 or more.
        values: float64 [n], more than 0.
        capacity: What all of them may weigh.

    Returns:
        bool [n].
    """
    units = min(capacity, UNITS)
    taken = np.zeros(len(weights), bool)
    if units <= 0:
        return taken
    size = -(-weights * units // capacity)
    best, used = np.zeros(units + 1), np.zeros((len(weights), units + 1), bool)
    for i, (weight, value) in enumerate(zip(size.tolist(), values.tolist(), strict=True)):
        if weight <= units:
            other = best[: units + 1 - weight] + value
            used[i, weight:] = other > best[weight:]
            best[weight:] = np.maximum(best[weight:], other)
    left = units
    for i in range(len(weights) - 1, -1, -1):
        if used[i, left]:
            taken[i] = True
            left -= int(size[i])
    return taken
