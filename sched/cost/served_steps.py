"""Fits a cost model and host overheads to steps that an engine has served.

`sched/cost/cost_model_fit.py` fits shapes that were measured on purpose. Served steps are many but
of few kinds, and some were disturbed: the fit is held near a prior, and outliers are clipped.
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
MIN_IDLE = 3  # least steps to estimate the extra time after idle or sleep
CLIP = 3.0  # most that a step counts for, as a multiple of its expected time
HOST_CLIP = 4.0  # the same for the host's thread, whose short times vary more
PASSES = 4  # of the fit; each takes its expectations from the one before
MOST = 5.0  # the same as CLIP for the total of all steps
LEAST_STEP_S = 1e-6  # least time of a step
NOT_HELD = 1e-6  # weight of a prior that only matters without any data


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
        """Seconds that the host's thread worked for each step, without waking up, float64 [n]."""
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
    """Fits a cost model to the steps' device times, held near a multiple of the prior. The extra
    cost of steps after idle is fitted, too, but left out of the model; these steps are included
    because a lightly loaded server has prompts in no others. FitError for fewer than MIN_STEPS
    steps."""
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
    least = LEAST_STEP_S / prior.num_layers  # noise may put all time on other terms
    found = replace(found, token_bias=max(found.token_bias, least))
    return replace(prior, coefficients=found)


def _without_overlap(steps: ServedSteps) -> bool:
    """Whether the device was idle before nearly every step."""
    return bool(np.count_nonzero(~steps.after_idle) < MIN_STEPS)


def fit_host(steps: ServedSteps, model: LinearCostModel) -> HostOverhead:
    """Fits the host's overheads, and the extra time of steps after idle. All are 0 without
    steps."""
    if not len(steps):
        return HostOverhead()
    found: dict[str, float] = {}
    for name, counts in steps.host_features().items():
        terms = _terms(getattr(steps, name), *counts.values())
        found |= dict(zip(counts, terms, strict=True))
    host = HostOverhead(**found, idle=_idle(steps, model))
    return replace(host, wake=_wake(steps, host))


def _terms(seconds: np.ndarray, *features: np.ndarray) -> list[float]:
    took = seconds > 0  # otherwise the clock has not moved
    if not took.any():
        return [0.0] * len(features)
    design = np.stack(features, axis=1).astype(np.float64)
    none = np.zeros(len(features))
    return _robust(design[took], seconds[took], HOST_CLIP, none, none + NOT_HELD).tolist()


def _idle(steps: ServedSteps, model: LinearCostModel) -> float:
    """The median extra time after idle; 0 if there are few such steps, or the model has no
    others."""
    idle = steps.select(steps.after_idle & (steps.device_time > 0))
    if len(idle) < MIN_IDLE or _without_overlap(steps):
        return 0.0
    return max(0.0, float(np.median(idle.device_time - model.batch_time(idle.features))))


def _wake(steps: ServedSteps, host: HostOverhead) -> float:
    """The median time from the arrival to the launch, beyond `host`, of steps before which the
    thread slept: caches are cold then. 0 if there are few."""
    slept = steps.select(steps.wake_time > 0)
    if len(slept) < MIN_IDLE:
        return 0.0
    took = slept.wake_time + slept.receive_time + slept.plan_time + slept.launch_time
    usual = slept.predicted_host_time(replace(host, finish=0.0, finish_row=0.0))
    return max(0.0, float(np.median(took - usual)))


def _robust(
    design: np.ndarray, seconds: np.ndarray, clip: float, prior: np.ndarray, held: np.ndarray
) -> np.ndarray:
    """Weighted least squares: the variance of a step's time grows with it, as with disturbances
    that strike at random. The first weights come from the measured times, which biases the fit
    down; later passes use the expected times, with outliers clipped. Finally the result is scaled
    to the measured total, since recurring disturbances are part of it."""
    expected, wanted = seconds, seconds
    for _ in range(PASSES):
        unit = np.sqrt(expected)
        rows = design / unit[:, None]
        a, b = rows.T @ rows, rows.T @ (wanted / unit)
        values = nearest(a, b, float(len(rows)), prior, held)
        expected = np.maximum(design @ values, 1e-9)
        wanted = np.clip(seconds, expected / clip, expected * clip)
    return np.asarray(values * (np.minimum(seconds, MOST * expected).sum() / expected.sum()))
