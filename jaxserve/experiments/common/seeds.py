"""Numbers of runs that differ by their seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxserve.simulate.spread import half_width, mean

C = TypeVar("C")


class Number(NamedTuple):
    """A mean over seeds, and half of its 95% interval; None for one seed."""

    mean: float
    half: float | None

    def text(self, form: str, factor: float = 1.0) -> str:
        """As in a table: `0.12 ±0.01`."""
        half = "" if self.half is None else f" ±{format(factor * self.half, form)}"
        return format(factor * self.mean, form) + half


def over(results: Mapping[C, Any], cases: Sequence[C], name: str) -> Number:
    """That number of the cases, which differ by their seeds."""
    values = [float(getattr(results[case], name)) for case in cases]
    return Number(mean(values), half_width(values))
