"""AccelGen without its parts (section 6.3, Figure 12; Figure 7)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.setting import (
    ABLATIONS,
    ACCELGEN,
    AS_PRINTED,
    COLUMNS,
    Part,
    lines,
)
from jaxserve.experiments.accelgen.tuned import Tuned
from jaxserve.experiments.common.claims import Row, Section
from jaxserve.experiments.common.figures import bars

# Percent by which each changes in the paper without Chunk, Order and Batch (6.3).
PAPER = {
    "requests": (-97, -35, -61),
    "goodput": (-44, -52, -27),
    "iterations": (-28, -42, -24),
    "step": (39, 56, 29),
    "jct": (31, 17, 19),
    "compute": (-28, -8, -15),
    "cache": (-7, -1, -11),
}
NAMES = {
    "requests": "throughput",
    "goodput": "goodput",
    "iterations": "iterations in time",
    "step": "time of a step",
    "jct": "JCT",
    "compute": "compute utilisation",
    "cache": "cache utilisation",
}
STEP = ("step, ms", "step", ".0f", 1e3)


class Ablated(Part):
    """6.3, Figures 12a to 12e."""

    def points(self) -> Iterator[tuple[str, float]]:
        """Model and rate."""
        for model in self.scale.varied:
            for rate in self.rates(model):
                yield model, rate

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """With all parts, and without each."""
        for model, rate in self.points():
            for name in (ACCELGEN, *ABLATIONS, AS_PRINTED):
                yield from self._of(name, model, rate)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 6 of the page."""
        rows = [
            ([model, f"{rate:g}", f"`{name}`"], self._of(name, model, rate))
            for model, rate in self.points()
            for name in (ACCELGEN, *ABLATIONS, AS_PRINTED)
        ]
        figure = "accelgen-12-ablations.svg"
        shown = {
            f"{model}\n{name.removeprefix('accelgen_')}": 100
            * (1 + self._change(results, "goodput", name, model, self.rates(model)[1]))
            for model in self.scale.varied
            for name in ABLATIONS
        }
        bars(figures / figure, [*shown], [*shown.values()], "goodput, % of the whole", "{:.0f}")
        return Section(
            "6. Without its parts (section 6.3, Figures 7 and 12)",
            "`accelgen_nochunk` is /Chunk there, `_noorder` /Order, `_nobatch` /Batch. Changes are "
            f"means over {', '.join(self.scale.varied)} at 8 requests/s, as a share of what it is "
            "with all parts. Without chunks a prompt is computed whole, and starts where there is "
            f"room for all of it. `{AS_PRINTED}` is as the paper has it, without the three larger "
            "departures of ours; section 10 has it where targets can be met.",
            list(self._claims(results)),
            [(figure, "Goodput without a part, of that of the whole, at 8 requests/s")],
            [lines(results, ["", "rate, 1/s", ""], rows, (*COLUMNS, STEP))],
        )

    def _of(self, name: str, model: str, rate: float) -> list[SloCase]:
        return self.traces(Tuned(name), model, rate)

    def _claims(self, results: SloResults) -> Iterator[Row]:
        for number, paper in PAPER.items():
            ours, theirs = [], []
            for name, change in zip(ABLATIONS, paper, strict=True):
                part = name.removeprefix("accelgen_no")
                found = fmean(
                    self._change(results, number, name, model, self.rates(model)[1])
                    for model in self.scale.varied
                )
                ours.append(f"{found:+.0%} without {part}")
                theirs.append(f"{change:+d}% without {part}")
            yield Row(f"{NAMES[number]}: {', '.join(theirs)}", ", ".join(ours), WHY.get(number, ""))

    def _change(
        self, results: SloResults, number: str, name: str, model: str, rate: float
    ) -> float:
        """By which share it is more without the part."""
        whole = self.mean(results, number, self._of(ACCELGEN, model, rate))
        without = self.mean(results, number, self._of(name, model, rate))
        return without / whole - 1 if whole else 0.0


WHY = {
    "requests": (
        "A whole prompt takes no more of the cache than one in chunks, and is done with sooner. In "
        "the paper 97% of the throughput goes with the chunks, of which Sarathi and FastGen have "
        "theirs too."
    ),
}
