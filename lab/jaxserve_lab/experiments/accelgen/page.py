"""Makes docs/accelgen.md: what AccelGen claims, and what the simulator says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from jaxserve.sched.cost.saturation import flat_from
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.accelgen.case import SloCase, SloNumbers, run, workload_of
from jaxserve_lab.experiments.accelgen.places import BLOCK, PLACES, Place
from jaxserve_lab.experiments.accelgen.requests import EXCLUSIVE, prefill_seconds
from jaxserve_lab.experiments.accelgen.tuned import TRIAL, Trial, Tuned
from jaxserve_lab.experiments.common.figures import panel
from jaxserve_lab.experiments.common.page import Page, ends, flags, span, table, write_page
from jaxserve_lab.experiments.common.runs import Results

RATES = {
    # Requests/s: half of what the fastest finish a second, that, twice that, and the paper's.
    "OPT-13B": (0.5, 1.0, 2.0, 8.0),
    "Llama-13B": (0.5, 1.0, 2.0, 8.0),
    "OPT-175B": (0.25, 0.5, 1.0, 8.0),
    "Llama-3-70B": (0.35, 0.7, 1.4, 8.0),
}
PAPERS_RATE = 8.0
EASE = 10.0  # times the TTFTs of the paper
SERVED, LOADED = 1, 2  # of RATES
ACCELGEN = "accelgen"
PAPERS = ("sarathi", "vllm", "fastgen", "orca", "fastserve")  # that it is compared with there
OURS = ("edf", "infermax")  # that are not in the paper
OTHERS = (*PAPERS, *OURS)
AS_PRINTED = "accelgen:late_last=false:sparing=false:paced=true"  # without our departures
ABLATIONS = ("accelgen_nochunk", "accelgen_noorder", "accelgen_nobatch")
ALL = (ACCELGEN, *OTHERS)
WITH_PRINTED = (ACCELGEN, AS_PRINTED, *OTHERS)
MEASURED, MEASURED_ON = ("orca", "vllm", "fastgen", "sarathi"), ("OPT-13B", "OPT-175B")  # 3.2
SENSITIVE = (ACCELGEN, "sarathi", "vllm")  # Figure 13
ALONE = ("bookcorpus", "alpaca", "sharegpt")  # Figure 14
EXCLUSIVE_ON = "OPT-13B"
NOT_EXCLUSIVE = "accelgen:long=1000000"  # than which no prompt is longer
SAMPLE = 20_000  # requests, as the paper has them
UTILISED = (0.64, 0.83)  # of compute and cache, Sarathi in section 3.2


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        seeds: Traces of each point.
        requests: Of a trace.
        long_requests: Of a trace with long outputs.
        models: Names in PLACES.
        at: Which of RATES.
        varied: Models on which more than policies and rates varies.
        books: Shares of BookCorpus in Figure 13.
        system_slos: SLOs of Figure 5, seconds.
        plans: Requests of the traces whose plans are timed.
        searched: Requests of the traces whose best schedules are searched for.
        searches: Runs of each such search.
        eases: Factors on the TTFTs there.
    """

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
        """The model's rates in requests/s, ascending."""
        return tuple(RATES[model][index] for index in self.at)

    @property
    def first(self) -> str:
        """The model for what is shown with one model only."""
        return self.models[0]


QUICK = Scale(2, 3, 3, ("OPT-13B",), (1, 3), ("OPT-13B",), (0.0, 0.35), (0.2, 1.0), 3, 3, 2)


