"""The rule that keeps tenants from crowding out others with cheap or patient requests."""

from __future__ import annotations

import math

import numpy as np


class Tenants:
    """The worth of requests by tenant: the more of a tenant's requests have been in time recently,
    the less the next one is worth. This maximises the weighted sum of the logarithms over tenants
    (proportional fairness: Kelly, "Charging and rate control for elastic traffic", 1997).

    Args:
        seconds: Seconds after which past service counts for 1/e.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._time = seconds, -math.inf
        self._served = np.zeros(1)  # requests in time, by tenant

    def worth(self, tenants: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The worth, float64 [n], of requests of these tenants, int64 [n], with these weights,
        float64 [n]: at most 1, which is the worth for the tenant served least for its weight."""
        if not len(tenants) or (tenants == tenants[0]).all():
            return np.ones(len(tenants))
        self._grow(tenants)
        worth = weights / (1.0 + self._served[tenants])
        return np.asarray(worth / worth.max())

    def note(self, tenants: np.ndarray, clock: float) -> None:
        """Notes that requests of these tenants, int64 [n], have a first token in time in the step
        that begins at `clock`."""
        if not len(tenants):
            return
        self._grow(tenants)
        self._served *= math.exp(min(self._time - clock, 0.0) / self._seconds)
        self._time = clock
        np.add.at(self._served, tenants, 1.0)

    def _grow(self, tenants: np.ndarray) -> None:
        more = int(tenants.max()) + 1 - len(self._served)
        if more > 0:
            self._served = np.append(self._served, np.zeros(more))
