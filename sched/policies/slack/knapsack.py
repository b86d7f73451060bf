"""The best set of requests for the rest of a batch: the 0/1 knapsack, solved exactly."""

from __future__ import annotations

import numpy as np

UNITS = 256  # into which larger capacities are divided


def most_valuable(weights: np.ndarray, values: np.ndarray, capacity: int) -> np.ndarray:
    """Which items to take, by dynamic programming over items and capacity. Weights are rounded up
    to a UNITS-th of the capacity, so that the result always fits.

    Args:
        weights: int64 [n], 1 or more.
        values: float64 [n], more than 0.
        capacity: Most total weight.

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
