"""A cost model that learns from the steps it has predicted, in the engine and the simulator.

Non-negative least squares over exponentially forgotten normal equations, pulled towards a multiple
of the initial model where the steps say nothing else. (Recursive least squares with clipped
coefficients diverged on measured steps: clipping one coefficient leaves its share in the others.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.cost_model_fit import columns, fitted, nearest, ready_to_fit

HALF_LIFE = 1000  # steps after which the weight of an observation has halved
ERROR_HALF_LIFE = 100
EVERY = 32  # steps between solutions; the first ones come sooner
CLIP = 2.0  # most that an observation counts for, as a multiple of the expected time
RECENT = 5  # steps from which the current bias of predictions is estimated


class OnlineCostModel:
    """A `CostModel` that starts from `prior` and learns from each step. Not thread-safe.

    It minimises squared errors relative to the expected time, so that short steps count as much as
    long ones and noise does not bias predictions down. Outliers, such as of a paused process, are
    clipped to CLIP times what the last few steps suggest, and are forgotten like the others.

    Attributes:
        model: The model learned so far.
        steps: Steps observed.
    """

    def __init__(self, prior: LinearCostModel) -> None:
        ready_to_fit()  # so that no step has to wait for it
        self.model = prior
        self.steps = 0
        self._prior = fitted(prior)
        size = len(self._prior)
        self._a, self._b = np.zeros((size, size)), np.zeros(size)
        self._weight = 0.0  # sum of the weights of all observations
        self._recent: deque[float] = deque(maxlen=RECENT)  # measured / predicted
        self._error, self._error_weight = 0.0, 0.0

    @property
    def error(self) -> float:
        """Recent mean relative error of the predictions; 0 before the first step."""
        return self._error / self._error_weight if self._error_weight else 0.0

    def batch_time(self, features: BatchFeatures) -> Any:
        """See `CostModel`."""
        return self.model.batch_time(features)

    def observe(self, features: BatchFeatures, seconds: float) -> None:
        """Learns from a batch that took `seconds`. ValueError if it is not positive."""
        if not 0 < seconds < np.inf:
            raise ValueError(f"a step must have taken a positive time, got {seconds}")
        predicted = float(self.model.batch_time(features))
        ratio = seconds / predicted if predicted else 1.0
        usual = sorted(self._recent)[len(self._recent) // 2] if self._recent else ratio
        self._recent.append(ratio)
        # The expected time of such a step, given the last few; errors are relative to it.
        unit = usual * predicted if predicted else seconds
        seconds = min(max(seconds, unit / CLIP), unit * CLIP)
        row = np.array(columns(features, self.model), np.float64) * (self.model.num_layers / unit)
        keep = 0.5 ** (1 / HALF_LIFE)
        self._a *= keep
        self._a += np.outer(row, row)
        self._b *= keep
        self._b += row * (seconds / unit)
        self._weight = self._weight * keep + 1.0
        keep = 0.5 ** (1 / ERROR_HALF_LIFE)
        self._error = self._error * keep + abs(predicted / seconds - 1.0)
        self._error_weight = self._error_weight * keep + 1.0
        self.steps += 1
        if self.steps % EVERY == 0 or (self.steps < EVERY and self.steps in (4, 8, 16)):
            self._solve()

    def _solve(self) -> None:
        self._recent.clear()  # it refers to the old predictions
        values = nearest(self._a, self._b, self._weight, self._prior)
        self.model = replace(self.model, coefficients=Coefficients(*values.tolist()))
