"""AccelGen against the others (section 6.2, Figure 11)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.setting import ACCELGEN, OTHERS, PAPERS, Part, lines
from jaxserve.experiments.common.claims import Row, Section
from jaxserve.experiments.common.figures import Panel, chart

DRAWN = (
    ("goodput", "tokens in time/s", 1.0),
    ("iterations", "iterations in time, %", 100.0),
    ("in_jct", "jobs in time, %", 100.0),
    ("requests", "requests/s", 1.0),
)
Compare = Callable[[float, float], float]


def times(ours: float, theirs: float) -> float:
    """By which factor ours is more; inf over nothing, 1 where both are."""
    if theirs:
        return ours / theirs
    return math.inf if ours else 1.0


def less(ours: float, theirs: float) -> float:
    """By which factor ours is less."""
    return times(theirs, ours)


def points(ours: float, theirs: float) -> float:
    """Of shares: how much more ours is, in percent of all."""
    return 100 * (ours - theirs)


CLAIMS: tuple[tuple[str, str, Compare, str], ...] = (
    ("1.42x to 11.21x the tokens/s of the others", "tokens", times, "{:.2f}x"),
    ("1.54x to 10x their requests/s", "requests", times, "{:.2f}x"),
    ("1.43x to 13.71x their goodput, T = 1 s; here tokens", "goodput", times, "{:.2f}x"),
    ("the same; here requests", "met", times, "{:.2f}x"),
    ("37% to 90% more iterations in time", "iterations", points, "{:+.1f} points"),
    ("34% to 93% more jobs in time", "in_jct", points, "{:+.1f} points"),
    ("1.61x to 12.22x lower JCT", "jct", less, "{:.2f}x"),
    ("31% to 63% higher compute utilisation", "compute", points, "{:+.1f} points"),
    ("7.4% to 13.2% less of the cache unallocated", "cache", points, "{:+.1f} points"),
)


def _said(form: str, value: float) -> str:
    return "where they have none" if value == math.inf else form.format(value)


class Compared(Part):
    """6.2, Figures 11a to 11e."""

    def points(self) -> Iterator[tuple[str, float]]:
        """Model and rate."""
        for model in self.scale.models:
            for rate in self.scale.rates(model):
                yield model, rate

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """Each policy at its best, and what says which that is."""
        for model in self.scale.models:
            for name in OTHERS:
                yield from self.trial(model).runs(name, model).values()
        for model, rate in self.points():
            for name in (ACCELGEN, *OTHERS):
                yield from self.seeds(results, name, model, rate)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 4 of the page."""
        figure = "accelgen-11-compared.svg"
        self._draw(results, figures / figure)
        rows = [
            ([model, f"{rate:g}", f"`{name}`"], self.seeds(results, name, model, rate))
            for model, rate in self.points()
            for name in (ACCELGEN, *OTHERS)
        ]
        return Section(
            "4. All systems (section 6.2, Figures 11a to 11e)",
            SETTING,
            [self._claim(results, *claim) for claim in CLAIMS],
            [(figure, "Goodput, attainment and throughput against the rate, requests/s")],
            [lines(results, ["", "rate, 1/s", ""], rows)],
        )

    def _claim(
        self, results: SloResults, claim: str, number: str, compare: Compare, form: str
    ) -> Row:
        said = []
        for at, what in ((-1, "at 8/s"), (0, "at the lowest rates")):
            found = {}
            for model in self.scale.models:
                rate = self.scale.rates(model)[at]
                ours = self.mean(results, number, self.seeds(results, ACCELGEN, model, rate))
                for name in PAPERS:
                    theirs = self.mean(results, number, self.seeds(results, name, model, rate))
                    found[f"`{name}`, {model}"] = compare(ours, theirs)
            low, high = (pick(found, key=lambda key: found[key]) for pick in (min, max))
            ends = (f"{_said(form, found[where])} ({where})" for where in (low, high))
            said.append(f"{what} {' to '.join(ends)}")
        return Row(claim, "; ".join(said), WHY[number])

    def _draw(self, results: SloResults, path: Path) -> None:
        panels = []
        for number, label, factor in DRAWN:
            row = []
            for model in self.scale.models:
                rates = self.scale.rates(model)
                shown = {}
                for name in (ACCELGEN, *OTHERS):
                    runs = [self.seeds(results, name, model, rate) for rate in rates]
                    values = [factor * self.mean(results, number, cases) for cases in runs]
                    shown[name] = (rates, values)
                row.append(Panel(model, label, shown, log_y=False))
            panels.append(row)
        chart(path, panels, "requests/s")


SETTING = (
    "Each with the settings of section 1. What is a second is over the time from the first arrival "
    "to the last token. Goodput in tokens: those that came within the TTFT or the TBT of their "
    "request; in requests: those that ended within both, of times between tokens the 99th "
    "percentile; the paper does not say which. Iterations in time: the share of the tokens. Jobs "
    "in time: requests that ended within TTFT + (n - 1) TBT, for the paper asks for JCTs but does "
    "not say which. Compute: tokens of a step over the paper's pivot, at most 1, mean over steps. "
    "Cache: mean over time."
)
_BOUND = (
    "What can be served is bound by the cache, which all of them fill, or with Llama-3-70B by the "
    "time that prompts take. `accelgen` preempts more often, computes again what is lost by that, "
    "and keeps its steps within the strictest TBT."
)
WHY = {
    "tokens": _BOUND,
    "requests": _BOUND,
    "goodput": "Hardly a token misses its TBT where steps are short: goodput goes with throughput.",
    "met": "Few requests can meet these TTFTs at all, and nobody once there is a queue.",
    "iterations": "Tokens after the first are in time nearly always, at the others' best budgets.",
    "in_jct": "Who waits for memory is late as a job, whoever comes first.",
    "jct": "JCTs are waiting times for memory: throughput decides.",
    "compute": "Decodes of the few requests that the cache holds do not fill a batch.",
    "cache": (
        "With Llama-3-70B its TBTs limit how many run, not the cache; `vllm` and `fastserve` let "
        "in all that fit."
    ),
}
