"""Makes docs/bros.md: what BROS claims, and what the simulator says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean

from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.bros.case import OUTPUT, PROMPT, MixedCase, MixedNumbers, run
from jaxserve_lab.experiments.common import page
from jaxserve_lab.experiments.common.figures import panel
from jaxserve_lab.experiments.common.runs import Results

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
CLOSE = 0.02  # of attainment: a point at which a static class does as well

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
OVERHEAD = {"OPT-13B": (9.12, 9.52), "OPT-30B": (7.56, 8.42)}  # percent of an iteration
# Number: its sign where more is better, and whether it counts relative to the other's.
COUNTED = {"latency": (-1, True), "best_effort": (1, True), "ttft": (1, False), "tbt": (1, False)}
VARIED, RATE = "OPT-30B", 10.0  # where parameters of BROS are varied (section 7.4.1)
COLUMNS: tuple[page.Column, ...] = (
    ("latency, s", "latency", ".3f", 1.0),
    ("TTFT, %", "ttft", ".1f", 100.0),
    ("TPOT, %", "tpot", ".1f", 100.0),
    ("P99 TBT, %", "tbt", ".1f", 100.0),
    ("best-effort, 1/s", "best_effort", ".2f", 1.0),
)
Point = tuple[str, str, float]  # model, data set and rate
Switch = tuple[str, float | bool]
Switches = tuple[Switch, ...]
LATE: Switches = (("late_watermark", 0.0), ("late_last", False))
PIECES: Switches = (("chunked", False), ("headroom", False), ("late_turn", 0))


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        seeds: Traces of each point, by data set.
        duration: Of a trace, seconds.
        batch: Best-effort requests submitted at a time.
        batches: Other sizes of it to try.
        models: Names in MODELS.
        data_sets: Names in LABELS.
        steps: Rates as shares of HIGHEST.
        ages: Values of the parameter `max_age` of BROS, seconds.
        floors: Values of the parameter `floor` of BROS, tokens/s.
    """

    seeds: tuple[int, ...] = (3, 1)
    duration: float = 600.0
    batch: int = 256
    batches: tuple[int, ...] = (64, 1024)
    models: tuple[str, ...] = tuple(MODELS)
    data_sets: tuple[str, ...] = tuple(LABELS)
    steps: tuple[float, ...] = (0.4, 0.7, 1.0)
    ages: tuple[float, ...] = (60.0, 15.0)
    floors: tuple[float, ...] = (50.0, 150.0)

    def rates(self, model: str) -> tuple[float, ...]:
        """The model's rates in requests/s, ascending."""
        return tuple(round(step * HIGHEST[model], 2) for step in self.steps)


QUICK = Scale((2,), 4.0, 4, (8,), ("OPT-13B",), ("sharegpt",), (1.0,), (2.0,), (50.0,))


