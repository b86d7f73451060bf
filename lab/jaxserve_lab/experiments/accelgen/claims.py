"""Makes docs/accelgen.md: what AccelGen claims, and what the simulator says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import product
from typing import Any, ClassVar

import numpy as np

from jaxserve_lab.experiments.accelgen.case import SloCase, run, workload_of
from jaxserve_lab.experiments.accelgen.places import (
    BLOCK,
    PLACES,
    budget_of,
    implied_output,
    prefill_seconds,
    saturation,
)
from jaxserve_lab.experiments.accelgen.requests import EXCLUSIVE
from jaxserve_lab.experiments.claims.claim import (
    CHANGE,
    FACTOR,
    LESS,
    POINTS,
    Claim,
    Form,
    Places,
    Point,
    places,
)
from jaxserve_lab.experiments.claims.page import ClaimsPage, Shown
from jaxserve_lab.experiments.common.page import table

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
MEASURED, MEASURED_ON = ("orca", "vllm", "fastgen", "sarathi"), ("OPT-13B", "OPT-175B")  # 3.2
SENSITIVE = (ACCELGEN, "sarathi", "vllm")  # Figure 13
ALONE = ("bookcorpus", "alpaca", "sharegpt")  # Figure 14
EXCLUSIVE_ON = "OPT-13B"
NOT_EXCLUSIVE = "accelgen:long=1000000"  # than which no prompt is longer
ORACLE = "oracle"
SAMPLE = 20_000  # requests, as the paper has them

# Which settings of a policy are tried: batches of so many tokens beside the paper's pivot, on a
# trace of a seed that is on no other part of the page.
BUDGETS, TRIAL = (128, 256, 512, 1024, 2048), 100
TRIED = {
    "sarathi": ("sarathi",),
    "fastgen": ("fastgen", "fastgen:watermark=0.3"),
    "edf": ("edf",),
    "infermax": ("infermax",),
    # As it is, with longer patience, and as the paper has it, on Orca.
    "fastserve": (
        "fastserve",
        "fastserve:patience=1000",
        "fastserve:patience=1000:max_rows=8:reserve=whole",
    ),
}

SHARE = Form(POINTS.how, "{:+.1f} points".format)
LONGER = Form(lambda ours, theirs: theirs / ours - 1, "{:+.0%}".format)
CLAIMS = (
    Claim("requests", "1.54x to 10x", "requests", ACCELGEN, "", "papers", FACTOR),
    Claim("goodput", "1.43x to 13.71x", "goodput", ACCELGEN, "", "papers", FACTOR),
    Claim("iterations", "37% to 90%", "iterations", ACCELGEN, "", "papers", SHARE),
    Claim("in_jct", "34% to 93%", "in_jct", ACCELGEN, "", "papers", SHARE),
    Claim("jct", "1.61x to 12.22x", "jct", ACCELGEN, "", "papers", LESS),
    Claim("compute", "31% to 63%", "compute", ACCELGEN, "", "papers", SHARE),
    Claim("cache", "7.4% to 13.2%", "cache", ACCELGEN, "", "papers", SHARE),
    Claim("alone", "1.41x to 33x", "goodput", ACCELGEN, "", "alone", FACTOR),
    Claim("fastest", "", "requests", ACCELGEN, OTHERS, "highest", FACTOR),
    Claim("ahead", "", "met", ACCELGEN, PAPERS, "reachable", FACTOR),
    Claim("ahead of edf", "", "met", ACCELGEN, "edf", "reachable", FACTOR),
    *(Claim(f"rate {at}", "", "met", ACCELGEN, OTHERS, f"rate {at}", FACTOR) for at in range(3)),
    *(
        Claim(f"{number}, {other}", "", number, ACCELGEN, other, "points", form)
        for other in OTHERS
        for number, form in {
            "goodput": FACTOR,
            "iterations": POINTS,
            "in_jct": POINTS,
            "jct": FACTOR,
        }.items()
    ),
    *(
        Claim(
            f"{number}, {other}, exclusive", "lower", number, ACCELGEN, other, "exclusive", CHANGE
        )
        for other in ("sarathi", "fastgen", NOT_EXCLUSIVE)
        for number in ("jct_long", "jct")
    ),
    Claim("plan of fastserve", "95%", "plan", ACCELGEN, "fastserve", "plans", LONGER),
    Claim("plan", "28% to 93%", "plan", ACCELGEN, "", "plans of others", LONGER),
    *(
        Claim(f"{number} without {name}, {where}", said, number, name, ACCELGEN, where, CHANGE)
        for number, row in {
            "requests": ("-97%", "-35%", "-61%"),
            "goodput": ("-44%", "-52%", "-27%"),
            "met": ("-44%", "-52%", "-27%"),
            "jct": ("+31%", "+17%", "+19%"),
        }.items()
        for name, said in zip(ABLATIONS, row, strict=True)
        for where in ("at 8/s", "loaded")
    ),
    *(
        Claim(
            f"{number}, TTFT x {ease:g}",
            said,
            number,
            ORACLE,
            ACCELGEN,
            f"searched, {ease:g}",
            CHANGE,
        )
        for number, said in (("met", "6%"), ("jct", "22%"))
        for ease in (1.0, EASE)
    ),
)


class Scale:
    """How much is run."""

    seeds = 3  # traces of each point
    requests = 100  # of a trace
    long_requests = 40  # of a trace with long outputs
    models: Sequence[str] = tuple(RATES)
    at: Sequence[int] = (0, 1, 2, 3)  # of RATES
    varied: Sequence[str] = ("OPT-13B", "Llama-3-70B")  # where more than policies and rates varies
    books: Sequence[float] = (0.0, 0.35, 0.7)  # shares of BookCorpus in Figure 13
    system_slos: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0)  # of Figure 5, seconds
    plans = 60  # requests of the traces whose plans are timed
    searched = 24  # requests of the traces whose best schedules are searched for
    searches = 200  # runs of each such search
    eases: Sequence[float] = (1.0, EASE)  # factors on the TTFTs there

    def rates(self, model: str) -> tuple[float, ...]:
        """The model's rates in requests/s, ascending."""
        return tuple(RATES[model][index] for index in self.at)

    @property
    def first(self) -> str:
        """The model for what is shown with one model only."""
        return self.models[0]


