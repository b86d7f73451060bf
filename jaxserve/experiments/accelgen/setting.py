"""AccelGen's setting (sections 3.1 and 6.1), and what the parts of the page have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.tuned import Trial, Tuned
from jaxserve.experiments.common.claims import Section, table
from jaxserve.experiments.common.seeds import over

RATES = {
    # Requests/s: half of what the fastest finish a second, that, twice that, and the paper's.
    "OPT-13B": (0.5, 1.0, 2.0, 8.0),
    "Llama-13B": (0.5, 1.0, 2.0, 8.0),
    "OPT-175B": (0.25, 0.5, 1.0, 8.0),
    "Llama-3-70B": (0.35, 0.7, 1.4, 8.0),
}
EASE = 10.0  # times the TTFTs of the paper
SERVED, LOADED = 1, 2  # of RATES
ACCELGEN = "accelgen"
PAPERS = ("sarathi", "vllm", "fastgen", "orca", "fastserve")  # that it is compared with there
OURS = ("edf", "infermax")  # that are not in the paper
OTHERS = (*PAPERS, *OURS)
AS_PRINTED = "accelgen:late_last=false:sparing=false:paced=true"  # without our departures
ABLATIONS = ("accelgen_nochunk", "accelgen_noorder", "accelgen_nobatch")
Column = tuple[str, str, str, float]  # title, number, format, factor
COLUMNS: tuple[Column, ...] = (
    ("requests/s", "requests", ".2f", 1.0),
    ("tokens/s", "tokens", ".0f", 1.0),
    ("goodput, tokens/s", "goodput", ".0f", 1.0),
    ("goodput, requests/s", "met", ".3f", 1.0),
    ("iterations in time, %", "iterations", ".1f", 100.0),
    ("TTFT, %", "ttft", ".1f", 100.0),
    ("jobs in time, %", "in_jct", ".1f", 100.0),
    ("jobs in time/s", "jobs", ".2f", 1.0),
    ("JCT, s", "jct", ".1f", 1.0),
    ("compute, %", "compute", ".0f", 100.0),
    ("cache, %", "cache", ".0f", 100.0),
    ("preemptions", "preemptions", ".0f", 1.0),
)


@dataclass(frozen=True)
class Scale:
    """How much is run. seeds: traces of each point; requests: of a trace, and of one whose outputs
    are long; at: which of RATES; varied: models on which more than policies and rates varies;
    books: shares of BookCorpus in Figure 13; system_slos: seconds, of Figure 5; plans: requests of
    the traces whose plans are timed; searched: of those whose schedules are searched for, with so
    many searches, at TTFTs times `eases`."""

    seeds: int = 3
    requests: int = 100
    long_requests: int = 40
    models: tuple[str, ...] = tuple(RATES)
    at: tuple[int, ...] = (0, 1, 2, 3)  # of RATES
    varied: tuple[str, ...] = ("OPT-13B", "Llama-3-70B")
    books: tuple[float, ...] = (0.0, 0.35, 0.7)
    system_slos: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    plans: int = 60
    searched: int = 24
    searches: int = 200
    eases: tuple[float, ...] = (1.0, EASE)

    def rates(self, model: str) -> tuple[float, ...]:
        """Requests/s, ascending."""
        return tuple(RATES[model][index] for index in self.at)

    @property
    def first(self) -> str:
        """The model at which single questions are asked."""
        return self.models[0]


QUICK = Scale(2, 3, 3, ("OPT-13B",), (1, 3), ("OPT-13B",), (0.0, 0.35), (0.2, 1.0), 3, 3, 2)


class Part(ABC):
    """One section of the page."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    @abstractmethod
    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """What it wants to know, given what is known: asked again until nothing is new."""

    @abstractmethod
    def section(self, results: SloResults, figures: Path) -> Section:
        """Of the page; its charts are written into the folder `figures`. results: of all that any
        part asked for in `cases`."""

    def trial(self, model: str, ease: float = 1.0) -> Trial:
        """With TTFTs that hardly anybody meets: most tokens in time under load; with others: most
        requests within all of their targets where they can be served."""
        at, number = (LOADED, "goodput") if ease == 1 else (SERVED, "met")
        return Trial(RATES[model][at], self.scale.requests, ease, number)

    def seeds(
        self,
        results: SloResults,
        name: str,
        model: str,
        rate: float,
        ease: float = 1.0,
        **more: object,
    ) -> list[SloCase]:
        """One a seed, with the policy as it serves best; none until that is known. more: fields of
        the case."""
        chosen = self.trial(model, ease).best(results, name, model)
        return [] if chosen is None else self.traces(chosen, model, rate, ease=ease, **more)

    def traces(self, chosen: Tuned, model: str, rate: float, **more: object) -> list[SloCase]:
        """The same with the policy as it is given."""
        values: dict[str, Any] = {"requests": self.scale.requests, **more}
        return [
            SloCase(chosen.policy, model, rate, chosen.budget, seed, **values)
            for seed in range(self.scale.seeds)
        ]

    def rates(self, model: str) -> tuple[float, float]:
        """The least and the highest of the scale: below what can be served, and the paper's."""
        found = self.scale.rates(model)
        return found[0], found[-1]

    def mean(self, results: SloResults, name: str, cases: Sequence[SloCase]) -> float:
        """Of that number over the cases."""
        return over(results, cases, name).mean


def cells(
    results: SloResults, cases: Sequence[SloCase], columns: Sequence[Column] = COLUMNS
) -> list[str]:
    """Of a line of a table: means over the cases, and half of their intervals; nothing for a bound
    where nobody searched."""
    found = [(over(results, cases, number), number, form, by) for _, number, form, by in columns]
    return [
        "" if number == "bound" and not value.mean else value.text(form, by)
        for value, number, form, by in found
    ]


def lines(
    results: SloResults,
    names: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Sequence[SloCase]]],
    columns: Sequence[Column] = COLUMNS,
) -> str:
    """A table. names: of the first columns; rows: what is in them, and the cases."""
    header = [*names, *(title for title, *_ in columns)]
    return table(header, [[*first, *cells(results, cases, columns)] for first, cases in rows])
