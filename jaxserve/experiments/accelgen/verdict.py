"""What comes of it all, in one table: whether AccelGen is better, and than what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from jaxserve.experiments.accelgen.case import SloResults
from jaxserve.experiments.accelgen.compared import Compared, times
from jaxserve.experiments.accelgen.otherwise import Reachable
from jaxserve.experiments.accelgen.setting import ACCELGEN, AS_PRINTED, EASE, OTHERS, PAPERS, RATES
from jaxserve.experiments.common.claims import Section, table

COUNTED = ("goodput", "iterations", "in_jct", "jct")


class Verdict(Compared):
    """The first section of the page."""

    def section(self, results: SloResults, figures: Path) -> Section:
        """AccelGen against each of the others, at all points."""
        points, rows = list(self.points()), []
        for name in OTHERS:
            pairs = {
                number: [
                    tuple(
                        self.mean(results, number, self.seeds(results, who, *point))
                        for who in (ACCELGEN, name)
                    )
                    for point in points
                ]
                for number in COUNTED
            }
            cells = [f"{fmean(times(*pair) for pair in pairs['goodput']):.2f}x"]
            for number in ("iterations", "in_jct"):
                cells.append(f"{100 * fmean(a - b for a, b in pairs[number]):+.1f}")
            cells.append(f"{fmean(times(*pair) for pair in pairs['jct']):.2f}x")
            ahead = (sum(a > b for a, b in pairs[number]) for number in ("goodput", "in_jct"))
            rows.append([f"`{name}`" + ("" if name in PAPERS else " (not there)"), *cells])
            rows[-1] += [f"{count} of {len(points)}" for count in ahead]
        header = [
            "`accelgen` against",
            "goodput",
            "iterations in time, points",
            "jobs in time, points",
            "JCT",
            "more goodput at",
            "more jobs in time at",
        ]
        return Section(
            "In short",
            " ".join(self._judged(results)),
            [],
            [],
            [
                *self._reachable(results),
                f"With the paper's TTFTs, means over {len(points)} points, each model and rate: "
                "`accelgen` over the other, or less it. Goodput in tokens, which hardly depends on "
                "TTFTs.",
                table(header, rows),
                *self._said(results),
            ],
        )

    def _judged(self, results: SloResults) -> Iterator[str]:
        """What a reader should know first."""
        part = Reachable(self.scale)
        found: dict[int, list[float]] = {}
        for model, rate in part.points():
            met = part.met(results, model, rate)
            mine, _ = met.pop(ACCELGEN), met.pop(AS_PRINTED)
            at = RATES[model].index(rate)
            found.setdefault(at, []).append(times(mine, max(met.values())))
        where = ("half of what can be served", "about that", "twice that")
        said = (
            f"{min(values):.2f}x to {max(values):.2f}x at {where[at]}"
            for at, values in found.items()
        )
        yield (
            "AccelGen does what it is for: where targets can be met, and not all requests can be "
            "served, more of them end within all of their targets than with any of the others; "
            "with less to do `edf` is as good. Against the best of the others at each point: "
            f"{', '.join(said)}."
        )
        most = []
        for model in self.scale.models:
            rate = self.scale.rates(model)[-1]
            mine, *others = (
                self.mean(results, "requests", self.seeds(results, name, model, rate))
                for name in (ACCELGEN, *OTHERS)
            )
            most.append(times(mine, max(others)))
        yield (
            "It does not serve more, and the paper's factors of throughput do not come out here: "
            f"at 8/s it finishes {min(most):.2f}x to {max(most):.2f}x of what the fastest does, "
            "because it keeps its steps within the strictest TBT and preempts more often. With "
            "TTFTs as the paper sets them hardly anybody can be in time, whatever the policy."
        )

    def _reachable(self, results: SloResults) -> list[str]:
        """How it is where targets can be met."""
        part, rows = Reachable(self.scale), []
        for model, rate in part.points():
            met = part.met(results, model, rate)
            mine, printed = met.pop(ACCELGEN), met.pop(AS_PRINTED)
            first = max(met, key=lambda name: met[name])
            rows.append(
                [
                    model,
                    f"{rate:g}",
                    *(f"{value:.3f}" for value in (mine, printed, met[first])),
                    f"`{first}`",
                    f"{times(mine, met[first]):.2f}x",
                ]
            )
        header = ["", "rate, 1/s", "`accelgen`", "as the paper has it", "best of the others"]
        return [
            f"Where TTFTs are {EASE:g} times as long, so that they can be met: requests that end "
            "within all of their targets, a second.",
            table([*header, "which", "`accelgen` against it"], rows),
        ]

    def _said(self, results: SloResults) -> list[str]:
        """Who comes first with which model."""
        said = []
        for model in self.scale.models:
            firsts = []
            for at in (0, -1):
                rate = self.scale.rates(model)[at]
                found = {
                    name: self.mean(results, "goodput", self.seeds(results, name, model, rate))
                    for name in (ACCELGEN, *OTHERS)
                }
                order = sorted(found, key=lambda name: -found[name])
                place = order.index(ACCELGEN) + 1
                firsts.append(
                    f"at {rate:g}/s {order[0]} has most ({found[order[0]]:.0f} tokens/s), "
                    f"`accelgen` {found[ACCELGEN]:.0f} (place {place})"
                )
            said.append(f"{model}: {'; '.join(firsts)}.")
        return ["Goodput, tokens in time a second:", "\n".join(f"- {line}" for line in said)]
