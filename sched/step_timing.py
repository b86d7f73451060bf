"""What a cost model is told of the steps that it has predicted, in the engine and the simulator."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.step import Move, Step


@dataclass(frozen=True, slots=True)
class Watched:
    """A launched step: its features, the seconds that the model gave it, when it was handed to the
    device, and whether these features say all that it does."""

    features: BatchFeatures
    predicted: float
    submitted: float
    usual: bool = True


class StepWatch:
    """Predicts a step when it is launched, measures it when its tokens are on the host, and tells
    the model. Times are in seconds, on the clock of whoever calls.

    A step has the device from when it is handed over, or from when the one before it is done, if
    that is later, to when it is done itself. Operations without a batch hold up the next batch, so
    they count among its own. padding: as the steps are rounded up.
    """

    def __init__(self, model: OnlineCostModel, padding: Padding | None) -> None:
        self.model = model
        self._padding = padding
        self._moves: tuple[Move, ...] = ()  # launched without a batch since the last one
        self.done = -math.inf  # when the last step was

    def moved(self, step: Step) -> None:
        """A step without a batch has been launched."""
        self._moves += step.moves

    def launched(self, step: Step, now: float, *, usual: bool = True) -> Watched:
        """A step with a batch has been handed to the device, now. usual: whether its features say
        all that it does; else the model is not told of it."""
        if self._moves:
            step = dataclasses.replace(step, moves=self._moves + step.moves)
            self._moves = ()
        features = step.features(self._padding)
        return Watched(features, float(self.model.batch_time(features)), now, usual)

    def finished(self, step: Watched, now: float) -> float:
        """Its tokens are on the host, now. Seconds that it took; steps finish in the order in which
        they were launched."""
        seconds = now - max(step.submitted, self.done)
        self.done = now
        if step.usual and seconds > 0:  # else the clock has not moved, and says nothing
            self.model.observe(step.features, seconds)
        return seconds
