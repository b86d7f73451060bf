"""Cost models for tests to whom the time of a step does not matter."""

from __future__ import annotations

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel

FLAT = LinearCostModel(Coefficients(1e-4, 1e-3, 0, 0, 0, 0, 0, 0, 0), 1)
"""A millisecond a step, and a tenth for each of its tokens."""
