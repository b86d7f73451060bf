"""A policy's record of its own batches. Their times are predictions, since policies do not learn
how long steps took."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import columns
from jaxserve.sched.policy import View
from jaxserve.sched.unified.batch_builder import PlannedWork, seconds_of

KEEP = 0.95  # factor of a moving mean at each step


class StepTimes:
    """Times of the steps so far.

    Attributes:
        step: Seconds of a typical step with decodes, a moving mean; 0 before the first.
    """

    def __init__(self) -> None:
        self.step = 0.0
        self._tokens = self._seconds = 0.0  # recent sums of prompts, and of steps with them

    def rate(self, view: View) -> float:
        """Recent prompt tokens per second; before the first, those of a whole batch of them."""
        if not self._tokens:
            size = np.array([view.limits.max_batch_tokens])
            alone = columns(size, np.zeros(1, np.int64), np.zeros(1, bool))
            self._tokens, self._seconds = float(size[0]), float(seconds_of(view, alone)[0])
        return self._tokens / max(self._seconds, 1e-9)

    def note(self, work: PlannedWork, seconds: float) -> None:
        """Notes a batch that takes this long."""
        decodes = int(np.count_nonzero(work.decodes))
        prompts = int(work.tokens.sum()) - decodes
        if decodes:
            self.step += (1 - KEEP if self.step else 1.0) * (seconds - self.step)
        if prompts:
            self._tokens = KEEP * self._tokens + prompts
            self._seconds = KEEP * self._seconds + seconds