class Quick(Scale):
    """Toy sizes."""

    seeds, requests, long_requests, models, at = 2, 3, 3, ("OPT-13B",), (1, 3)
    varied, books, system_slos = ("OPT-13B",), (0.0, 0.35), (0.2, 1.0)
    plans, searched, searches = 3, 3, 2


class AccelGen(ClaimsPage):
    """What the template beside this asks for."""

    name, kind, run, sizes, claims = "accelgen", SloCase, run, (Scale, Quick), CLAIMS
    held = tuple(
        SloCase(policy, "Llama-13B", 1.0, budget=512, requests=12, ease=EASE)
        for policy in (*ALL, *ABLATIONS)
    )
    ease, trial_seed, as_printed, block = EASE, TRIAL, AS_PRINTED, BLOCK
    every, others, papers, ablations, measured = ALL, OTHERS, PAPERS, ABLATIONS, MEASURED
    with_printed = {ACCELGEN: ACCELGEN, AS_PRINTED: "accelgen, as printed"} | {n: n for n in OTHERS}
    met, goodput = Shown("met", "within all targets/s"), Shown("goodput", "tokens in time/s")
    iterations = Shown("iterations", "iterations in time, %", 100)
    in_jct, requests = Shown("in_jct", "jobs in time, %", 100), Shown("requests", "requests/s")
    exclusive = ("sarathi", "fastgen", NOT_EXCLUSIVE)
    also: ClassVar = {
        "measured": (ACCELGEN,),
        "one SLO": ("sarathi",),
        **{
            name: (ACCELGEN, *ABLATIONS, AS_PRINTED)
            for name in ("low", "at 8/s", "served", "loaded")
        },
        "books": SENSITIVE,
        "plans": ABLATIONS,
        "alone": ALL,
        "printed": ALL,
        **{f"searched, {ease:g}": ALL for ease in (1.0, EASE)},
    }

    def tried(self, policy: str, model: str, ease: float = 1.0) -> dict[tuple[str, int], SloCase]:
        """The runs that decide with which parameters and budget the policy runs. With the paper's
        TTFTs, which hardly any request meets, it has most tokens in time under load; with others
        most requests within all targets, at a rate that can be served."""
        rate = RATES[model][LOADED if ease == 1 else SERVED]
        budgets = (0,) if policy == "fastserve" else sorted({*BUDGETS, PLACES[model].pivot})
        return {
            (one, budget): SloCase(one, model, rate, budget, TRIAL, self.scale.requests, ease=ease)
            for one, budget in product(TRIED.get(policy, ()), budgets)
        }

    def best(self, policy: str, model: str, ease: float = 1.0) -> tuple[str, int] | None:
        """The parameters and the budget that it runs with; None until all have been tried."""
        number = "goodput" if ease == 1 else "met"
        tried = self.tried(policy, model, ease)
        found = {one: run[number] for one, case in tried.items() if (run := self.results.get(case))}
        if len(found) < len(tried):
            return None
        return max(found, key=found.__getitem__, default=(policy, 0))

    def cases(self, policy: str, model: str, rate: float, **more: Any) -> list[SloCase]:
        """The cases of a point, one a seed; none while the policy's best settings are not known.

        Args:
            policy: Its name.
            model: A name in PLACES.
            rate: Requests/s.
            **more: `pivot`: with the paper's budget. `slo`: with the budget that keeps steps that
                short. `seeds`: how many. Other fields of `SloCase`.
        """
        values: dict[str, Any] = {"requests": self.scale.requests, **more}
        seeds, slo = values.pop("seeds", self.scale.seeds), values.pop("slo", None)
        place, pivot = PLACES[model], values.pop("pivot", False)
        if slo is not None:
            chosen: tuple[str, int] | None = (policy, budget_of(place, slo))
        elif pivot:
            chosen = (policy, place.pivot if policy in ("fastgen", "sarathi") else 0)
        elif policy == ORACLE:
            chosen = (f"oracle:runs={self.scale.searches}:rule=papers", 0)
        else:
            chosen = self.best(policy, model, more.get("ease", 1.0))
        if chosen is None:
            return []
        return [SloCase(chosen[0], model, rate, chosen[1], n, **values) for n in range(seeds)]

    @cached_property
    def where(self) -> dict[str, Places]:
        """With longer TTFTs, targets can be met up to twice the rate that can be served."""
        scale, papers = self.scale, [PAPERS_RATE]
        models, first, varied = scale.models, [scale.first], scale.varied
        reachable = [number for number in scale.at if number <= LOADED]

        def at(numbers: Sequence[int], models: Sequence[str] = models, **more: Any) -> Places:
            """Points at these of RATES."""
            label = "{model}, {rate:g}/s" if len(numbers) > 1 else "{model}"
            rates = partial(_rates, numbers)
            return places(label, model=models, rate=rates, **more)

        measured: dict[str, Any] = {"rate": papers, "pivot": [True], "choices": [True]}
        planned: dict[str, Any] = {"rate": papers, "timed": [True], "seeds": [1]}
        return {
            "points": at(scale.at),
            "reachable": at(reachable, ease=[EASE]),
            **{f"rate {number}": at([number], ease=[EASE]) for number in reachable},
            **{model: at(scale.at, [model]) for model in models},
            "papers": places("`{theirs}`, {model}", model=models, theirs=PAPERS, rate=papers),
            "measured": places("{model}", model=self.measured_on, **measured, quantiles=[True]),
            "one SLO": places(
                "{slo:g} s", slo=scale.system_slos, model=first, rate=papers, choices=[True]
            ),
            "exclusive": places(
                "", model=[EXCLUSIVE_ON], rate=[math.inf], pivot=[True], data=[EXCLUSIVE]
            ),
            "plans": places("", model=first, requests=[scale.plans], **planned),
            "plans of others": places(
                "`{theirs}`",
                theirs=[name for name in OTHERS if name != "fastserve"],
                model=first,
                requests=[scale.plans],
                **planned,
            ),
            "low": at(scale.at[:1], varied),
            "at 8/s": at([-1], varied),
            "served": at([SERVED], varied, ease=[EASE]),
            "loaded": at([LOADED], varied, ease=[EASE]),
            "highest": at([-1]),
            "books": places("{model}, {books}", model=varied, books=scale.books, rate=papers),
            "alone": places(
                "`{theirs}`, {data}", theirs=PAPERS, data=ALONE, model=first, rate=papers
            ),
            "printed": places(
                "{rate}",
                rate=(0.1, PAPERS_RATE),
                model=first,
                requests=[scale.long_requests],
                printed=[True],
            ),
            **{
                f"searched, {ease:g}": at([scale.at[1]], requests=[scale.searched], ease=[ease])
                for ease in scale.eases
            },
        }

    def sample(self) -> dict[str, float]:
        """About the requests of the first model: mean lengths, the outputs that utilisation
        implies, and the share of TTFTs shorter than the prompt takes."""
        model = self.scale.first
        place, asked = PLACES[model], workload_of(SloCase("vllm", model, 8.0, requests=SAMPLE))
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

    @property
    def measured_on(self) -> list[str]:
        """The models to measure systems on as they are (section 3.2)."""
        return [model for model in MEASURED_ON if model in self.scale.models]

    def parts(self) -> str:
        """A figure of what is left without a part."""
        shown = {
            f"{model}\n{name.removeprefix('accelgen_no')}": 100 * (1 + change)
            for model in self.scale.varied
            for name in ABLATIONS
            for change in [self.of[f"met without {name}, loaded"].values.get(model, 0.0)]
        }
        caption = "Requests within all targets without a part, of those with all, TTFT x 10"
        file = "accelgen-12-ablations.svg"
        return self.bars(file, caption, shown, "% of the whole", "{:.0f}")


def _rates(numbers: Sequence[int], at: Point) -> list[float]:
    return [RATES[at["model"]][number] for number in numbers]
