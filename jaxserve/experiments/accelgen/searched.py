"""How much better a schedule could be, on cases small enough to search (section 6.2, Oracle)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.setting import ACCELGEN, OTHERS, Column, Part, lines
from jaxserve.experiments.accelgen.tuned import Tuned
from jaxserve.experiments.common.claims import Row, Section

COLUMNS: tuple[Column, ...] = (
    ("all targets, requests/s", "met", ".3f", 1.0),
    ("at most", "bound", ".3f", 1.0),
    ("all targets, %", "slo", ".1f", 100.0),
    ("requests/s", "requests", ".2f", 1.0),
    ("goodput, tokens/s", "goodput", ".0f", 1.0),
    ("iterations in time, %", "iterations", ".1f", 100.0),
    ("jobs in time, %", "in_jct", ".1f", 100.0),
    ("JCT, s", "jct", ".1f", 1.0),
    ("compute, %", "compute", ".0f", 100.0),
    ("cache, %", "cache", ".0f", 100.0),
)
# Percent by which the paper's Oracle has more than AccelGen has.
PAPER = {
    "requests": ("requests/s", "its throughput is 12% lower"),
    "met": ("goodput in requests", "6% more"),
    "goodput": ("goodput in tokens", "6% more"),
    "iterations": ("iterations in time", "1.1% more"),
    "in_jct": ("jobs in time", "1.1% more"),
    "jct": ("JCT", "22% less"),
    "compute": ("compute utilisation", "2% more"),
    "cache": ("cache utilisation", "1.5% more"),
}


class Searched(Part):
    """The Oracle of 6.1."""

    def points(self) -> Iterator[tuple[str, float]]:
        """Model, and how easy TTFTs are."""
        for model in self.scale.models:
            for ease in self.scale.eases:
                yield model, ease

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """Each policy at its best, and the search."""
        for model, ease in self.points():
            yield from self._found(model, ease)
            for name in (ACCELGEN, *OTHERS):
                yield from self.trial(model, ease).runs(name, model).values()
                yield from self._of(results, name, model, ease)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 11 of the page."""
        rows = []
        for model, ease in self.points():
            rows.append(([model, f"{ease:g}", "`oracle`"], self._found(model, ease)))
            rows += [
                ([model, f"{ease:g}", f"`{name}`"], self._of(results, name, model, ease))
                for name in (ACCELGEN, *OTHERS)
            ]
        return Section(
            "11. How much better it could be (section 6.2, Oracle)",
            f"Traces of {self.scale.searched} requests at the second rate of each model, with the "
            f"paper's TTFTs and with {self.scale.eases[-1]:g} times as long ones. `oracle` is the "
            "best schedule for the requests that end within all of their targets that a search "
            "finds, which begins with those of every policy and simulates "
            f"{self.scale.searches} others; at most: no schedule has more, by a relaxation.",
            [
                Row(f"{said}: Oracle has {paper}" if number != "requests" else paper, ours, why)
                for number, (said, paper) in PAPER.items()
                for ours, why in [(self._said(results, number), WHY.get(number, ""))]
            ],
            [],
            [lines(results, ["", "TTFT x", ""], rows, COLUMNS)],
        )

    def _said(self, results: SloResults, number: str) -> str:
        said = []
        for ease in self.scale.eases:
            changes = []
            for model in self.scale.models:
                ours = self.mean(results, number, self._of(results, ACCELGEN, model, ease))
                best = self.mean(results, number, self._found(model, ease))
                changes.append(f"{model} {best / ours - 1:+.0%}" if ours else model)
            said.append(f"TTFT x {ease:g}: {', '.join(changes)}")
        return "; ".join(said)

    def _rate(self, model: str) -> float:
        return self.scale.rates(model)[-1 if len(self.scale.at) < 2 else 1]

    def _of(self, results: SloResults, name: str, model: str, ease: float) -> list[SloCase]:
        count = self.scale.searched
        return self.seeds(results, name, model, self._rate(model), ease, requests=count)

    def _found(self, model: str, ease: float) -> list[SloCase]:
        chosen, count = Tuned(f"oracle:runs={self.scale.searches}"), self.scale.searched
        return self.traces(chosen, model, self._rate(model), requests=count, ease=ease)


WHY = {
    "goodput": "The search is for requests that meet all of their targets, not for tokens.",
}
