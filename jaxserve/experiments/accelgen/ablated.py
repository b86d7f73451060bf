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
    EASE,
    LOADED,
    RATES,
    SERVED,
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

    def points(self) -> Iterator[tuple[str, float, float]]:
        """Model, rate, and how easy TTFTs are."""
        for model in self.scale.varied:
            for rate in self.rates(model):
                yield model, rate, 1.0
            for at in (SERVED, LOADED):
                yield model, RATES[model][at], EASE

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """With all parts, and without each."""
        for model, rate, ease in self.points():
            for name in (ACCELGEN, *ABLATIONS, AS_PRINTED):
                yield from self._of(name, model, rate, ease)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 6 of the page."""
        rows = [
            ([model, f"{ease:g}", f"{rate:g}", f"`{name}`"], self._of(name, model, rate, ease))
            for model, rate, ease in self.points()
            for name in (ACCELGEN, *ABLATIONS, AS_PRINTED)
        ]
        figure = "accelgen-12-ablations.svg"
        shown = {
            f"{model}\n{_part(name)}": 100
            * (1 + self._change(results, "met", name, model, RATES[model][LOADED], EASE))
            for model in self.scale.varied
            for name in ABLATIONS
        }
        bars(figures / figure, [*shown], [*shown.values()], "% of the whole", "{:.0f}")
        return Section(
            "6. Without its parts (section 6.3, Figures 7 and 12)",
            "`accelgen_nochunk` is /Chunk there, `_noorder` /Order, `_nobatch` /Batch. Changes are "
            f"means over {' and '.join(self.scale.varied)}, as a share of what it is with all "
            "parts, at 8 requests/s, and at twice what can be served with TTFTs "
            f"{EASE:g} times as long (goodput then in requests). Without chunks a prompt is "
            "computed whole, and starts where there is room for all of it. "
            f"`{AS_PRINTED}` is as the paper has it, without the three larger departures of ours.",
            list(self._claims(results)),
            [(figure, "Requests within all targets without a part, of those with all, TTFT x 10")],
            [lines(results, ["", "TTFT x", "rate, 1/s", ""], rows, (*COLUMNS, STEP))],
        )

    def _of(self, name: str, model: str, rate: float, ease: float) -> list[SloCase]:
        return self.traces(Tuned(name), model, rate, ease=ease)

    def _claims(self, results: SloResults) -> Iterator[Row]:
        for number, paper in PAPER.items():
            theirs = (
                f"{change:+d}% without {_part(name)}"
                for name, change in zip(ABLATIONS, paper, strict=True)
            )
            ours = [f"at 8/s {self._without(results, number, -1, 1.0)}"]
            other = "met" if number == "goodput" else number  # what targets that can be met are for
            ours.append(f"TTFT x {EASE:g} {self._without(results, other, LOADED, EASE)}")
            yield Row(f"{NAMES[number]}: {', '.join(theirs)}", "; ".join(ours), WHY.get(number, ""))

    def _without(self, results: SloResults, number: str, at: int, ease: float) -> str:
        """What each part brings there. at: of RATES."""
        said = []
        for name in ABLATIONS:
            changes = [
                self._change(results, number, name, model, RATES[model][at], ease)
                for model in self.scale.varied
            ]
            said.append(f"{fmean(changes):+.0%} without {_part(name)}")
        return ", ".join(said)

    def _change(
        self, results: SloResults, number: str, name: str, model: str, rate: float, ease: float
    ) -> float:
        """By which share it is more without the part."""
        whole, without = (
            self.mean(results, number, self._of(who, model, rate, ease)) for who in (ACCELGEN, name)
        )
        return without / whole - 1 if whole else 0.0


def _part(name: str) -> str:
    return name.removeprefix("accelgen_no")


WHY = {
    "requests": (
        "A whole prompt takes no more of the cache than one in chunks, and is done with sooner: "
        "chunks are for the TBTs of others. Without batch it is the same to the token: there is "
        "rarely a choice, as at low rates nobody waits, and under load those who wait are late, "
        "and start in order."
    ),
    "goodput": "Where targets cannot be met, who comes first makes no difference.",
}
