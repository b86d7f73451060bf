"""What the runs came to, ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.simulate.search import Search
from jaxserve.simulate.spread import half_width, mean
from jaxserve.simulate.sweep import Point, Ratios


def comparison(points: Sequence[Point], compared: Sequence[Ratios]) -> dict[str, Any]:
    """`points`: every policy at every rate; `ratios`: those of the policies to the first one."""
    return {"points": _points(points), "ratios": [_ratios(one) for one in compared]}


def capacities(searches: Sequence[Search]) -> dict[str, Any]:
    """`capacity`: each policy's, requests/s, with `bound` "<" or ">" where it was not found;
    `points`: all that was tried."""
    points = [point for one in searches for point in one.points()]
    return {"capacity": [_capacity(one) for one in searches], "points": _points(points)}


def _points(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            **point.named,
            "seed_matters": point.seed_matters,
            "mean": point.mean,
            "half_width": point.half_width,
            "runs": [
                {"seed": seed, **numbers}
                for seed, numbers in zip(point.seeds, point.numbers, strict=True)
            ],
        }
        for point in points
    ]


def _ratios(one: Ratios) -> dict[str, Any]:
    return {
        "policy": one.policy,
        "to": one.to,
        "rate": one.rate,
        "mean": mean(one.values),
        "half_width": half_width(one.values),
        "runs": [
            {"seed": seed, **values} for seed, values in zip(one.seeds, one.values, strict=True)
        ],
    }


def _capacity(one: Search) -> dict[str, Any]:
    found = one.capacity()
    return {"policy": one.run.policy, "rate": found.rate, "bound": found.bound}
