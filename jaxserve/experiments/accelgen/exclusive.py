"""One long prompt at a time (section 3.2, Figure 6)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.places import PLACES
from jaxserve.experiments.accelgen.requests import (
    EXCLUSIVE,
    EXCLUSIVE_OUTPUT,
    LONG_PROMPTS,
    SHORT,
    SHORT_PROMPTS,
)
from jaxserve.experiments.accelgen.setting import Part, lines
from jaxserve.experiments.accelgen.tuned import Tuned
from jaxserve.experiments.common.claims import Row, Section

MODEL = "OPT-13B"
COLUMNS = (
    ("JCT of the long, s", "jct_long", ".1f", 1.0),
    ("JCT of all, s", "jct", ".1f", 1.0),
    ("last, s", "jct_last", ".1f", 1.0),
    ("preemptions", "preemptions", ".0f", 1.0),
)
WITHOUT = "accelgen:long=1000000"  # than which no prompt is longer


class Exclusive(Part):
    """3.2, Figure 6: exclusive request allocation."""

    def systems(self) -> dict[str, Tuned]:
        """By what they are called."""
        pivot = PLACES[MODEL].pivot
        return {
            "`sarathi`": Tuned("sarathi", pivot),
            "`fastgen`": Tuned("fastgen", pivot),
            "`accelgen`": Tuned("accelgen"),
            f"`{WITHOUT}`": Tuned(WITHOUT),
        }

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """Each with the same requests."""
        for chosen in self.systems().values():
            yield from self._of(chosen)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 3 of the page."""
        rows = [([name], self._of(chosen)) for name, chosen in self.systems().items()]
        said = []
        for name in ("`sarathi`", "`fastgen`", f"`{WITHOUT}`"):
            ours, theirs = (
                [self.mean(results, n, self._of(self.systems()[who])) for n in ("jct_long", "jct")]
                for who in ("`accelgen`", name)
            )
            long, every = (mine / other - 1 for mine, other in zip(ours, theirs, strict=True))
            said.append(f"against {name} {long:+.0%} of the long, {every:+.0%} of all")
        claim = "lower JCTs of the long and of all than Sarathi, with one long prompt at a time"
        claims = [Row(claim, "; ".join(said), WHY)]
        low, high = SHORT
        return Section(
            "3. One long prompt at a time (section 3.2, Figure 6)",
            f"{MODEL}: prompts of {LONG_PROMPTS[0]:,} and {LONG_PROMPTS[1]:,} tokens and "
            f"{SHORT_PROMPTS} of {low} to {high}, all at once; outputs of {EXCLUSIVE_OUTPUT} "
            "tokens, of which the paper says nothing.",
            claims,
            [],
            [lines(results, [""], rows, COLUMNS)],
        )

    def _of(self, chosen: Tuned) -> list[SloCase]:
        return self.traces(chosen, MODEL, math.inf, data=EXCLUSIVE)


WHY = (
    "Here `sarathi` starts a prompt where there is room for all of it, so that the second long one "
    "waits for the first; the paper's takes blocks chunk by chunk, as `fastgen` does. The cache "
    "does not hold both, so that to compute one at a time changes nothing for `accelgen`: the "
    "other finds no blocks anyway."
)
