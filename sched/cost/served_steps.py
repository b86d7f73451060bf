"""Fits a cost model and host overheads to steps that an engine has served.

`sched/cost/cost_model_fit.py` fits shapes that were measured on purpose. Here there are many steps
of few kinds, and some were disturbed: they are held near a prior, and outliers are clipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.cost_model_fit import PRIOR, FitError, columns, fitted, nearest
from jaxserve.sched.cost.host_overhead import HostOverhead

MIN_STEPS = 10
MIN_IDLE = 3  # steps that say what a step takes longer after idle, or where the thread slept
CLIP = 3.0  # a step counts as at most so many times what was to be expected
HOST_CLIP = 4.0  # the same of the host's thread, whose times are short and vary more
PASSES = 4  # of the fit; in each, what is expected is what the one before found
MOST = 5.0  # a step counts as at most so many times the expected in what all of them took
LEAST_STEP_S = 1e-6  # no step takes less
NOT_HELD = 1e-6  # rows that nothing counts as much as, but that zero decides where none does


@dataclass(frozen=True)
class ServedSteps:
    """Measurements of n steps: `jaxserve.engine.stats.StepStats` as arrays [n], times in seconds.

    Attributes:
        features: Arrays [n] each.
        device_time: Time on the device.
        wake_time: From an arrival until the sleeping engine thread went on; 0 if it did not sleep.
        receive_time: From the step before, or from waking up, to the plan.
        plan_time: The policy's plan and its booking.
        launch_time: Sending moves, building the batch and handing it over.
        finish_time: Detokenising and streaming.
        num_live: Requests when it was planned.
        num_received: Requests taken in since the step before was planned.
        num_rows: Rows of the batch.
        num_admitted: Rows that took a slot for sampling.
        num_moves: Pool operations sent to the device.
        num_emitting: Rows that sample.
        after_idle: bool, whether the device was idle before.
    """

    features: BatchFeatures
    device_time: np.ndarray
    wake_time: np.ndarray
    receive_time: np.ndarray
    plan_time: np.ndarray
    launch_time: np.ndarray
    finish_time: np.ndarray
    num_live: np.ndarray
    num_received: np.ndarray
    num_rows: np.ndarray
    num_admitted: np.ndarray
    num_moves: np.ndarray
    num_emitting: np.ndarray
    after_idle: np.ndarray

    @classmethod
    def from_steps(cls, steps: Iterable[Any]) -> ServedSteps:
        """steps: `StepStats`, or objects with the same fields."""
        steps = list(steps)
        arrays = {
            field.name: np.array([getattr(step, field.name) for step in steps])
            for field in fields(cls)
            if field.name != "features"
        }
        names = BatchFeatures._fields
        features = {n: np.array([getattr(s.features, n) for s in steps]) for n in names}
        return cls(features=BatchFeatures(**features), **arrays)

    def __len__(self) -> int:
        return len(self.device_time)

    def host_time(self) -> np.ndarray:
        """Seconds that the host's thread worked for each step, waking up excluded, float64 [n]."""
        return self.receive_time + self.plan_time + self.launch_time + self.finish_time

    def host_features(self) -> dict[str, dict[str, np.ndarray]]:
        """The features behind each of the host's times: by the time's field, its terms in
        `HostOverhead` and how often each counts, [n]."""
        one = np.ones(len(self))
        return {
            "receive_time": {"receive": one, "receive_row": self.num_received},
            "plan_time": {"plan": one, "plan_row": self.num_live},
            "launch_time": {
                "launch": one,
                "launch_row": self.num_rows,
                "admit": self.num_admitted,
                "move": self.num_moves,
            },
            "finish_time": {"finish": one, "finish_row": self.num_emitting},
        }

    def predicted_host_time(self, host: HostOverhead) -> np.ndarray:
        """`host_time` as predicted by the overheads."""
        terms = ((n, c) for counts in self.host_features().values() for n, c in counts.items())
        return np.asarray(sum(getattr(host, name) * count for name, count in terms))

    def select(self, which: np.ndarray) -> ServedSteps:
        """The chosen steps: indices, or a mask."""
        arrays = {name: array[which] for name, array in vars(self).items() if name != "features"}
        return ServedSteps(BatchFeatures(*(one[which] for one in self.features)), **arrays)