class AccelGen(Page[SloCase, SloNumbers]):
    """What the template beside this asks for."""

    name, kind = "accelgen", SloCase
    scale: Scale
    held = tuple(
        SloCase(policy, "Llama-13B", 1.0, budget=512, requests=12, ease=EASE)
        for policy in (*ALL, *ABLATIONS)
    )
    ease, trial_seed, as_printed, block = EASE, TRIAL, AS_PRINTED, BLOCK

    @cached_property
    def points(self) -> list[tuple[str, float]]:
        """The (model, rate) of all points."""
        return [(model, rate) for model in self.scale.models for rate in self.scale.rates(model)]

    def trial(self, model: str, ease: float = 1.0) -> Trial:
        """How a policy's settings are chosen. With the paper's TTFTs, which hardly any request
        meets: most tokens in time under load. With others: most requests within all targets, at a
        rate that can be served."""
        at, number = (LOADED, "goodput") if ease == 1 else (SERVED, "met")
        return Trial(RATES[model][at], self.scale.requests, ease, number)

    def seeds(
        self, name: str, model: str, rate: float, ease: float = 1.0, **more: object
    ) -> list[SloCase]:
        """The cases of a point, one a seed; none while the policy's best settings are not known.

        Args:
            name: Of the policy.
            model: A name in PLACES.
            rate: Requests/s.
            ease: Factor on the TTFTs.
            **more: Other fields of `SloCase`.
        """
        chosen = self.trial(model, ease).best(self.results, name, model)
        return [] if chosen is None else self.traces(chosen, model, rate, ease=ease, **more)

    def traces(self, chosen: Tuned, model: str, rate: float, **more: object) -> list[SloCase]:
        """Like `seeds`, with given settings."""
        values: dict[str, Any] = {"requests": self.scale.requests, **more}
        return [
            SloCase(chosen.policy, model, rate, chosen.budget, seed, **values)
            for seed in range(self.scale.seeds)
        ]

    def kept(self) -> Iterator[SloCase]:
        """What the text leaves out: policies that the paper does not have or that do not make a
        claim, lower rates, SLOs between the ends, and outputs as Figure 8 prints them."""
        scale, first = self.scale, self.scale.first
        for model in self.measured_on:
            yield from self._measured(ACCELGEN, model)
        for slo in scale.system_slos:
            yield from self._under(slo)
        for model in scale.varied:
            low, *_, high = scale.rates(model)
            points = [
                (low, 1.0),
                (high, 1.0),
                *((RATES[model][at], EASE) for at in (SERVED, LOADED)),
            ]
            for point, name in product(points, (ACCELGEN, *ABLATIONS, AS_PRINTED)):
                yield from self._ablated(name, model, *point)
            for books, name in product(scale.books, SENSITIVE):
                yield from self._books(name, model, books)
        for name in ABLATIONS:
            yield from self._planned(name)
        for name in ALL:
            for data in ALONE:
                yield from self._alone(name, data)
            for rate in (0.1, PAPERS_RATE):
                long = scale.long_requests
                yield from self.seeds(name, first, rate, requests=long, printed=True)
            for at in product(scale.models, scale.eases):
                yield from self._searched(name, *at)

    def numbers_of(self, number: str, name: str, model: str, rate: float, *ease: float) -> float:
        """Mean of a number.

        Args:
            number: A field of `SloNumbers`.
            name, model, rate, *ease: As in `seeds`.
        """
        return self.mean(number, self.seeds(name, model, rate, *ease))

    # Introduction.

    def sample(self) -> dict[str, float]:
        """About the requests of the first model: mean lengths, the outputs that utilisation
        implies, and the share of TTFTs shorter than the prompt takes."""
        place, asked = PLACES[self.scale.first], sampled(self.scale.first)
        reachable = float((asked.ttft >= prefill_seconds(place, asked.prompt_len)).mean())
        return {
            "output": round(float(asked.output_len.mean())),
            "implied": round(implied_output(place, float(asked.prompt_len.mean()))),
            "pivot": place.pivot,
            "tokens": place.kv_tokens,
            "late": 1 - reachable,
        }

    def systems(self) -> str:
        """A table with a line per model."""
        rows = [
            [
                name,
                f"`{place.name}`",
                f"{place.kv_tokens:,}",
                f"{place.longest:,}",
                str(place.pivot),
                str(saturation(place)),
                f"{self.pivot_ms(name):.0f}",
                ", ".join(f"{rate:g}" for rate in self.scale.rates(name)),
            ]
            for name, place in PLACES.items()
            if name in self.scale.models
        ]
        header = ["", "system", "tokens of K and V", "longest prompt", "pivot, paper"]
        header += ["pivot, here", "a step of the paper's, ms", "rates, 1/s"]
        return table(header, rows)

    def pivot_ms(self, model: str) -> float:
        """Milliseconds of a step with the paper's pivot of tokens."""
        place = PLACES[model]
        return 1e3 * float(prefill_seconds(place, np.array([place.pivot]))[0])

    # In short: whether AccelGen is better, and than what.

    def reachable(self) -> list[tuple[str, float]]:
        """Models and rates where targets can be met, up to twice what can be served."""
        return [
            (model, RATES[model][at])
            for model in self.scale.models
            for at in self.scale.at
            if at <= LOADED
        ]

    def met(self, model: str, rate: float) -> dict[str, float]:
        """Requests/s that end within all of their targets, by policy, with eased TTFTs."""
        return {name: self.numbers_of("met", name, model, rate, EASE) for name in WITH_PRINTED}

    def judged(self) -> str:
        """AccelGen against the best other policy at each point, by rate."""
        found: dict[int, list[float]] = {}
        for model, rate in self.reachable():
            met = self.met(model, rate)
            best = max(met[name] for name in OTHERS)
            at = RATES[model].index(rate)
            found.setdefault(at, []).append(times(met[ACCELGEN], best))
        where = ("half of what can be served", "about that", "twice that")
        return ", ".join(f"{span(found[at], '{:.2f}x')} at {where[at]}" for at in found)

    def best_by_itself(self) -> str:
        """The command that gives the point where AccelGen is most ahead of the paper's others."""

        def gain(at: tuple[str, float]) -> float:
            met = self.met(*at)
            return times(met[ACCELGEN], max(met[name] for name in PAPERS))

        at = max(self.reachable(), key=gain)
        met = self.met(*at)
        best = max(PAPERS, key=met.__getitem__)
        return self.by_itself("met", *(self.seeds(one, *at, EASE)[0] for one in (ACCELGEN, best)))

    def least_by_itself(self, number: str) -> str:
        """The command that gives the least of `against`."""
        places = list(product(self.scale.models, PAPERS))

        def gain(at: tuple[str, str]) -> float:
            return times(
                *(self.numbers_of(number, one, at[0], PAPERS_RATE) for one in (ACCELGEN, at[1]))
            )

        model, name = min(places, key=gain)
        both = (self.seeds(one, model, PAPERS_RATE)[0] for one in (ACCELGEN, name))
        return self.by_itself(number, *both)

    def ahead(self) -> str:
        """At how many points AccelGen has the most requests within their targets: of the systems
        that the paper compares itself with, and against `edf`."""
        points = [self.met(model, rate) for model, rate in self.reachable()]
        papers = sum(met[ACCELGEN] > max(met[name] for name in PAPERS) for met in points)
        plain = sum(met[ACCELGEN] > met["edf"] for met in points)
        return f"{papers} of {len(points)} points, against `edf` at {plain}"

    def throughput(self) -> str:
        """AccelGen's requests/s over the fastest other policy's, at the highest rate."""
        most = []
        for model in self.scale.models:
            rate = self.scale.rates(model)[-1]
            mine, *others = (self.numbers_of("requests", name, model, rate) for name in ALL)
            most.append(times(mine, max(others)))
        return span(most, "{:.2f}x")

    def eased_by_rate(self) -> str:
        """A figure."""
        panels = [
            panel(
                model,
                "within all targets/s",
                {n: "accelgen, as printed" if n == AS_PRINTED else n for n in WITH_PRINTED},
                [rate for name, rate in self.reachable() if name == model],
                lambda name, rate, model=model: self.met(model, rate)[name],
            )
            for model in self.scale.models
        ]
        caption = "Requests that end within all of their targets, a second"
        return self.chart("accelgen-met.svg", caption, [panels], "requests/s")

    def verdict(self) -> str:
        """A table: AccelGen against each other policy, over all points."""
        rows = []
        for name in OTHERS:
            goodput, iterations, in_jct, jct = (
                [
                    (self.numbers_of(n, ACCELGEN, *point), self.numbers_of(n, name, *point))
                    for point in self.points
                ]
                for n in ("goodput", "iterations", "in_jct", "jct")
            )
            rows.append(
                [
                    f"`{name}`" + ("" if name in PAPERS else " (not there)"),
                    f"{fmean(times(a, b) for a, b in goodput):.2f}x",
                    *(f"{100 * fmean(a - b for a, b in p):+.1f}" for p in (iterations, in_jct)),
                    f"{fmean(times(a, b) for a, b in jct):.2f}x",
                    *(f"{sum(a > b for a, b in p)} of {len(p)}" for p in (goodput, in_jct)),
                ]
            )
        header = ["`accelgen` against", "goodput", "iterations in time, points"]
        header += ["jobs in time, points", "JCT", "more goodput at", "more jobs in time at"]
        return table(header, rows)

    # What the paper measures of systems as they are (section 3.2).

    @property
    def measured_on(self) -> list[str]:
        """The models to measure on."""
        return [model for model in MEASURED_ON if model in self.scale.models]

    def _measured(self, name: str, model: str) -> list[SloCase]:
        budget = PLACES[model].pivot if name in ("fastgen", "sarathi") else 0
        chosen = Tuned(name, budget)
        return self.traces(chosen, model, PAPERS_RATE, choices=True, quantiles=True)

    def short_steps(self) -> str:
        """The share of the steps that take at most 0.1875 s."""
        both = product(MEASURED, self.measured_on)
        return span([self.mean("reading", self._measured(*at)) for at in both], "{:.0%}")

    def used(self, number: str) -> str:
        """Utilisation of each system, mean over models."""

        def mean(name: str) -> float:
            return fmean(self.mean(number, self._measured(name, m)) for m in self.measured_on)

        return ", ".join(f"{mean(name):.0%} (`{name}`)" for name in MEASURED)

    def _under(self, slo: float) -> list[SloCase]:
        chosen = Tuned("sarathi", budget_of(PLACES[self.scale.first], slo))
        return self.traces(chosen, self.scale.first, PAPERS_RATE, choices=True)

    def one_slo(self) -> str:
        """Sarathi with budgets for one SLO: the strict one and the loose one."""
        strict, loose = self.scale.system_slos[0], self.scale.system_slos[-1]
        (met, slow), (less, fast) = (
            [self.mean(number, self._under(slo)) for number in ("iterations", "requests")]
            for slo in (strict, loose)
        )
        return (
            f"{strict:g} s: {met:.1%} of the iterations in time, {slow:.2f} requests/s; {loose:g} "
            f"s: {less:.1%}, {fast:.2f} requests/s"
        )

    # One long prompt at a time (Figure 6).

    def _exclusive(self, name: str) -> list[SloCase]:
        budget = PLACES[EXCLUSIVE_ON].pivot if name in ("fastgen", "sarathi") else 0
        return self.traces(Tuned(name, budget), EXCLUSIVE_ON, math.inf, data=EXCLUSIVE)

    def longer(self) -> str:
        """By how much AccelGen's JCTs exceed the others'."""
        said = []
        for name in ("sarathi", "fastgen", NOT_EXCLUSIVE):
            both = [self._exclusive(ACCELGEN), self._exclusive(name)]
            ratios = (times(*(self.mean(n, one) for one in both)) for n in ("jct_long", "jct"))
            long, every = (ratio - 1 for ratio in ratios)
            said.append(f"against `{name}` {long:+.0%} of the long, {every:+.0%} of all")
        return "; ".join(said)

    # All systems (6.2).

    def against(self, number: str, compare: str = "times") -> str:
        """Least and most against the paper's others, at its rate. compare: a key of COMPARED."""
        found, (compared, form) = {}, COMPARED[compare]
        for model in self.scale.models:
            ours = self.numbers_of(number, ACCELGEN, model, PAPERS_RATE)
            for name in PAPERS:
                theirs = self.numbers_of(number, name, model, PAPERS_RATE)
                found[f"`{name}`, {model}"] = compared(ours, theirs)
        return " to ".join(f"{form.format(found[who])} ({who})" for who in ends(found))

    def by_rate(self) -> str:
        """A figure."""
        panels = [
            [
                panel(
                    model,
                    label,
                    ALL,
                    self.scale.rates(model),
                    lambda name, rate, number=number, factor=factor, model=model: (
                        factor * self.numbers_of(number, name, model, rate)
                    ),
                )
                for model in self.scale.models
            ]
            for number, label, factor in (
                ("goodput", "tokens in time/s", 1.0),
                ("iterations", "iterations in time, %", 100.0),
                ("in_jct", "jobs in time, %", 100.0),
                ("requests", "requests/s", 1.0),
            )
        ]
        caption = "Goodput, attainment and throughput against the rate, requests/s"
        return self.chart("accelgen-11-compared.svg", caption, panels, "requests/s")

    # The time of a plan (Figure 11f).

    def _planned(self, name: str) -> list[SloCase]:
        """One trace, in Python."""
        count = self.scale.plans
        return self.seeds(name, self.scale.first, PAPERS_RATE, requests=count, timed=True)[:1]

    def plan_times(self) -> dict[str, str]:
        """For claims: plan times of fastserve and of the others, and AccelGen's over the mean
        JCT."""
        took = {n: self.mean("plan", self._planned(n)) for n in ALL}
        mine, jct = took[ACCELGEN], self.mean("jct", self._planned(ACCELGEN))
        more = {name: took[name] / mine - 1 for name in took}
        others = {name: more[name] for name in OTHERS if name != "fastserve"}
        return {
            "fastserve": f"{more['fastserve']:+.0%}",
            "others": " to ".join(f"{others[name]:+.0%} (`{name}`)" for name in ends(others)),
            "share": f"{mine / jct:.4%} ({1e3 * mine:.2f} ms) of",
        }

    # Without its parts (6.3).

    def _ablated(self, name: str, model: str, rate: float, ease: float) -> list[SloCase]:
        return self.traces(Tuned(name), model, rate, ease=ease)

    def without(self, number: str, eased: str = "") -> str:
        """How the number changes without each part. eased: a number to show where targets can be
        met."""
        said = []
        for what, which, at, ease in (
            ("at 8/s", number, -1, 1.0),
            (f"TTFT x {EASE:g}", eased or number, LOADED, EASE),
        ):
            parts = []
            for name in ABLATIONS:
                changes = (self._change(which, name, m, at, ease) for m in self.scale.varied)
                parts.append(f"{fmean(changes):+.0%} without {_part(name)}")
            said.append(f"{what} {', '.join(parts)}")
        return "; ".join(said)

    def _change(self, number: str, name: str, model: str, at: int, ease: float) -> float:
        """Change of the number without the part, as a share. at: index in RATES."""
        whole, without = (
            self.mean(number, self._ablated(who, model, RATES[model][at], ease))
            for who in (ACCELGEN, name)
        )
        return without / whole - 1 if whole else 0.0

    def parts(self) -> str:
        """A figure."""
        shown = {
            f"{model}\n{_part(name)}": 100 * (1 + self._change("met", name, model, LOADED, EASE))
            for model in self.scale.varied
            for name in ABLATIONS
        }
        caption = "Requests within all targets without a part, of those with all, TTFT x 10"
        file = "accelgen-12-ablations.svg"
        return self.bars(file, caption, shown, "% of the whole", "{:.0f}")

    # More long prompts, and higher rates (6.4).

    def _books(self, name: str, model: str, books: float) -> list[SloCase]:
        return self.seeds(name, model, PAPERS_RATE, books=books)

    def by_books(self) -> str:
        """Goodput with the least and the most of it."""
        first, *_, last = self.scale.books

        def goodput(model: str, books: float) -> float:
            return self.mean("goodput", self._books(ACCELGEN, model, books))

        said = "; ".join(
            f"{model} from {goodput(model, first):.0f} to {goodput(model, last):.0f} tokens/s"
            for model in self.scale.varied
        )
        return f"{first:.0%} to {last:.0%} of BookCorpus: {said}"

    def goodputs(self, model: str) -> str:
        """AccelGen's goodput by rate."""
        found = (
            self.numbers_of("goodput", ACCELGEN, model, rate) for rate in self.scale.rates(model)
        )
        return f"{model} {', '.join(f'{value:.0f}' for value in found)}"

    # Each data set alone (6.5).

    def _alone(self, name: str, data: str) -> list[SloCase]:
        return self.seeds(name, self.scale.first, PAPERS_RATE, data=data)

    def alone_against(self) -> str:
        """AccelGen's goodput over that of the paper's other policies."""
        found = {
            f"`{name}`, {data}": times(
                self.mean("goodput", self._alone(ACCELGEN, data)),
                self.mean("goodput", self._alone(name, data)),
            )
            for name, data in product(PAPERS, ALONE)
        }
        return " to ".join(f"{found[who]:.2f}x ({who})" for who in ends(found))

    # Oracle (6.2): how much better a schedule could be, on cases small enough to search.

    def _searched(self, name: str, model: str, ease: float) -> list[SloCase]:
        rate = self.scale.rates(model)[-1 if len(self.scale.at) < 2 else 1]
        count = self.scale.searched
        if name == "oracle":
            chosen = Tuned(f"oracle:runs={self.scale.searches}:rule=papers")
            return self.traces(chosen, model, rate, requests=count, ease=ease)
        return self.seeds(name, model, rate, ease, requests=count)

    def gained(self, number: str) -> str:
        """How much more of the number the search reaches than AccelGen."""
        said = []
        for ease in self.scale.eases:
            changes = []
            for model in self.scale.models:
                both = (self._searched(name, model, ease) for name in (ACCELGEN, "oracle"))
                ours, best = (self.mean(number, cases) for cases in both)
                changes.append(f"{model} {best / ours - 1:+.0%}" if ours else model)
            said.append(f"TTFT x {ease:g}: {', '.join(changes)}")
        return "; ".join(said)


