"""The rule that lets no tenant crowd others out with requests that are cheap, or in no hurry."""

from __future__ import annotations

import math

import numpy as np


class Tenants:
    """What requests are worth by whose they are: the more of a tenant's have been in time of late,
    the less the next one is. The sum of all tenants' logarithms, each times its weight, grows most
    that way (proportional fairness: Kelly, "Charging and rate control for elastic traffic", 1997).

    Args:
        seconds: After which what was served counts for 1/e.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._time = seconds, -math.inf
        self._served = np.zeros(1)  # requests in time, by tenant

    def worth(self, tenants: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Of requests of these tenants, int64 [n], with these weights, float64 [n]: float64 [n] up
        to 1, which those of the tenant who was served least for its weight are worth."""
        if not len(tenants) or (tenants == tenants[0]).all():
            return np.ones(len(tenants))
        self._grow(tenants)
        worth = weights / (1.0 + self._served[tenants])
        return np.asarray(worth / worth.max())

    def note(self, tenants: np.ndarray, clock: float) -> None:
        """Requests of these tenants, int64 [n], have a first token in time, in the step that begins
        at `clock`."""
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