def fit_device(steps: ServedSteps, prior: LinearCostModel) -> LinearCostModel:
    """Fits a cost model to the steps' device times, held near a multiple of the prior. Steps after
    idle have an extra cost that is left out of the model; they are included because a lightly
    loaded server has prompts in no other steps. FitError for fewer than MIN_STEPS steps."""
    steps = steps.select(steps.device_time > 0)
    if len(steps) < MIN_STEPS:
        raise FitError(f"at least {MIN_STEPS} steps are needed, there are {len(steps)}")
    design = [np.broadcast_to(c, len(steps)) for c in columns(steps.features, prior)]
    design = [column * float(prior.num_layers) for column in design]
    before = fitted(prior).tolist()
    num_fitted, held = len(before), [PRIOR] * len(before)
    if not _without_overlap(steps):
        design.append(1.0 * steps.after_idle)
        before.append(0.0)
        held.append(NOT_HELD)
    values = _robust(
        np.stack(design, axis=1), steps.device_time, CLIP, np.array(before), np.array(held)
    )
    found = Coefficients(*values[:num_fitted].tolist())
    least = LEAST_STEP_S / prior.num_layers  # noise may put all that a step takes on the others
    found = replace(found, token_bias=max(found.token_bias, least))
    return replace(prior, coefficients=found)


def _without_overlap(steps: ServedSteps) -> bool:
    """Whether the device is idle before as good as every step."""
    return bool(np.count_nonzero(~steps.after_idle) < MIN_STEPS)


def fit_host(steps: ServedSteps, model: LinearCostModel) -> HostOverhead:
    """Fits the host's overheads, and how much longer than predicted steps took after idle. All are
    0 without steps."""
    if not len(steps):
        return HostOverhead()
    found: dict[str, float] = {}
    for name, counts in steps.host_features().items():
        terms = _terms(getattr(steps, name), *counts.values())
        found |= dict(zip(counts, terms, strict=True))
    host = HostOverhead(**found, idle=_idle(steps, model))
    return replace(host, wake=_wake(steps, host))


def _terms(seconds: np.ndarray, *features: np.ndarray) -> list[float]:
    took = seconds > 0  # else the clock has not moved, and says nothing
    if not took.any():
        return [0.0] * len(features)
    design = np.stack(features, axis=1).astype(np.float64)
    none = np.zeros(len(features))
    return _robust(design[took], seconds[took], HOST_CLIP, none, none + NOT_HELD).tolist()


def _idle(steps: ServedSteps, model: LinearCostModel) -> float:
    """The median; 0 if there are few, or the model is of nothing but such steps."""
    idle = steps.select(steps.after_idle & (steps.device_time > 0))
    if len(idle) < MIN_IDLE or _without_overlap(steps):
        return 0.0
    return max(0.0, float(np.median(idle.device_time - model.batch_time(idle.features))))


def _wake(steps: ServedSteps, host: HostOverhead) -> float:
    """The median over the steps before which the thread slept, from the arrival to the launch, of
    what they took beside `host`: caches are cold after it. 0 if there are few."""
    slept = steps.select(steps.wake_time > 0)
    if len(slept) < MIN_IDLE:
        return 0.0
    took = slept.wake_time + slept.receive_time + slept.plan_time + slept.launch_time
    usual = slept.predicted_host_time(replace(host, finish=0.0, finish_row=0.0))
    return max(0.0, float(np.median(took - usual)))


def _robust(
    design: np.ndarray, seconds: np.ndarray, clip: float, prior: np.ndarray, held: np.ndarray
) -> np.ndarray:
    """Least squares with weights: the variance of a step's time grows with it, as with disturbances
    that strike at random. The weights come from the measured times at first, which biases the fit
    down, and from the expected times in later passes, with outliers clipped. Finally the result is
    scaled to the measured total, since recurring disturbances are part of it."""
    expected, wanted = seconds, seconds
    for _ in range(PASSES):
        unit = np.sqrt(expected)
        rows = design / unit[:, None]
        a, b = rows.T @ rows, rows.T @ (wanted / unit)
        values = nearest(a, b, float(len(rows)), prior, held)
        expected = np.maximum(design @ values, 1e-9)
        wanted = np.clip(seconds, expected / clip, expected * clip)
    return np.asarray(values * (np.minimum(seconds, MOST * expected).sum() / expected.sum()))
