"""What the paper measures of systems as they are (section 3.2, Figures 3 to 5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np

from jaxserve.experiments.accelgen.case import QUANTILES, SloCase, SloResults
from jaxserve.experiments.accelgen.places import PLACES, Place
from jaxserve.experiments.accelgen.requests import prefill_seconds
from jaxserve.experiments.accelgen.setting import ACCELGEN, Part, lines
from jaxserve.experiments.accelgen.tuned import Tuned
from jaxserve.experiments.common.claims import Row, Section
from jaxserve.experiments.common.figures import Panel, chart

MODELS = ("OPT-13B", "OPT-175B")
SYSTEMS = ("orca", "vllm", "fastgen", "sarathi")
PAPER = {"compute": (33, 61, 62, 64), "cache": (88, 79, 80, 83)}  # percent, of SYSTEMS
RATE = 8.0
COLUMNS = (
    ("step, ms", "step", ".0f", 1e3),
    ("steps within 0.1875 s, %", "reading", ".1f", 100.0),
    ("compute, %", "compute", ".1f", 100.0),
    ("cache, %", "cache", ".1f", 100.0),
    ("iterations in time, %", "iterations", ".1f", 100.0),
    ("requests/s", "requests", ".2f", 1.0),
)


def budget_of(place: Place, seconds: float) -> int:
    """The most tokens of one prompt that take no longer in a step, at least 1."""
    sizes = np.arange(1, 1 << 14)
    return max(int(np.searchsorted(prefill_seconds(place, sizes), seconds, side="right")), 1)


class Measured(Part):
    """3.2: steps, utilisation, attainment, and one SLO for all."""

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """Each system with the pivot as its budget; Sarathi with budgets for one SLO."""
        for model in self._models():
            for name in (*SYSTEMS, ACCELGEN):
                yield from self._of(name, model)
        for slo in self.scale.system_slos:
            yield from self._under(slo)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 2 of the page."""
        figure = "accelgen-3-steps.svg"
        self._draw(results, figures / figure)
        rows = [
            ([model, f"`{name}`"], self._of(name, model))
            for model in self._models()
            for name in (*SYSTEMS, ACCELGEN)
        ]
        slos = [
            ([f"{slo:g}", str(self._budget(slo))], self._under(slo))
            for slo in self.scale.system_slos
        ]
        return Section(
            "2. Systems as they are (section 3.2, Figures 3 to 5)",
            "As measured there: 8 requests/s, TBTs of 0.1875 s times 0.25, 0.5, 1 or 2, and the "
            "paper's pivot as the token budget of `fastgen` and `sarathi`.",
            [self._steps(results), *self._used(results), self._one_slo(results)],
            [(figure, "Share of the steps that take no longer")],
            [
                lines(results, ["", ""], rows, COLUMNS),
                f"`sarathi`, {self.scale.first}, with the largest budget whose step takes no "
                "longer than one SLO for the whole system (Figure 5):",
                lines(results, ["SLO, s", "budget, tokens"], slos, COLUMNS),
            ],
        )

    def _models(self) -> list[str]:
        return [model for model in MODELS if model in self.scale.models]

    def _of(self, name: str, model: str) -> list[SloCase]:
        budget = PLACES[model].pivot if name in ("fastgen", "sarathi") else 0
        return self.traces(Tuned(name, budget), model, RATE, choices=True, quantiles=True)

    def _budget(self, slo: float) -> int:
        return budget_of(PLACES[self.scale.first], slo)

    def _under(self, slo: float) -> list[SloCase]:
        chosen = Tuned("sarathi", self._budget(slo))
        return self.traces(chosen, self.scale.first, RATE, choices=True)

    def _steps(self, results: SloResults) -> Row:
        found = [
            self.mean(results, "reading", self._of(name, model))
            for model in self._models()
            for name in SYSTEMS
        ]
        return Row(
            "16% to 34% of the steps take at most 0.1875 s",
            f"{min(found):.0%} to {max(found):.0%}",
            "A step of a pivot's tokens takes "
            + " and ".join(
                f"{1e3 * float(prefill_seconds(PLACES[m], np.array([PLACES[m].pivot]))[0]):.0f} ms "
                f"({m})"
                for m in self._models()
            )
            + ", and most are of decodes alone.",
        )

    def _used(self, results: SloResults) -> Iterator[Row]:
        for number, said in (("compute", "compute"), ("cache", "cache")):
            paper = ", ".join(
                f"{share}% (`{name}`)" for share, name in zip(PAPER[number], SYSTEMS, strict=True)
            )
            ours = []
            for name in SYSTEMS:
                cases = [self._of(name, model) for model in self._models()]
                mean = fmean(self.mean(results, number, some) for some in cases)
                ours.append(f"{mean:.0%} (`{name}`)")
            yield Row(f"{said} utilisation of {paper}", ", ".join(ours), WHY[number])

    def _one_slo(self, results: SloResults) -> Row:
        strict, loose = self.scale.system_slos[0], self.scale.system_slos[-1]
        ends = []
        for number in ("iterations", "requests"):
            ends.append([self.mean(results, number, self._under(slo)) for slo in (strict, loose)])
        (met, less), (slow, fast) = ends
        return Row(
            "one strict SLO for all keeps targets and costs throughput; a loose one the reverse",
            f"{strict:g} s: {met:.1%} of the iterations in time, {slow:.2f} requests/s; {loose:g} "
            f"s: {less:.1%}, {fast:.2f} requests/s",
            "Few steps have a whole budget of prompt in them, so it hardly matters.",
        )

    def _draw(self, results: SloResults, path: Path) -> None:
        panels = []
        for model in self._models():
            shown = {}
            for name in (*SYSTEMS, ACCELGEN):
                steps = results[self._of(name, model)[0]].steps
                shown[name] = ([1e3 * step for step in steps], [100 * q for q in QUANTILES])
            panels.append(Panel(model, "steps, %", shown, log_y=False, markers=False))
        chart(path, [panels], "ms of a step")


WHY = {
    "compute": (
        "A step has the decodes of the few requests that the cache holds, and outputs are too long "
        "for prompts to fill the rest: see the introduction."
    ),
    "cache": "",
}
