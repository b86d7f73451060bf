"""The same with outputs as Figure 8 prints them, and with targets that can be met."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.setting import ACCELGEN, COLUMNS, EASE, OTHERS, Part, lines
from jaxserve.experiments.common.claims import Section

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

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """At rates that can be served, or nearly."""
        for model in self.scale.models:
            for name in (ACCELGEN, *OTHERS):
                yield from self.trial(model, EASE).runs(name, model).values()
                for rate in self._rates(model):
                    yield from self._of(results, name, model, rate)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 10 of the page."""
        rows = [
            ([model, f"{rate:g}", f"`{name}`"], self._of(results, name, model, rate))
            for model in self.scale.models
            for rate in self._rates(model)
            for name in (ACCELGEN, *OTHERS)
        ]
        return Section(
            "10. Targets that can be met",
            f"The same with TTFTs {EASE:g} times as long, at the two lowest rates. All targets: "
            "TTFT and the 99th percentile of a request's own times between tokens.",
            [],
            [],
            [lines(results, ["", "rate, 1/s", ""], rows, (*COLUMNS, *MET))],
        )

    def _rates(self, model: str) -> tuple[float, ...]:
        return self.scale.rates(model)[:2]

    def _of(self, results: SloResults, name: str, model: str, rate: float) -> list[SloCase]:
        return self.seeds(results, name, model, rate, EASE)