class Bros(page.Page[MixedCase, MixedNumbers]):
    """What the template beside this asks for."""

    name, kind = "bros", MixedCase
    scale: Scale
    held = tuple(
        MixedCase(policy, MODELS["OPT-13B"], "sharegpt", 10.0, duration=30.0, batch=64)
        for policy in POLICIES
    )
    labels, static, close = LABELS, STATIC, CLOSE
    compared = (VLLM, RR)

    @cached_property
    def points(self) -> list[Point]:
        """All points, panel by panel."""
        scale = self.scale
        return [
            (model, data, rate)
            for data in scale.data_sets
            for model in scale.models
            for rate in scale.rates(model)
        ]

    def seeds(
        self, policy: str, model: str, data: str, rate: float, switches: Switches = ()
    ) -> list[MixedCase]:
        """The cases of a point, one a seed. Plans are timed where Figure 14 has them.

        Args:
            policy: Its name.
            model: A name in MODELS.
            data: The data set.
            rate: Requests/s.
            switches: Parameters of the policy.
        """
        scale = self.scale
        timed = data == "sharegpt" and model.startswith("OPT") and not switches
        case = MixedCase(policy, MODELS[model], data, rate, 0, scale.duration, scale.batch)
        return [
            dataclasses.replace(case, seed=seed, switches=switches, timed=timed)
            for seed in range(scale.seeds[scale.data_sets.index(data)])
        ]

    def at(self, number: str, policy: str, point: Point) -> float:
        """Mean of a number of the policy at the point."""
        return self.mean(number, self.seeds(policy, *point))

    # Introduction.

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
            rows.append([name, *page.system_cells(MODELS[name]), f"{host:.1f}", rates])
        return page.table(["", *page.SYSTEM, "of a token to the host, us", "rates, 1/s"], rows)

    # In short: whether BROS is better, and than what.

    def verdict(self) -> str:
        """A table: BROS against each other policy, over all points."""
        rows = []
        for other in POLICIES[1:]:
            gains = [self._gains(BROS, other, point) for point in self.points]
            means = (sign * fmean(g[name] for g in gains) for name, (sign, _) in COUNTED.items())
            counts = (self.as_good(BROS, other), self.as_good(other, BROS))
            texts = (f"{100 * mean:+.1f}" for mean in means)
            rows.append([f"`{other}`", *texts, *map(str, counts)])
        header = ["`bros` against", "latency, %", "best-effort, %", "TTFT, points"]
        header += ["P99 TBT, points", "as good as it at", "it as good as `bros` at"]
        return page.table(header, rows)

    def as_good(self, policy: str, other: str) -> int:
        """Number of points at which the policy is as good as the other in every number of
        COUNTED."""
        gains = (self._gains(policy, other, point) for point in self.points)
        return sum(min(one.values()) >= -CLOSE for one in gains)

    def most_by_itself(self, number: str, other: str) -> str:
        """The command that gives the point of the first model, whose runs are the shortest, where
        BROS's number is furthest from the other's."""
        points = [point for point in self.points if point[0] == self.scale.models[0]]
        point = max(points, key=lambda p: abs(self.at(number, BROS, p) - self.at(number, other, p)))
        return self.by_itself(number, *(self.seeds(one, *point)[0] for one in (BROS, other)))

    def _gains(self, policy: str, other: str, point: Point) -> dict[str, float]:
        """How much better the policy is at the point, by number: as a share of the other's value,
        or as a difference (COUNTED)."""
        found = {}
        for name, (sign, relative) in COUNTED.items():
            mine, theirs = (self.at(name, p, point) for p in (policy, other))
            unit = (theirs or max(mine, 1.0)) if relative else 1.0
            found[name] = sign * (mine - theirs) / unit
        return found

    # All policies at all points.

    def traded(self, data: str, other: str) -> str:
        """The paper's and our cells of a claim (section 7.2.1)."""
        latency, less = TRADED[data, other]
        claim = f"{LABELS[data]}: {latency:.1f}% latency for {less:.1f}% throughput"
        return f"{claim} against `{other}` | {self.changes(data, other)}"

    def changes(self, data: str, other: str) -> str:
        """Mean change of latency and throughput from the other policy to BROS, over the data set's
        points. Points where the other has none are left out."""
        said = []
        for number, what in (("latency", "latency"), ("best_effort", "throughput")):
            points = [point for point in self.points if point[1] == data]
            both = [[self.at(number, p, point) for p in (BROS, other)] for point in points]
            change = fmean([ours / theirs - 1 for ours, theirs in both if theirs] or [0.0])
            said.append(f"{100 * change:+.1f}% {what}")
        return ", ".join(said)

    def attained(self, data: str, other: str) -> str:
        """The paper's and our cells of a claim (section 7.2.2)."""
        ttft, tpot = ATTAINED[data, other]
        ours = []
        for name in ("ttft", "tpot"):
            mine, theirs = (
                fmean(self.at(name, policy, point) for point in self.points if point[1] == data)
                for policy in (BROS, other)
            )
            ours.append(_times(name, mine, theirs))
        claim = f"{LABELS[data]}: {ttft:g}x TTFT and {tpot:g}x TPOT of `{other}`"
        return f"{claim} | {', '.join(ours)}"

    def ahead(self, number: str, other: str, sign: int = 1, slack: float = 0.0) -> int:
        """Number of points at which the other policy is at least as good as BROS.

        Args:
            number: A field of `MixedNumbers`.
            other: The other policy.
            sign: 1 if more is better, else -1.
            slack: How much worse it may be.
        """
        return sum(sign * gap >= -slack for gap in self.gaps(number, other))

    def gaps(self, number: str, other: str) -> list[float]:
        """The other policy's number less that of BROS, point by point."""
        return [self.at(number, other, p) - self.at(number, BROS, p) for p in self.points]

    def by_rate(self, file: str, caption: str, *numbers: tuple[str, str, float]) -> str:
        """A figure: numbers against the rate, with a row for each data set and number, a column a
        model."""
        panels = [
            [
                panel(
                    f"{LABELS[data]}, {model}",
                    label,
                    POLICIES,
                    self.scale.rates(model),
                    lambda policy, rate, number=number, factor=factor, at=(model, data): (
                        factor * self.at(number, policy, (*at, rate))
                    ),
                )
                for model in self.scale.models
            ]
            for data in self.scale.data_sets
            for number, label, factor in numbers
        ]
        return self.chart(file, caption, panels, "real-time requests/s", log_x=False)

    # BROS with parameters.

    @property
    def varied(self) -> str:
        """The model on which parameters of BROS are varied."""
        return VARIED if VARIED in self.scale.models else self.scale.models[0]

    def _sharing(self) -> list[Point]:
        rate = min(RATE, self.scale.rates(self.varied)[-1])
        return [(self.varied, data, rate) for data in self.scale.data_sets]

    def shared(self) -> str:
        """What sharing brings (section 7.4.1)."""
        ours = []
        for point in self._sharing():
            said = [LABELS[point[1]]]
            for name in ("ttft", "tpot"):
                both = (self.seeds(BROS, *point, one) for one in ((), (("sharing", False),)))
                said.append(_times(name, *(self.mean(name, cases) for cases in both)))
            ours.append(", ".join(said))
        return "; ".join(ours)

    def shared_by_itself(self) -> str:
        """The command that gives what sharing brings at the first point."""
        point = next(iter(self._sharing()))
        both = (self.seeds(BROS, *point, one)[0] for one in ((), (("sharing", False),)))
        return self.by_itself("ttft", *both)

    def parameters(self) -> str:
        """A table of BROS with each parameter, at the highest rate, which leaves little for best
        effort."""
        model, data = self.varied, self.scale.data_sets[0]
        point = (model, data, self.scale.rates(model)[-1])
        variants = [(), *((one,) for one in (("sharing", False), *self._shares(), *LATE))]
        rows = [([_name(one)], self.seeds(BROS, *point, one)) for one in variants]
        return self.lines([f"{LABELS[data]}, {model}, {point[2]:g}/s"], rows, COLUMNS)

    def _shares(self) -> list[Switch]:
        ages = [("max_age", age) for age in self.scale.ages]
        return [*ages, *(("floor", floor) for floor in self.scale.floors)]

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
                yield from self.seeds(BROS, model, data, rate, (one,))
        rates = scale.rates(scale.models[0])
        for size, policy in product(scale.batches, POLICIES):
            for case in self.seeds(policy, scale.models[0], data, rates[len(rates) // 2]):
                yield dataclasses.replace(case, batch=size)

    # The time of a plan.

    def planned(self) -> list[str]:
        """The paper's and our cells of claims (section 7.4.2)."""
        claims = []
        for model, (least, most) in OVERHEAD.items():
            points = [p for p in self.points if p[0] == model and p[1] == "sharegpt"]
            if points:
                mine = page.span([self.at("plan", BROS, point) for point in points], "{:.2%}")
                claims.append(f"{least}% to {most}% with {model} | {mine}")
        return claims


def _name(switches: Switches) -> str:
    """Of BROS with these."""
    parts = (
        f":{name}={str(value).lower() if isinstance(value, bool) else format(value, 'g')}"
        for name, value in switches
    )
    return f"`bros{''.join(parts)}`"


def _times(name: str, mine: float, theirs: float) -> str:
    """By what factor a share is more."""
    times = f"{mine / theirs:.2f}x" if theirs else "more"
    return f"{name.upper()} {times} ({mine:.1%} for {theirs:.1%})"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    return page.write_page(
        page.flags("bros", __doc__),
        argv,
        lambda args, known: Bros(
            QUICK if args.quick else Scale(), Results(run, lambda _: MixedNumbers, known)
        ),
    )
