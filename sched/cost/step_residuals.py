"""How far an engine's steps deviate from its cost model, and random draws of such deviations.

A cost model predicts mean times. Actual times also vary with other programs, the processor's clock
and the host's other work, which no feature of the batch shows; without this a simulation has no
tails. The variation is drawn from the residuals of served steps, in runs of consecutive steps,
since slow steps follow each other (moving block bootstrap: Kunsch, Annals of Statistics 17(3),
1989; in a circle: Politis and Romano, 1992).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cost.cost_model import LinearCostModel
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.served_steps import MIN_STEPS, MOST, ServedSteps

LEVELS = 1000  # quantiles kept of each kind's residuals
SIZES = 4  # kinds of steps by predicted time, with prompts and without
RUN = 50  # consecutive steps that are drawn together
LOTS = 1 << 16  # batches after which the draws repeat
_APART = 7919  # offset between replicas, so that they are not slow together


@dataclass(frozen=True, eq=False)
class Scatter:
    """Residuals of served steps, to draw from.

    Attributes:
        factors: float64 [2 * SIZES, LEVELS], measured over predicted time, ascending: of each size
            of steps without prompts, then of each size of steps with prompts.
        bounds: float64 [2, SIZES - 1], predicted seconds at which the next size begins.
        host: float64 [LEVELS], the same factors for the host's thread.
        levels: int64 [2, n], for each served step in order, the index of its factor in its kind's
            factors, and the same for the host's.
    """

    factors: np.ndarray
    bounds: np.ndarray
    host: np.ndarray
    levels: np.ndarray

    def lots(self, seed: int) -> np.ndarray:
        """Draws the levels of each batch of a simulation, for the device and the host.

        Args:
            seed: Equal seeds draw equal levels.

        Returns:
            int64 [2, LOTS]; later batches start again at the first.
        """
        rng, count = np.random.default_rng((seed, 5)), self.levels.shape[1]
        run = min(RUN, count)
        starts = rng.integers(count, size=-(-LOTS // run))
        places = (starts[:, None] + np.arange(run)) % count
        return self.levels[:, places.ravel()[:LOTS]]


def fit_scatter(steps: ServedSteps, model: LinearCostModel, host: HostOverhead) -> Scatter | None:
    """The residuals of served steps by kind, scaled so that each kind's total time is preserved.

    Args:
        steps: In the order in which they were served.
        model: Predicts the device's time.
        host: Predicts the host's time, and the extra time of steps after idle.

    Returns:
        None for fewer than MIN_STEPS steps.
    """
    steps = steps.select(steps.device_time > 0)
    if len(steps) < MIN_STEPS:
        return None
    predicted = np.broadcast_to(model.batch_time(steps.features), len(steps))
    expected = predicted + host.idle * steps.after_idle
    factor = np.minimum(steps.device_time / expected, MOST)
    prompts = steps.features.num_prefills > 0
    inner = np.arange(1, SIZES) / SIZES
    bounds = np.stack(
        [
            np.quantile(predicted[mine] if mine.any() else predicted, inner)
            for mine in (~prompts, prompts)
        ]
    )
    sizes = np.where(prompts, _size(bounds[1], predicted), _size(bounds[0], predicted))
    kinds = sizes + SIZES * prompts
    factors, levels = np.ones((2 * SIZES, LEVELS)), np.zeros((2, len(steps)), np.int64)
    for kind in range(2 * SIZES):
        mine = kinds == kind
        # If there are hardly any steps of a kind, the residuals of all steps are used.
        like = mine if np.count_nonzero(mine) >= MIN_STEPS else np.ones(len(steps), bool)
        factors[kind] = _quantiles(factor[like], expected[like])
        levels[0, mine] = _ranks(factor[like], factor[mine])
    took, should = steps.host_time(), steps.predicted_host_time(host)
    known = should > 0  # otherwise the clock has not moved
    factor = np.minimum(np.divide(took, should, out=np.ones(len(steps)), where=known), MOST)
    levels[1] = _ranks(factor, factor)
    return Scatter(factors, bounds, _quantiles(factor, should), levels)


def _quantiles(found: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """LEVELS quantiles, scaled to have the weighted mean."""
    total = weights.sum()
    scale = (found * weights).sum() / total / found.mean() if total else 1.0
    return scale * np.quantile(found, (np.arange(LEVELS) + 0.5) / LEVELS)


def _ranks(among: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The index of each value among the quantiles, the middle one if several are equal."""
    among = np.sort(among)
    below, upto = (np.searchsorted(among, found, side) for side in ("left", "right"))
    return (below + upto) * LEVELS // (2 * len(among) + 1)


def _size(bounds: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return np.searchsorted(bounds, predicted, side="right")


class Draws:
    """Random factors, actual over predicted time, for the batches of one simulated replica.

    Args:
        scatter: Residuals to draw from.
        seed: Seed of the simulation.
        replica: Number of the replica.
    """

    def __init__(self, scatter: Scatter, seed: int, replica: int) -> None:
        self._scatter = scatter
        self._lots = np.roll(scatter.lots(seed), -first_lot(replica), axis=1)

    def residuals(self, first: int, predicted: np.ndarray, *, prompts: bool) -> np.ndarray:
        """The factors of consecutive batches.

        Args:
            first: Number of the first batch.
            predicted: float64 [n], predicted seconds.
            prompts: Whether they have prompts in them.

        Returns:
            float64 [n].
        """
        kinds = _size(self._scatter.bounds[int(prompts)], predicted) + SIZES * prompts
        places = np.arange(first, first + len(predicted)) % LOTS
        return self._scatter.factors[kinds, self._lots[0, places]]

    def of_host(self, first: int, count: int) -> np.ndarray:
        """The factors of the host's time for consecutive batches, float64 [count]."""
        places = np.arange(first, first + count) % LOTS
        return self._scatter.host[self._lots[1, places]]


def first_lot(replica: int) -> int:
    """Where a replica begins in the draws."""
    return replica * _APART % LOTS
