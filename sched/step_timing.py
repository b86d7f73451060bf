"""Feedback to a cost model on the steps that it has predicted, in the engine and the simulator."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass

from jaxserve.sched.cost.cost_model import BatchFeatures, CostModel
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.size_ratios import SizeRatios
from jaxserve.sched.step import Move, Step

RECENT = 128  # steps that `StepWatch.overrun` covers
WITHIN = 0.8  # share of them that it bounds
HOST_STEPS = 15  # steps that `HostTimes` covers
EVERY = 16  # steps between updates


@dataclass(frozen=True, slots=True)
class Watched:
    """A launched step.

    Attributes:
        features: Its features for the cost model.
        predicted: Seconds that the model predicted at the launch.
        submitted: When it was handed to the device.
        usual: Whether the features cover everything it does. If not, the model does not learn from
        it.
    """

    features: BatchFeatures
    predicted: float
    submitted: float
    usual: bool = True


class HostTimes:
    """The host's time for a step, which delays the device if the next plan waits for its tokens
    (`Device.host_gap_s`): the median of the last ones. The first takes longer than all others."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=HOST_STEPS)

    def note(self, seconds: float) -> float:
        """Adds a step. Returns the usual time of one."""
        self._last.append(seconds)
        return sorted(self._last)[(len(self._last) - 1) // 2]


class StepWatch:
    """Predicts each step at its launch, measures it once its tokens are on the host, and feeds the
    result to the cost model. Times are in seconds on the caller's clock.

    A step occupies the device from its launch, or from the end of the step before it if that is
    later, to its own end. Operations without a batch delay the next batch, so they count as part of
    it.

    Args:
        model: Predicts. An `OnlineCostModel` learns from what was measured.
        padding: How steps are rounded up; None for no padding.

    Attributes:
        model, padding: As given.
        done: When the tokens of the last step came.
        overrun: Ratio of measured to predicted time that WITHIN of the last RECENT steps do not
        exceed; at least 1, and 1 at first.
        ratios: The ratios by size.
    """

    def __init__(self, model: CostModel, padding: Padding | None) -> None:
        self.model = model
        self.padding = padding
        self._moves: tuple[Move, ...] = ()  # launched without a batch since the last step with one
        self.done = -math.inf
        self.overrun = 1.0
        self.ratios = SizeRatios()
        self._ratios: deque[float] = deque(maxlen=RECENT)  # measured over predicted
        self._finished = 0

    def moved(self, step: Step) -> None:
        """Notes the launch of a step without a batch."""
        self._moves += step.moves

    def launched(
        self,
        step: Step,
        now: float,
        *,
        usual: bool = True,
        features: BatchFeatures | None = None,
    ) -> Watched:
        """Notes the launch of a step with a batch.

        Args:
            step: The step.
            now: Seconds.
            usual: See `Watched`.
            features: Features of the step, if the caller has them.
        """
        if self._moves:
            step = dataclasses.replace(step, moves=self._moves + step.moves)
            self._moves, features = (), None
        if features is None:
            features = step.features(self.padding)
        return Watched(features, float(self.model.batch_time(features)), now, usual)

    def free_at(self, *flying: Watched, host_gap_s: float = 0.0) -> float:
        """When the device is predicted to begin the next step: after it has finished the launched
        steps whose tokens have not come, in order. Without such a step, when the host can launch
        after the last tokens have come (`Device.host_gap_s` seconds later); -inf before the
        first."""
        free_at = self.done + (0.0 if flying else host_gap_s)
        for step in flying:
            free_at = max(free_at, step.submitted) + step.predicted
        return free_at

    def finished(self, step: Watched, now: float) -> float:
        """Notes that the step's tokens are on the host. Returns its seconds. Steps finish in the
        order in which they were launched."""
        seconds = now - max(step.submitted, self.done)
        self.done = now
        if step.usual and seconds > 0:  # if the clock has not moved, it says nothing
            ratio = seconds / step.predicted if step.predicted else 1.0
            self._note(ratio)
            self.ratios.note(step.features, ratio)
            if isinstance(self.model, OnlineCostModel):
                self.model.observe(step.features, seconds)
        return seconds

    def _note(self, ratio: float) -> None:
        self._ratios.append(ratio)
        self._finished += 1
        if self._finished % EVERY == 0:
            self.overrun = max(sorted(self._ratios)[int(WITHIN * len(self._ratios))], 1.0)
