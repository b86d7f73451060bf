"""The tables of the league of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from jaxserve.sched.cache.retention import LRU
from jaxserve_lab.experiments.common.page import table
from jaxserve_lab.experiments.common.runs import Results
from jaxserve_lab.experiments.programs.runs import ProgramCase, ProgramNumbers
from jaxserve_lab.experiments.programs.workloads import ABOVE, AT, SLACK, WORKLOADS


@dataclass(frozen=True)
class Entrant:
    """A policy of the league. retention: which cached prefixes are kept."""

    policy: str
    retention: str = LRU

    def __str__(self) -> str:
        kept = "" if self.retention == LRU else f", retention `{self.retention}`"
        return f"`{self.policy}`{kept}"


ENTRANTS = (
    Entrant("program_fcfs"),
    Entrant("autellix"),
    Entrant("continuum", "ttl"),
    Entrant("thunderagent"),
    Entrant("hexagent"),
    Entrant("hexagent", "ttl"),
    Entrant("goodput"),
    Entrant("qoserve"),
    Entrant("slidingserve"),
    Entrant("slidingserve", "ttl"),
    Entrant("sarathi"),
)


POINTS = ((AT, False), (ABOVE, False), (ABOVE, True))
"""Loads, and whether there is host memory."""


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        workloads: Names in WORKLOADS.
        seeds: Number of seeds.
        share: Of each workload's requests.
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    seeds: int = 1
    share: float = 1.0


QUICK = Scale(("agents", "chat beside agents"), share=0.08)


class League:
    """The numbers of the league.

    Args:
        scale: How much is run.
        entrants: The policies.
        results: Their runs.
    """

    def __init__(
        self,
        scale: Scale,
        entrants: Sequence[Entrant],
        results: Results[ProgramCase, ProgramNumbers],
    ) -> None:
        self._scale, self._entrants, self._results = scale, entrants, results

    def text(self) -> str:
        """The tables in Markdown. While runs are missing, with numbers that are nan."""
        parts = [self._summary()]
        for load, host in POINTS:
            parts += [f"{_named(load, host).capitalize()}:", self._points(load, host)]
        return "\n\n".join(parts)

    def _summary(self) -> str:
        """Shares of programs in time, over all workloads."""
        header = ["policy", *(_named(load, host) for load, host in POINTS), "mean"]
        rows = []
        for one in self._entrants:
            means = [
                fmean(
                    self._mean(name, load, host, one, "in_time") for name in self._scale.workloads
                )
                for load, host in POINTS
            ]
            rows.append([str(one), *(f"{value:.1%}" for value in [*means, fmean(means)])])
        title = (
            f"Programs in time, within {SLACK:g} times what their calls take alone and the time of "
        )
        return f"{title}tools and people, over all workloads:\n\n{table(header, rows)}"

    def _points(self, load: str, host: bool) -> str:
        header = ["policy", *self._scale.workloads]
        rows = [
            [str(one), *(self._cell(name, load, host, one) for name in self._scale.workloads)]
            for one in self._entrants
        ]
        return table(header, rows)

    def _cell(self, name: str, load: str, host: bool, one: Entrant) -> str:
        found = {
            number: self._mean(name, load, host, one, number)
            for number in ("in_time", "slowdown", "slowdown_p95", "goodput")
        }
        return "{in_time:.0%}; {slowdown:.2f}, {slowdown_p95:.2f}; {goodput:.2f}".format(**found)

    def _mean(self, name: str, load: str, host: bool, one: Entrant, number: str) -> float:
        cases = [
            ProgramCase(name, load, host, one.policy, one.retention, seed, self._scale.share)
            for seed in range(self._scale.seeds)
        ]
        return fmean(getattr(self._results[case], number) for case in cases)


def _named(load: str, host: bool) -> str:
    return f"{load} saturation, {'host memory' if host else 'no host memory'}"
