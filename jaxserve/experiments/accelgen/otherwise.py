"""The same with outputs as Figure 8 prints them, and with targets that can be met."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.setting import (
    ACCELGEN,
    AS_PRINTED,
    COLUMNS,
    EASE,
    LOADED,
    OTHERS,
    RATES,
    Part,
    lines,
)
from jaxserve.experiments.common.claims import Section
from jaxserve.experiments.common.figures import Panel, chart

NAMES = (ACCELGEN, AS_PRINTED, *OTHERS)
LABELS = {AS_PRINTED: "accelgen, as printed"}  # in figures
MET = ("TBT, %", "tbt", ".1f", 100.0), ("all targets, %", "slo", ".1f", 100.0)


class Printed(Part):
    """Outputs of Figure 8."""

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """At the paper's rate, and at one below saturation."""
        for rate in self._rates():
            for name in (ACCELGEN, *OTHERS):
                yield from self._of(results, name, rate)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 9 of the page."""
        rows = [
            ([f"{rate:g}", f"`{name}`"], self._of(results, name, rate))
            for rate in self._rates()
            for name in (ACCELGEN, *OTHERS)
        ]
        return Section(
            "9. Outputs as Figure 8 prints them",
            f"{self.scale.first}: 51% of the outputs up to 512 tokens, the others up to 2,048, of "
            f"which 13% are cut to that; traces of {self.scale.long_requests} requests.",
            [],
            [],
            [lines(results, ["rate, 1/s", ""], rows)],
        )

    def _rates(self) -> tuple[float, float]:
        return 0.1, 8.0

    def _of(self, results: SloResults, name: str, rate: float) -> list[SloCase]:
        count = self.scale.long_requests
        return self.seeds(results, name, self.scale.first, rate, requests=count, printed=True)


class Reachable(Part):
    """TTFTs ten times as long."""

    def points(self) -> Iterator[tuple[str, float]]:
        """Model and rate, up to twice what can be served."""
        for model in self.scale.models:
            for at in self.scale.at:
                if at <= LOADED:
                    yield model, RATES[model][at]

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """Each policy as it serves best."""
        for model, rate in self.points():
            for name in NAMES:
                yield from self.trial(model, EASE).runs(name, model).values()
                yield from self.of(results, name, model, rate)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 10 of the page."""
        rows = [
            ([model, f"{rate:g}", f"`{name}`"], self.of(results, name, model, rate))
            for model, rate in self.points()
            for name in NAMES
        ]
        figure = "accelgen-met.svg"
        self._draw(results, figures / figure)
        return Section(
            "10. Targets that can be met",
            f"The same with TTFTs {EASE:g} times as long. All targets: TTFT and the 99th "
            "percentile of a request's own times between tokens.",
            [],
            [(figure, "Requests that end within all of their targets, a second")],
            [lines(results, ["", "rate, 1/s", ""], rows, (*COLUMNS, *MET))],
        )

    def of(self, results: SloResults, name: str, model: str, rate: float) -> list[SloCase]:
        """One a seed."""
        return self.seeds(results, name, model, rate, EASE)

    def met(self, results: SloResults, model: str, rate: float) -> dict[str, float]:
        """Requests that end within all of their targets a second, by policy."""
        return {
            name: self.mean(results, "met", self.of(results, name, model, rate)) for name in NAMES
        }

    def _draw(self, results: SloResults, path: Path) -> None:
        panels = []
        for model in self.scale.models:
            rates = [rate for name, rate in self.points() if name == model]
            found = [self.met(results, model, rate) for rate in rates]
            shown = {
                LABELS.get(name, name): (rates, [values[name] for values in found])
                for name in NAMES
            }
            panels.append(Panel(model, "within all targets/s", shown, log_y=False))
        chart(path, [panels], "requests/s")
