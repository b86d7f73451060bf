"""What comes of it all, in one table: whether BROS is better, and than what."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from jaxserve.experiments.bros.mixed import MixedResults
from jaxserve.experiments.bros.setting import BROS, POLICIES, STATIC
from jaxserve.experiments.bros.tradeoff import CLOSE, Compared
from jaxserve.experiments.common.claims import Section, table

# Number: its sign where more is better, and whether it counts relative to the other's.
COUNTED = {"latency": (-1, True), "best_effort": (1, True), "ttft": (1, False), "tbt": (1, False)}
Point = tuple[str, str, float]


class Verdict(Compared):
    """The first section of the page."""

    def section(self, results: MixedResults, figures: Path) -> Section:
        """BROS against each of the others, at all points."""
        points, others = list(self.points()), [name for name in POLICIES if name != BROS]
        rows, said = [], []
        for other in others:
            ahead = [self.gains(results, BROS, other, point) for point in points]
            behind = [self.gains(results, other, BROS, point) for point in points]
            ours, theirs = (sum(min(one.values()) >= -CLOSE for one in g) for g in (ahead, behind))
            means = [fmean(one[name] for one in ahead) for name in COUNTED]
            signed = [sign * mean for (sign, _), mean in zip(COUNTED.values(), means, strict=True)]
            rows.append(
                [f"`{other}`", *(f"{100 * s:+.1f}" for s in signed), f"{ours}", f"{theirs}"]
            )
            if other in STATIC:
                said.append(f"`{other}` is as good as `bros` at {theirs}, `bros` as it at {ours}")
        header = [
            "`bros` against",
            "latency, %",
            "best-effort, %",
            "TTFT, points",
            "P99 TBT, points",
            "as good as it at",
            "it as good as `bros` at",
        ]
        return Section(
            "In short",
            f"Means over {len(points)} points: each model, data set and rate. As good: latency and "
            f"best-effort throughput within {CLOSE:.0%}, attainment of TTFT and P99 TBT within "
            f"{100 * CLOSE:g} points, all four, or better.",
            [],
            [],
            [
                table(header, rows),
                "Static classes, which BROS does not compare itself with, take real-time requests "
                f"first, too: of the {len(points)} points {'; '.join(said)}.",
            ],
        )

    def gains(
        self, results: MixedResults, policy: str, other: str, point: Point
    ) -> dict[str, float]:
        """By how much the policy is better there, by number: a share of the other's, or a
        difference; against nothing, all of it."""
        found = {}
        for name, (sign, relative) in COUNTED.items():
            mine, theirs = (self.get(results, name)(p, *point).mean for p in (policy, other))
            unit = (theirs or max(mine, 1.0)) if relative else 1.0
            found[name] = sign * (mine - theirs) / unit
        return found