def times(ours: float, theirs: float) -> float:
    """Ours over theirs; inf if only theirs is 0, 1 if both are."""
    if theirs:
        return ours / theirs
    return math.inf if ours else 1.0


# How numbers are compared, and how that is said.
COMPARED: dict[str, tuple[Callable[[float, float], float], str]] = {
    "times": (times, "{:.2f}x"),
    "less": (lambda ours, theirs: times(theirs, ours), "{:.2f}x"),
    "points": (lambda ours, theirs: 100 * (ours - theirs), "{:+.1f} points"),
}


def _part(name: str) -> str:
    return name.removeprefix("accelgen_no")


def budget_of(place: Place, seconds: float) -> int:
    """The longest prompt, in tokens, that a step of at most `seconds` computes; at least 1."""
    sizes = np.arange(1, 1 << 14)
    return max(int(np.searchsorted(prefill_seconds(place, sizes), seconds, side="right")), 1)


def sampled(model: str) -> Workload:
    """A large sample of the model's requests."""
    return workload_of(SloCase("vllm", model, PAPERS_RATE, requests=SAMPLE))


def implied_output(place: Place, prompt: float) -> float:
    """The mean output, tokens, with which steps have the share of the pivot, beside the share of
    the cache, that the paper measures of Sarathi: with r requests in the cache a step has r decodes
    and, as long as as many come as go, r prompt / output tokens of prompts."""
    compute, cache = UTILISED[0] * place.pivot, UTILISED[1] * place.kv_tokens
    output = 1.0
    for _ in range(50):
        rows = cache / (prompt + output / 2)
        output = prompt * rows / (compute - rows)
    return output


def saturation(place: Place, most: int = 2048) -> int:
    """The fewest tokens of a step with nearly the best throughput of any step of up to `most`."""
    sizes = np.arange(1, most + 1)
    return int(sizes[flat_from(sizes, prefill_seconds(place, sizes))])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    return write_page(
        flags("accelgen", __doc__),
        argv,
        lambda args, known: AccelGen(
            QUICK if args.quick else Scale(), Results(run, lambda _: SloNumbers, known)
        ),
    )
