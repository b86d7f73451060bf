"""Latency of real-time requests against throughput of best-effort ones, and the SLOs that are
attained (BROS section 7.2, Figures 10 and 11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from jaxserve.experiments.bros.mixed import MixedCase, MixedResults
from jaxserve.experiments.bros.setting import (
    BROS,
    LABELS,
    POLICIES,
    RR,
    STATIC,
    VLLM,
    Part,
)
from jaxserve.experiments.common.claims import Row, Section, table
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.experiments.common.seeds import Number, over

Get = Callable[[str, str, str, float], Number]  # by policy, model, data set and rate

# What BROS changes, percent: normalised latency and best-effort throughput (section 7.2.1).
TRADED = {
    ("sharegpt", VLLM): (-74.20, -11.29),
    ("sharegpt", RR): (-54.31, -8.80),
    ("lmsys", VLLM): (-69.61, -17.67),
    ("lmsys", RR): (-25.77, -15.18),
}
# By what factor BROS attains more: TTFT and TPOT (section 7.2.2).
ATTAINED = {
    ("sharegpt", VLLM): (36.38, 1.73),
    ("sharegpt", RR): (11.75, 1.47),
    ("lmsys", VLLM): (21.42, 2.62),
    ("lmsys", RR): (14.23, 2.28),
}
CLOSE = 0.02  # of attainment: a point at which a static class does as well


class Compared(Part):
    """All policies at all points."""

    def cases(self) -> Iterator[MixedCase]:
        """Each policy, model, data set, rate and seed."""
        for point in self.points():
            for policy in POLICIES:
                yield from self.seeds(policy, *point)

    def get(self, results: MixedResults, name: str) -> Get:
        """That number of `MixedNumbers`."""
        return lambda policy, *point: over(results, self.seeds(policy, *point), name)

    def panels(self, get: Get, data: str, y_label: str, factor: float = 1.0) -> list[Panel]:
        """One a model: the number against the rate."""
        found = []
        for model in self.scale.models:
            rates = self.scale.rates(model)
            lines = {
                policy: (rates, [factor * get(policy, model, data, rate).mean for rate in rates])
                for policy in POLICIES
            }
            found.append(Panel(f"{LABELS[data]}, {model}", y_label, lines, log_y=False))
        return found

    def lines(self, columns: Sequence[tuple[str, Get, str, float]]) -> str:
        """A table with a line a point, and a column a policy and number: its title, where it is
        from, its format and a factor."""
        header = ["", "rate, 1/s", *(f"{p}: {title}" for title, *_ in columns for p in POLICIES)]
        rows = []
        for model, data, rate in self.points():
            cells = [
                get(policy, model, data, rate).text(form, factor)
                for _, get, form, factor in columns
                for policy in POLICIES
            ]
            rows.append([f"{LABELS[data]}, {model}", f"{rate:g}", *cells])
        return table(header, rows)

    def change(self, get: Get, other: str, data: str) -> float:
        """What BROS changes against it, percent, mean over the points of the data set; those at
        which the other has none do not count."""
        points = [point for point in self.points() if point[1] == data]
        both = [(get(BROS, *point).mean, get(other, *point).mean) for point in points]
        return 100 * fmean([ours / theirs - 1 for ours, theirs in both if theirs] or [0.0])

    def mean(self, get: Get, policy: str, data: str) -> float:
        """Over the points of the data set."""
        return fmean(get(policy, *point).mean for point in self.points() if point[1] == data)


class Tradeoff(Compared):
    """7.2.1, Figure 10."""

    def section(self, results: MixedResults, figures: Path) -> Section:
        """Section 1 of the page: latency and throughput against the rate."""
        latency, throughput = self.get(results, "latency"), self.get(results, "best_effort")
        name = "bros-10-tradeoff.svg"
        rows = []
        for data in self.scale.data_sets:
            rows.append(self.panels(latency, data, "normalised latency, s"))
            rows.append(self.panels(throughput, data, "best-effort, requests/s"))
        chart(figures / name, rows, "real-time requests/s", log_x=False)
        claims = [
            self.row(latency, throughput, data, other)
            for data in self.scale.data_sets
            for other in (VLLM, RR)
        ]
        return Section(
            "1. Latency and throughput (section 7.2.1, Figure 10)",
            "Normalised latency: the time of a real-time request from its arrival to its last "
            "token over its tokens, mean over all that came; of those that had not ended, the time "
            "so far. Throughput: best-effort requests that ended, a second. Changes are means over "
            "all models and rates, as the paper has them.",
            [*claims, self.static(latency, throughput)],
            [(name, "Normalised latency and best-effort throughput against the real-time rate")],
            [
                self.lines([("latency, s", latency, ".3f", 1.0)]),
                self.lines([("best-effort, 1/s", throughput, ".2f", 1.0)]),
            ],
        )

    def row(self, latency: Get, throughput: Get, data: str, other: str) -> Row:
        """A claim against vLLM or round robin."""
        paper = TRADED[data, other]
        shorter, less = (self.change(get, other, data) for get in (latency, throughput))
        return Row(
            f"{LABELS[data]}: {paper[0]:.1f}% latency for {paper[1]:.1f}% throughput against "
            f"`{other}`",
            f"{shorter:+.1f}% latency, {less:+.1f}% throughput",
            WHY_VLLM if other == VLLM else WHY_RR,
        )

    def static(self, latency: Get, throughput: Get) -> Row:
        """What real systems have: classes that never change."""
        said = []
        for other in STATIC:
            parts = []
            for data in self.scale.data_sets:
                shorter, less = (self.change(get, other, data) for get in (latency, throughput))
                parts.append(f"{LABELS[data]} {shorter:+.1f}% latency, {less:+.1f}% throughput")
            points = list(self.points())
            lower = sum(latency(other, *p).mean <= latency(BROS, *p).mean for p in points)
            more = sum(throughput(other, *p).mean >= throughput(BROS, *p).mean for p in points)
            said.append(
                f"against `{other}` {'; '.join(parts)}; it has the lower latency at {lower} of "
                f"{len(points)} points and the higher throughput at {more}"
            )
        return Row("says nothing of static classes", ". ".join(said), WHY_STATIC)


class Attainment(Compared):
    """7.2.2, Figure 11."""

    def section(self, results: MixedResults, figures: Path) -> Section:
        """Section 2 of the page: TTFT and TPOT within their targets."""
        ttft, tpot, tbt = (self.get(results, name) for name in ("ttft", "tpot", "tbt"))
        name = "bros-11-attainment.svg"
        rows = []
        for data in self.scale.data_sets:
            rows.append(self.panels(ttft, data, "TTFT attained, %", 100))
            rows.append(self.panels(tpot, data, "TPOT attained, %", 100))
        chart(figures / name, rows, "real-time requests/s", log_x=False)
        claims = [
            self.row(ttft, tpot, data, other)
            for data in self.scale.data_sets
            for other in (VLLM, RR)
        ]
        return Section(
            "2. SLO attainment (section 7.2.2, Figure 11)",
            "Shares of the real-time requests that came: first token within 0.4 s; mean time "
            "between tokens within 0.2 s, of those with two tokens; and, which the paper does not "
            "ask for, the 99th percentile of a request's own times between tokens within 0.2 s "
            "(P99 TBT). Who had not ended is judged as if its next token came at the end.",
            [*claims, self.static(ttft, tbt)],
            [(name, "TTFT and TPOT attainment against the real-time rate")],
            [
                self.lines([("TTFT, %", ttft, ".1f", 100.0)]),
                self.lines([("TPOT, %", tpot, ".1f", 100.0)]),
                self.lines([("P99 TBT, %", tbt, ".1f", 100.0)]),
            ],
        )

    def row(self, ttft: Get, tpot: Get, data: str, other: str) -> Row:
        """A claim against vLLM or round robin."""
        paper = ATTAINED[data, other]
        ours = []
        for name, get in (("TTFT", ttft), ("TPOT", tpot)):
            mine, theirs = (self.mean(get, policy, data) for policy in (BROS, other))
            times = f"{mine / theirs:.2f}x" if theirs else "more"
            ours.append(f"{name} {times} ({mine:.1%} for {theirs:.1%})")
        return Row(
            f"{LABELS[data]}: {paper[0]:g}x TTFT and {paper[1]:g}x TPOT of `{other}`",
            ", ".join(ours),
            WHY_ATTAINED,
        )

    def static(self, ttft: Get, tbt: Get) -> Row:
        """Where classes that never change do as well."""
        said = []
        for other in STATIC:
            points = list(self.points())
            gaps = [ttft(other, *p).mean - ttft(BROS, *p).mean for p in points]
            close = sum(gap >= -CLOSE for gap in gaps)
            steady = sum(tbt(other, *p).mean - tbt(BROS, *p).mean >= -CLOSE for p in points)
            said.append(
                f"`{other}` attains as many TTFTs (less {CLOSE:.0%}) at {close} of {len(points)} "
                f"points, {100 * fmean(gaps):+.1f} points on average, and as many P99 TBTs at "
                f"{steady}"
            )
        return Row("says nothing of static classes", ". ".join(said), WHY_STATIC)


WHY_VLLM = (
    "The simulated batch times, and the size of best-effort batches, are not the paper's; see "
    "above."
)
WHY_RR = (
    "Ours lets a tier that has nothing to do pass its turn, and starts prompts of both as vLLM "
    "does."
)
WHY_ATTAINED = (
    "Factors over a share that is close to 0 say little. Our steps take some 50 to 100 ms, so the "
    "mean time between tokens is within 0.2 s unless a request is set aside."
)
WHY_STATIC = (
    "`priority` and `edf` compute prompts in chunks of 512 tokens beside decodes (Sarathi), "
    "real-time ones first; `bros` cuts them to what deadlines leave, which the paper does not."
)
