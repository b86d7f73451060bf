"""Apt-Serve's setting (section 6.2), and what the parts of `aptserve`'s page have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxserve.experiments.common.claims import Section
from jaxserve.experiments.common.figures import Panel
from jaxserve.experiments.common.online import OnlineCase, OnlineNumbers, OnlineResults
from jaxserve.sched.simulation.capacity import COARSE

MODELS = {"13B": "opt-13b@a100-40g", "30B": "opt-30b@2xa100-40g", "66B": "opt-66b@4xa100-40g"}
LABELS = {"sharegpt": "ShareGPT", "humaneval": "HumanEval", "longbench": "LongBench"}
SLOS = {
    # Table 3: TTFT and P99 TBT in seconds.
    ("13B", "sharegpt"): (1.0, 1.0),
    ("13B", "humaneval"): (0.5, 0.5),
    ("13B", "longbench"): (4.0, 1.0),
    ("30B", "sharegpt"): (1.5, 1.0),
    ("30B", "humaneval"): (1.0, 0.5),
    ("30B", "longbench"): (4.5, 1.0),
    ("66B", "sharegpt"): (2.0, 1.0),
    ("66B", "humaneval"): (1.5, 0.5),
    ("66B", "longbench"): (5.0, 1.0),
}
# Where searches begin, steps of `COARSE`: of the baselines with 13B, less for a larger model, more
# for Apt-Serve. They decide how many rates are tried, not what is found.
START = {"sharegpt": 3, "humaneval": 12, "longbench": 1}
LARGER = {"13B": 0, "30B": 1, "66B": 3}
AHEAD = {"sharegpt": 4, "humaneval": 1, "longbench": 1}
LEVELS = (0.9, 0.6)
BASELINES = ("vllm", "sarathi", "fastgen")
PROJECTED, ABSORBED = "aptserve", "aptserve, absorbed"


@dataclass(frozen=True)
class Scale:
    """How much is run. requests: of a trace; of the long ones. cvs: of Figure 9."""

    requests: int = 1000
    long_requests: int = 500
    models: tuple[str, ...] = tuple(MODELS)
    data_sets: tuple[str, ...] = tuple(LABELS)
    levels: tuple[float, ...] = LEVELS
    cvs: tuple[float, ...] = (1, 2, 5, 10)
    costs: tuple[float, ...] = (1, 1 / 4, 1 / 16, 1 / 64)
    candidates: tuple[int, ...] = (50, 100, 200, 400, 800, 1600)
    plan_repeats: int = 50


QUICK = Scale(40, 12, ("13B",), ("sharegpt",), (0.9,), (1,), (1, 1 / 4), (8,), 2)


class Part(ABC):
    """One section of the page, or several."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    @abstractmethod
    def cases(self, results: OnlineResults) -> Iterator[OnlineCase]:
        """What it wants to know, given what is known: asked again until nothing is new."""

    @abstractmethod
    def section(self, results: OnlineResults, figures: Path) -> Section:
        """Of the page; its charts are written into the folder `figures`. results: of all that any
        part asked for in `cases`."""

    def case(self, system: str, model: str, data: str, rate: float, **more: object) -> OnlineCase:
        """A trace of the main setting. system: a policy, or ABSORBED; `aptserve`s read hidden
        caches projected unless it says so."""
        ttft, tbt = SLOS[model, data]
        policy, absorbed = system.removesuffix(", absorbed"), system.endswith(", absorbed")
        return OnlineCase(
            policy,
            MODELS[model],
            data,
            rate,
            ttft,
            tbt,
            requests=self.scale.requests,
            hidden_read="absorbed" if absorbed else "projected",
            **more,  # type: ignore[arg-type]
        )


class Lines(Part):
    """A part with panels of attainment against rate, each system's rates found by a search."""

    systems: tuple[str, ...] = ()

    def panels(self) -> Iterator[tuple[str, str]]:
        """Model and data set, row by row."""
        for data in self.scale.data_sets:
            for model in self.scale.models:
                yield model, data

    def cases(self, results: OnlineResults) -> Iterator[OnlineCase]:
        """The rates that the search of each line needs next; none once all lines are found."""
        for model, data in self.panels():
            for name in self.systems:
                _, missing = self._search(results, name, model, data)
                for index in missing:
                    yield self.case(name, model, data, COARSE.rate(index))

    def line(
        self, results: OnlineResults, system: str, model: str, data: str
    ) -> dict[float, OnlineNumbers]:
        """Numbers by rate, ascending."""
        found, _ = self._search(results, system, model, data)
        rates = [COARSE.rate(index) for index in sorted(found)]
        return {rate: results[self.case(system, model, data, rate)] for rate in rates}

    def attainments(
        self, results: OnlineResults, system: str, model: str, data: str
    ) -> dict[float, float]:
        """Shares of the requests within both targets by rate, requests/s, ascending."""
        return {r: n.attainment for r, n in self.line(results, system, model, data).items()}

    def _search(
        self, results: OnlineResults, system: str, model: str, data: str
    ) -> tuple[dict[int, float], list[int]]:
        def attain(index: int) -> float | None:
            found = results.get(self.case(system, model, data, COARSE.rate(index)))
            return None if found is None else found.attainment

        ahead = 0 if system in BASELINES else AHEAD[data]
        return COARSE.tried(attain, START[data] - LARGER[model] + ahead, self.scale.levels)

    def panel(
        self, results: OnlineResults, model: str, data: str, names: Mapping[str, str]
    ) -> Panel:
        """names: what the systems are called in the figure."""
        lines = {}
        for system, label in names.items():
            points = self.attainments(results, system, model, data)
            lines[label] = (list(points), list(points.values()))
        return Panel(f"{LABELS[data]}, {model}", "SLO attainment", lines, log_y=False)
