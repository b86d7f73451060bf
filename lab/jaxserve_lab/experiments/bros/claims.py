"""Makes docs/bros.md: what BROS claims, and what the simulator says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import ClassVar

from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.bros.case import OUTPUT, PROMPT, MixedCase, run
from jaxserve_lab.experiments.claims.claim import Claim, Form, Places, Point, places
from jaxserve_lab.experiments.claims.page import SYSTEM, ClaimsPage, Shown, system_cells
from jaxserve_lab.experiments.common.page import table

MODELS = {
    "OPT-13B": "opt-13b@2xa100-40g",
    "OPT-30B": "opt-30b@4xa100-40g",
    "Llama-3-70B": "llama-3-70b@8xa100",
}
HIGHEST = {"OPT-13B": 10.0, "OPT-30B": 10.0, "Llama-3-70B": 15.0}  # requests/s
LABELS = {"sharegpt": "ShareGPT", "lmsys": "LMSYS"}
BROS, VLLM, RR = "bros", "vllm", "round_robin"
STATIC = ("priority", "edf")  # what real systems have: classes that never change
POLICIES = (BROS, RR, VLLM, *STATIC)
ALONE = "bros:sharing=false"
CLOSE = 0.02  # of attainment: a point at which a static class does as well
VARIED, RATE = "OPT-30B", 10.0  # where parameters of BROS are varied (section 7.4.1)
Switches = tuple[tuple[str, float | bool], ...]
LATE: Switches = (("late_watermark", 0.0), ("late_last", False))
PIECES: Switches = (("chunked", False), ("headroom", False), ("late_turn", 0))
OVERHEAD = {"OPT-13B": "9.12% to 9.52%", "OPT-30B": "7.56% to 8.42%"}  # of an iteration (7.4.2)
PARAMETERS = {
    "latency, s": ("latency", ".3f", 1.0),
    "TTFT, %": ("ttft", ".1f", 100.0),
    "TPOT, %": ("tpot", ".1f", 100.0),
    "P99 TBT, %": ("tbt", ".1f", 100.0),
    "best-effort, 1/s": ("best_effort", ".2f", 1.0),
}

CHANGE = Form(lambda ours, theirs: ours / theirs - 1, "{:+.1%}".format)
# Where nobody else ends any best-effort request, what we end counts as it is.
RELATIVE = Form(lambda ours, theirs: (ours - theirs) / (theirs or max(ours, 1.0)), "{:+.1%}".format)
DIFFERENCE = Form(lambda ours, theirs: ours - theirs, lambda value: f"{100 * value:+.1f}")
# In what a policy is as good as another: with the sign where more is better.
COUNTED = {"latency": (-1, RELATIVE), "best_effort": (1, RELATIVE)}
COUNTED |= {"ttft": (1, DIFFERENCE), "tbt": (1, DIFFERENCE)}

CLAIMS = (
    *(
        Claim(f"{number}, {other}, {data}", said, number, BROS, other, data, CHANGE)
        for (data, other), row in {
            # Normalised latency and best-effort throughput (section 7.2.1), attainment (7.2.2).
            ("sharegpt", VLLM): ("-74.2%", "-11.3%", "36.38x", "1.73x"),
            ("sharegpt", RR): ("-54.3%", "-8.8%", "11.75x", "1.47x"),
            ("lmsys", VLLM): ("-69.6%", "-17.7%", "21.42x", "2.62x"),
            ("lmsys", RR): ("-25.8%", "-15.2%", "14.23x", "2.28x"),
            **{(data, other): ("", "") for other in STATIC for data in LABELS},
        }.items()
        for number, said in zip(("latency", "best_effort", "ttft", "tpot"), row, strict=False)
    ),
    *(
        Claim(f"{number}, {other}", "", number, BROS, other, "all", form)
        for other in POLICIES[1:]
        for number, (_, form) in COUNTED.items()
    ),
    Claim("shared ttft", "1.23x", "ttft", BROS, ALONE, "shared"),
    Claim("shared tpot", "1.63x", "tpot", BROS, ALONE, "shared"),
    Claim("first ttft", "", "ttft", BROS, VLLM, "first", DIFFERENCE),
    Claim("first best_effort", "", "best_effort", BROS, "priority", "first", DIFFERENCE),
)


class Scale:
    """How much is run."""

    seeds: Sequence[int] = (3, 1)  # traces of each point, by data set
    duration = 600.0  # of a trace, seconds
    batch = 256  # best-effort requests submitted at a time
    batches: Sequence[int] = (64, 1024)  # other sizes of it to try
    models: Sequence[str] = tuple(MODELS)
    data_sets: Sequence[str] = tuple(LABELS)
    steps: Sequence[float] = (0.4, 0.7, 1.0)  # rates as shares of HIGHEST
    ages: Sequence[float] = (60.0, 15.0)  # `max_age` of BROS, seconds
    floors: Sequence[float] = (50.0, 150.0)  # `floor` of BROS, tokens/s

    def rates(self, model: str) -> tuple[float, ...]:
        """The model's rates in requests/s, ascending."""
        return tuple(round(step * HIGHEST[model], 2) for step in self.steps)


class Quick(Scale):
    """Toy sizes."""

    seeds, duration, batch, batches, models = (2,), 4.0, 4, (8,), ("OPT-13B",)
    data_sets, steps, ages, floors = ("sharegpt",), (1.0,), (2.0,), (50.0,)


