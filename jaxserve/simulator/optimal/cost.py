"""Cost models in whole numbers, for the constraint program of `program.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxserve.sched.cost.cost_model import InferMaxCostModel, LinearCostModel

DIGITS = 1e4  # size of the smallest coefficient in units of time
COARSEST, FINEST = 1e-9, 1e-14  # seconds
LINEAR = (
    "per_token",
    "token_bias",
    "decode_kv",
    "decode_bias",
    "per_decode",
    "prefill_quad",
    "prefill_bias",
    "per_prefill",
    "prefill_m",
    "batch_bias",
)


@dataclass(frozen=True)
class ScaledCost:
    """Batch times as whole numbers of `unit` seconds.

    Attributes:
        unit: Seconds.
        coefficients: By the names of `cost_model.Coefficients`, units for all layers.
        residual: `InferMaxCostModel.residual` in units; None for a linear model.
        rounds_kv: Whether the KV of decodes counts as their mean, rounded down, as in
        `InferMaxCostModel`.
        extra: What its attention factor adds to a batch with several requests of a kind, by
        coefficient.
        error: Largest relative error of a coefficient, and so of any total, since none is negative.
    """

    unit: float
    coefficients: dict[str, int]
    residual: tuple[float, float, float] | None
    rounds_kv: bool
    extra: dict[str, int]
    error: float

    @classmethod
    def from_cost_model(cls, cost_model: LinearCostModel | InferMaxCostModel) -> ScaledCost:
        """The unit is the power of ten that leaves the smallest coefficient four digits, from
        1e-9 to 1e-14 s."""
        paper = cost_model if isinstance(cost_model, InferMaxCostModel) else None
        linear = cost_model.linear if isinstance(cost_model, InferMaxCostModel) else cost_model
        layers = linear.num_layers
        exact = {name: layers * getattr(linear.coefficients, name) for name in LINEAR}
        smallest = min((value for value in exact.values() if value > 0), default=1.0)
        unit = 10.0 ** math.floor(math.log10(smallest / DIGITS) + 1e-9)
        unit = min(max(unit, FINEST), COARSEST)
        scaled = {name: round(value / unit) for name, value in exact.items()}
        extra = {}
        if paper is not None and paper.attention_factor > 1:
            names = ("decode_kv", "decode_bias", "prefill_quad", "prefill_bias", "prefill_m")
            extra = {
                name: round(exact[name] * (paper.attention_factor - 1) / unit) for name in names
            }
        errors = [abs(scaled[name] * unit / value - 1) for name, value in exact.items() if value]
        residual = None
        if paper is not None:
            a, b, c = paper.residual
            residual = (layers * a / unit, layers * b / unit, layers * c / unit)
            errors.append(0.5 / max(a + 8 * b + 64 * c, 1e-300) * unit / layers)
        return cls(unit, scaled, residual, paper is not None, extra, max(errors, default=0.0))

    def residuals(self, eights: int) -> int:
        """Units of the residual term for 8 x eights tokens; 0 without one."""
        if self.residual is None or eights == 0:
            return 0
        a, b, c = self.residual
        n = 8 * eights
        return round(a + b * n + c * n * n)

    def least(self, tokens: int = 1) -> int:
        """The fewest units that a batch of `tokens` tokens can take."""
        k = self.coefficients
        bias = min(k["decode_bias"] + k["per_decode"], k["prefill_bias"] + k["per_prefill"])
        return k["token_bias"] + bias + k["per_token"] * tokens + self.residuals(1)

    def units(self, seconds: float) -> int:
        """Seconds in units, rounded up."""
        return math.ceil(seconds / self.unit - 1e-6)
