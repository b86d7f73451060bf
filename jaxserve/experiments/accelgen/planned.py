"""What planning takes (section 6.2, Figure 11f, and 6.3, Figure 12f)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.setting import ABLATIONS, ACCELGEN, OTHERS, Part, lines
from jaxserve.experiments.common.claims import Row, Section

RATE = 8.0
COLUMNS = (
    ("mean, ms", "plan", ".2f", 1e3),
    ("P99, ms", "plan_p99", ".2f", 1e3),
    ("step, ms", "step", ".1f", 1e3),
    ("JCT, s", "jct", ".1f", 1.0),
)
OF_ABLATIONS = (-81, -63, -82)  # percent, without Chunk, Order and Batch


class Planned(Part):
    """6.2 and 6.3: Figures 11f and 12f."""

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """One trace of each policy, in Python."""
        for name in (ACCELGEN, *ABLATIONS, *OTHERS):
            yield from self._of(results, name)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 5 of the page."""
        names = (ACCELGEN, *ABLATIONS, *OTHERS)
        took = {n: self.mean(results, "plan", self._of(results, n)) for n in names}
        mine, jct = took[ACCELGEN], self.mean(results, "jct", self._of(results, ACCELGEN))
        others = {name: took[name] / mine - 1 for name in OTHERS if name != "fastserve"}
        low, high = (pick(others, key=lambda name: others[name]) for pick in (min, max))
        parts = (
            f"{took[name] / mine - 1:+.0%} without {name.removeprefix('accelgen_no')}"
            for name in ABLATIONS
        )
        claims = [
            Row(
                "FastServe's plans take 95% longer, the others' 28% to 93% less",
                f"`fastserve` {took['fastserve'] / mine - 1:+.0%}, the others "
                f"{others[low]:+.0%} (`{low}`) to {others[high]:+.0%} (`{high}`)",
                WHY,
            ),
            Row(
                "a plan takes 0.02% of the mean JCT",
                f"{mine / jct:.4%}: {1e3 * mine:.2f} ms of {jct:.0f} s",
            ),
            Row(
                ", ".join(
                    f"{change}% without {name.removeprefix('accelgen_no')}"
                    for name, change in zip(ABLATIONS, OF_ABLATIONS, strict=True)
                ),
                ", ".join(parts),
                "What it takes to predict steps' times is there without any of them.",
            ),
        ]
        rows = [([f"`{name}`"], self._of(results, name)) for name in names]
        return Section(
            "5. The time of a plan (Figures 11f and 12f)",
            f"CPU time of a plan on the machine that made this page: {self.scale.first}, one trace "
            f"of {self.scale.plans} requests, {RATE:g} requests/s. The engine plans a step while "
            "the one before it runs.",
            claims,
            [],
            [lines(results, [""], rows, COLUMNS)],
        )

    def _of(self, results: SloResults, name: str) -> list[SloCase]:
        count = self.scale.plans
        found = self.seeds(results, name, self.scale.first, RATE, requests=count, timed=True)
        return found[:1]


WHY = "Arrays instead of loops over requests; the paper's machine is another."