class Bros(ClaimsPage):
    """What the template beside this asks for."""

    name, kind, run, sizes, claims = "bros", MixedCase, run, (Scale, Quick), CLAIMS
    called: ClassVar = LABELS
    held = tuple(
        MixedCase(policy, MODELS["OPT-13B"], "sharegpt", 10.0, duration=30.0, batch=64)
        for policy in POLICIES
    )
    static, others, close, compared, overhead = STATIC, POLICIES[1:], CLOSE, (VLLM, RR), OVERHEAD
    policies, counted = POLICIES, tuple(COUNTED)
    latency = Shown("latency", "normalised latency, s")
    best_effort = Shown("best_effort", "best-effort, requests/s")
    ttft, tpot = Shown("ttft", "TTFT attained, %", 100), Shown("tpot", "TPOT attained, %", 100)

    def cases(
        self, policy: str, model: str, data: str, rate: float, switches: Switches = ()
    ) -> list[MixedCase]:
        """The cases of a point. Plans are timed where Figure 14 has them.

        Args:
            policy: Its name.
            model: A name in MODELS.
            data: The data set.
            rate: Requests/s.
            switches: Parameters of the policy.
        """
        scale = self.scale
        if policy == ALONE:
            policy, switches = BROS, (("sharing", False),)
        timed = data == "sharegpt" and model.startswith("OPT") and not switches
        case = MixedCase(policy, MODELS[model], data, rate, 0, scale.duration, scale.batch)
        return [
            dataclasses.replace(case, seed=seed, switches=switches, timed=timed)
            for seed in range(scale.seeds[scale.data_sets.index(data)])
        ]

    @cached_property
    def where(self) -> dict[str, Places]:
        """All points, those of each data set, and others."""
        scale = self.scale

        def at(data: Sequence[str], models: Sequence[str]) -> Places:
            return places(
                "{model}, {data}, {rate}",
                data=data,
                model=models,
                rate=lambda at: scale.rates(at["model"]),
            )

        return {
            "all": at(scale.data_sets, scale.models),
            **{data: at([data], scale.models) for data in scale.data_sets},
            "first": at(scale.data_sets, scale.models[:1]),  # whose runs are the shortest
            **{model: at(["sharegpt"], [model]) for model in scale.models},
            "shared": places(
                "{data}", LABELS, data=scale.data_sets, model=[self.varied], rate=[self._rate]
            ),
        }

    @property
    def tokens(self) -> int:
        """Tokens that a batch of best-effort requests has at its end on average, to the
        thousand."""
        one = (PROMPT.low + PROMPT.high + OUTPUT.low + OUTPUT.high) / 2
        return round(self.scale.batch * one / 1000) * 1000

    def systems(self) -> str:
        """A table with a line per model."""
        rows = []
        for name in self.scale.models:
            model = system(MODELS[name]).cost_model
            host = 1e6 * model.num_layers * 2 * model.coefficients.swapped_slot
            rates = ", ".join(f"{rate:g}" for rate in self.scale.rates(name))
            rows.append([name, *system_cells(MODELS[name]), f"{host:.1f}", rates])
        return table(["", *SYSTEM, "of a token to the host, us", "rates, 1/s"], rows)

    def as_good(self, policy: str, other: str) -> int:
        """Number of points at which the policy is as good as the other in every number of
        COUNTED."""

        def gains(at: Point) -> Iterator[float]:
            for number, (sign, form) in COUNTED.items():
                yield sign * form.how(*(self.value(number, p, at) for p in (policy, other)))

        return sum(min(gains(at)) >= -CLOSE for at in self.where["all"].values())

    # BROS with parameters.

    @property
    def varied(self) -> str:
        """The model on which parameters of BROS are varied."""
        return VARIED if VARIED in self.scale.models else self.scale.models[0]

    @property
    def _rate(self) -> float:
        return min(RATE, self.scale.rates(self.varied)[-1])

    def parameters(self) -> str:
        """A table of BROS with each parameter, at the highest rate, which leaves little for best
        effort."""
        scale, model, data = self.scale, self.varied, self.scale.data_sets[0]
        rate = scale.rates(model)[-1]
        shares = (("max_age", scale.ages), ("floor", scale.floors))
        variants: list[Switches] = [(), (("sharing", False),)]
        variants += [((name, value),) for name, values in shares for value in values]
        variants += [(one,) for one in LATE]
        rows = [
            [_name(one), *self.cells(self.cases(BROS, model, data, rate, one), PARAMETERS.values())]
            for one in variants
        ]
        return table([f"{LABELS[data]}, {model}, {rate:g}/s", *PARAMETERS], rows)

    def kept(self) -> Iterator[MixedCase]:
        """Overload and prompts in pieces at other points, and batches of other sizes."""
        scale, data = self.scale, self.scale.data_sets[0]
        tried = [
            (model, rate, LATE) for model in scale.models for rate in scale.rates(model)[:-3:-1]
        ]
        largest = scale.models[-1]  # whose prompts take longest
        tried += [(largest, rate, PIECES) for rate in scale.rates(largest)[:2]]
        for model, rate, switches in tried:
            for one in switches:
                yield from self.cases(BROS, model, data, rate, (one,))
        rates = scale.rates(scale.models[0])
        for size, policy in product(scale.batches, POLICIES):
            for case in self.cases(policy, scale.models[0], data, rates[len(rates) // 2]):
                yield dataclasses.replace(case, batch=size)


def _name(switches: Switches) -> str:
    """Of BROS with these."""
    parts = (
        f":{name}={str(value).lower() if isinstance(value, bool) else format(value, 'g')}"
        for name, value in switches
    )
    return f"`bros{''.join(parts)}`"
