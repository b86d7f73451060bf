"""Fits a linear cost model to measured steps by non-negative least squares, and rates the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cost.cost_model import (
    BatchFeatures,
    Coefficients,
    LinearCostModel,
    experts_read,
)

FOLDS = 5
PRIOR = 16.0  # number of steps that a prior counts for
NO_EXPERTS = (0, 0)


class FitError(ValueError):
    """The samples do not determine a model; the message says what is missing."""


@dataclass(frozen=True)
class Sample:
    """One measured step: its features, and the seconds that it kept the device busy."""

    features: BatchFeatures
    seconds: float

    @property
    def part(self) -> str:
        """Kind of the batch: decode, prefill or mixed."""
        if not self.features.num_prefills:
            return "decode"
        return "mixed" if self.features.num_decodes else "prefill"


@dataclass(frozen=True)
class Fit:
    """A fitted model and its errors.

    Attributes:
        model: The model.
        r2: Coefficient of determination by part: `decode`, `prefill` and `mixed` if they have at
            least three samples, and `all`.
        mean_error: Mean relative error on the samples themselves.
        worst_error: Largest relative error on the samples themselves.
        leave_out_error: Mean relative error on held-out samples, five folds.
    """

    model: LinearCostModel
    r2: dict[str, float]
    mean_error: float
    worst_error: float
    leave_out_error: float


def fit(samples: Sequence[Sample], num_layers: int, experts: tuple[int, int] = NO_EXPERTS) -> Fit:
    """Fits a model with non-negative coefficients by least squares of relative errors, so that
    short steps, the most frequent ones, count as much as long ones.

    Args:
        samples: The measured steps.
        num_layers: Layers of the model.
        experts: `LinearCostModel.experts`.

    Raises:
        FitError: There are fewer than ten samples, or a step took no time.
    """
    if len(samples) < 10:
        raise FitError(f"at least 10 measured steps are needed, got {len(samples)}")
    seconds = np.array([s.seconds for s in samples])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise FitError("every measured step must have taken a positive time")
    design = np.array([columns(s.features, experts=experts) for s in samples]) * num_layers
    weights = _solve(design, seconds)
    predicted = design @ weights
    relative = np.abs(predicted - seconds) / seconds
    parts = np.array([s.part for s in samples])
    r2 = {
        name: _r2(seconds[parts == name], predicted[parts == name])
        for name in ("decode", "prefill", "mixed")
        if np.count_nonzero(parts == name) >= 3
    }
    r2["all"] = _r2(seconds, predicted)
    model = _model(weights, num_layers, experts)
    return Fit(
        model, r2, float(relative.mean()), float(relative.max()), _leave_out(design, seconds)
    )


def least_squares(
    samples: Sequence[Sample], num_layers: int, experts: tuple[int, int] = NO_EXPERTS
) -> LinearCostModel:
    """The same model as `fit`, from any number of samples and without its errors."""
    design = np.array([columns(s.features, experts=experts) for s in samples]) * num_layers
    weights = _solve(design, np.array([s.seconds for s in samples]))
    return _model(weights, num_layers, experts)


def _model(weights: np.ndarray, num_layers: int, experts: tuple[int, int]) -> LinearCostModel:
    coefficients = Coefficients(*weights.tolist())
    num_experts, per_token = experts
    return LinearCostModel(
        coefficients, num_layers, num_experts=num_experts, experts_per_token=per_token
    )


def fitted(model: LinearCostModel) -> np.ndarray:
    """The coefficients that `columns` has columns for, float64 [k]."""
    values = list(model.coefficients.as_dict().values())
    return np.array(values if model.num_experts else values[:-1])


def columns(
    f: BatchFeatures,
    model: LinearCostModel | None = None,
    *,
    experts: tuple[int, int] = NO_EXPERTS,
) -> list[Any]:
    """The columns of the design matrix, in the order of `Coefficients`, the last one only with
    experts. Their product with the coefficients is seconds per layer.

    Args:
        f: One batch as numbers, or several as arrays (or one number for all of them).
        model: If it is overlapped, only the columns of the batch or those of the copies are set for
        each step, whichever the model expects to take longer. By default the two add up.
        experts: `LinearCostModel.experts`, if there is no model.
    """
    batch, copies = 1, f.saved_slots + f.loaded_slots
    num_experts, per_token = experts if model is None else model.experts
    if model is not None and model.overlapped:
        longer = np.maximum(f.saved_slots, f.loaded_slots)
        copying = model.num_layers * model.coefficients.swapped_slot * longer
        batch = (longer == 0) | (model.batch_time(f) > copying)
        copies = longer * (1 - batch)
    found = [
        batch * f.padded_tokens,
        batch * 1.0,
        batch * f.decode_kv,
        batch * 1.0 * (f.num_decodes > 0),
        batch * f.num_decodes,
        batch * f.prefill_quad,
        batch * 1.0 * (f.num_prefills > 0),
        batch * f.num_prefills,
        batch * f.prefill_m,
        batch * f.hidden_tokens,
        batch * f.projected_tokens,
        batch * f.copied_slots,
        copies,
        batch * f.hidden_prefill,
        batch * f.sampled_rows,
        batch * 1.0 * (f.padded_tokens > 1),
        batch * f.adapted_tokens,
    ]
    if num_experts:
        found.append(batch * experts_read(num_experts, per_token, f.num_tokens))
    return found


def nearest(
    a: np.ndarray,
    b: np.ndarray,
    weight: float,
    prior: np.ndarray,
    held: float | np.ndarray = PRIOR,
) -> np.ndarray:
    """Non-negative least squares with a ridge towards a prior: minimises w a w - 2 w b over w >= 0.
    Weights are pulled towards the prior times one common factor; weights of features that never
    occurred equal it exactly.

    Args:
        a: [k, k], normal equations.
        b: [k], right-hand side of the normal equations.
        weight: Sum of the weights of the rows in them.
        prior: [k], not negative.
        held: Number of rows that the prior counts for; one number, or one per weight, [k].

    Returns:
        The weights w, float64 [k].
    """
    # The common factor with which the prior predicts best, since this device may just be slower.
    # Weakly held weights explain what they can of it.
    rows = np.broadcast_to(held, len(prior))
    free = rows < 1.0
    shared = a[free] @ prior
    taken = np.linalg.pinv(a[np.ix_(free, free)]) @ shared
    fits = float(prior @ a @ prior - taken @ shared)
    scale = float(prior @ b - taken @ b[free]) / fits if fits else 1.0
    values = scale * prior
    seen = np.flatnonzero(a.diagonal())
    # Columns range over nine orders of magnitude, so each is scaled by its root mean square.
    size = np.sqrt(a.diagonal()[seen] / weight)
    near = a[np.ix_(seen, seen)] / np.outer(size, size)
    near[np.diag_indices(len(seen))] += rows[seen]
    factor = np.linalg.cholesky(near)
    wanted = b[seen] / size + rows[seen] * values[seen] * size
    found = _nnls(factor.T, np.linalg.solve(factor, wanted))
    values[seen] = found / size
    return values


def _solve(design: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    rows = design / seconds[:, None]
    # Columns range over nine orders of magnitude; unit maxima keep the solver's tolerance valid.
    size = np.abs(rows).max(axis=0)
    size[size == 0] = 1.0
    return _nnls(rows / size, np.ones(len(seconds))) / size


def ready_to_fit() -> None:
    """Imports what fitting needs. It takes most of a second, so only commands that fit do it."""
    _nnls(np.eye(1), np.ones(1))


def _nnls(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls

    return np.asarray(nnls(rows, wanted)[0])


def _leave_out(design: np.ndarray, seconds: np.ndarray) -> float:
    """Mean relative error with every FOLDS-th sample left out in turn."""
    errors = np.empty(len(seconds))
    fold = np.arange(len(seconds)) % FOLDS
    for i in range(FOLDS):
        out = fold == i
        weights = _solve(design[~out], seconds[~out])
        errors[out] = np.abs(design[out] @ weights - seconds[out]) / seconds[out]
    return float(errors.mean())


def _r2(seconds: np.ndarray, predicted: np.ndarray) -> float:
    spread = ((seconds - seconds.mean()) ** 2).sum()
    return float(1.0 - ((seconds - predicted) ** 2).sum() / spread) if spread > 0 else 1.0
