"""How much better one policy is than another, and whether that is more than noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.sched.registry import make_policy
from jaxserve.simulator.dispatch import has_form
from jaxserve.simulator.simulate.spread import half_width, mean
from jaxserve.simulator.simulate.sweep import Point

ATTAINMENT, GOODPUT = 0.005, 0.01  # negligible differences: in attainment, in goodput
_QUANTILE = 1.96  # of the normal distribution, for 95%
DEFAULT = SchedulerConfig.policy


@dataclass(frozen=True)
class Margin:
    """How much better one policy is than another.

    Attributes:
        attainment: Difference in the share of requests that attain their SLO.
        half_width: Half of its 95% interval; None if it cannot be estimated.
        goodput: Difference in goodput, as a share of the better one's.
        goodput_half_width: Half of its 95% interval; None for one seed.
    """

    attainment: float
    half_width: float | None
    goodput: float
    goodput_half_width: float | None

    @property
    def matters(self) -> bool:
        """Whether the two policies differ significantly."""
        return _apart(self.attainment, self.half_width, ATTAINMENT) or _apart(
            self.goodput, self.goodput_half_width, GOODPUT
        )


def margin(one: Point, other: Point) -> Margin:
    """The margin of one point over another, seed by seed on the same requests.

    Only common seeds count; a point whose seed does not matter has all of them. With a single seed,
    the interval is over the run's requests, assumed to be independent.
    """
    count = min((len(p.outcomes) for p in (one, other) if p.seed_matters), default=1)
    ours, theirs = ([_numbers(point, seed) for seed in range(count)] for point in (one, other))
    most = max(mean([numbers["goodput"] for numbers in each]) for each in (ours, theirs))
    found = [
        {
            "attainment": a["attainment"] - b["attainment"],
            "goodput": (a["goodput"] - b["goodput"]) / (most or 1.0),
        }
        for a, b in zip(ours, theirs, strict=True)
    ]
    means, widths = mean(found), half_width(found)
    if count == 1:
        widths = {"attainment": _over_requests(one, other), "goodput": None}
    return Margin(means["attainment"], widths["attainment"], means["goodput"], widths["goodput"])


def score(point: Point) -> tuple[float, float]:
    """Attainment, then goodput: the better policy has the higher score."""
    found = point.mean
    return found["slo_attainment"], found["goodput_per_s"] or 0.0


def plainness(name: str) -> tuple[bool, bool, int, str]:
    """Sort key among equally good policies; the smallest wins. The server's default comes first,
    then settings of the unified scheduler, then policies with code of their own; variants come
    after the policy that they vary."""
    return name != DEFAULT, not has_form(make_policy(name)), len(name), name


def _numbers(point: Point, seed: int) -> dict[str, float]:
    found = point.numbers[seed if point.seed_matters else 0]
    goodput = found["goodput_per_s"] or 0.0
    return {"attainment": found["slo_attainment"], "goodput": goodput}


def _over_requests(one: Point, other: Point) -> float | None:
    """Half the width of the interval of the difference of paired shares (McNemar).

    With b of n requests met only by one and c only by the other, its variance is (b + c - (b - c)^2
    / n) / n^2. None if the requests are not the same.
    """
    a, b = one.outcomes[0].attained, other.outcomes[0].attained
    if len(a) != len(b):
        return None
    differ, net, n = int(np.count_nonzero(a != b)), int(a.sum()) - int(b.sum()), len(a)
    return _QUANTILE * math.sqrt(max(differ - net**2 / n, 0.0)) / n


def _apart(difference: float, width: float | None, negligible: float) -> bool:
    return abs(difference) > max(width or 0.0, negligible)
