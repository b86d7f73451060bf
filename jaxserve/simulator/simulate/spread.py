"""Means and confidence intervals of numbers over several seeds.

The numbers are nested dictionaries, like those of `SimulationResult.summary`, and so are the
results. If some values are missing, the others count; if all are, the result is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LEVEL = 0.95  # of the confidence intervals


def mean(values: Sequence[Any]) -> Any:
    """The mean of the values."""
    return _over(values, lambda numbers: math.fsum(numbers) / len(numbers))


def half_width(values: Sequence[Any]) -> Any:
    """Half the width of the mean's confidence interval, by Student's t distribution, which takes
    the values as independent and normal; None for fewer than two."""
    return _over(values, _half_width)


def ratios(values: Sequence[Any], base: Sequence[Any]) -> list[Any]:
    """Each value divided by the corresponding one of `base`; None over 0."""
    return [_ratio(value, other) for value, other in zip(values, base, strict=True)]


def flat(values: Any, name: str = "") -> dict[str, float | None]:
    """The numbers by their names joined with dots, as in `pandas.json_normalize`."""
    if not isinstance(values, dict):
        return {name: values}
    found: dict[str, float | None] = {}
    for key, value in values.items():
        found |= flat(value, f"{name}.{key}" if name else key)
    return found


def _over(values: Sequence[Any], of: Callable[[list[float]], float | None]) -> Any:
    nested = [value for value in values if isinstance(value, dict)]
    if nested:
        keys = dict.fromkeys(key for value in nested for key in value)
        return {key: _over([value.get(key) for value in nested], of) for key in keys}
    numbers = [value for value in values if value is not None]
    return of(numbers) if numbers else None


def _half_width(numbers: list[float]) -> float | None:
    if len(numbers) < 2:
        return None
    from scipy.special import stdtrit  # takes a tenth of a second to import

    quantile = float(stdtrit(len(numbers) - 1, (1 + LEVEL) / 2))
    return quantile * float(np.std(numbers, ddof=1)) / math.sqrt(len(numbers))


def _ratio(value: Any, base: Any) -> Any:
    if isinstance(value, dict) and isinstance(base, dict):
        return {key: _ratio(value[key], base[key]) for key in value if key in base}
    if isinstance(value, dict) or isinstance(base, dict) or value is None or not base:
        return None
    return value / base
