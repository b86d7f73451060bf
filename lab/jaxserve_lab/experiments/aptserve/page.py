"""Makes docs/aptserve.md: what Apt-Serve (SIGMOD 2025) claims, and what the simulator says.

    python -m jaxserve_lab.experiments.aptserve --measure=steps,load

--measure runs the engine itself on this machine, which should have nothing else to do: `steps`
times decode steps by cache, `load` serves, for about a quarter of an hour in all; what is not asked
for is shown as it was measured last.
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.model_shapes import MODELS as SHAPES
from jaxserve.simulator.capacity import COARSE, Crossing, crossing, mean, ratio
from jaxserve.simulator.systems.systems import system as system_of
from jaxserve_lab.bench import planning_time
from jaxserve_lab.experiments.aptserve import load, measured, steps
from jaxserve_lab.experiments.aptserve.case import (
    OnlineCase,
    OnlineNumbers,
    place_of,
    run,
    workload_of,
)
from jaxserve_lab.experiments.common import page
from jaxserve_lab.experiments.common.figures import Panel, panel
from jaxserve_lab.experiments.common.runs import Results

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
KV, FCFS, FCFS_ABSORBED = "aptserve_kv", "aptserve_fcfs", "aptserve_fcfs, absorbed"
CHUNKED = "aptserve_s"
ONE = "13B"  # the model where there is one
BATCH = 50  # decodes, whose step the paper times

EFFECTIVE = (*BASELINES, PROJECTED)  # Figure 8
BEYOND = ("vllm", KV, PROJECTED, ABSORBED)
RATIOS = {
    # level, baseline: mean and peak of the ratios
    (0.9, "vllm"): (2.3, 4.0),
    (0.9, "sarathi"): (1.9, 3.4),
    (0.9, "fastgen"): (1.8, 3.3),
    (0.6, "vllm"): (4.9, 8.8),
    (0.6, "sarathi"): (4.4, 7.9),
    (0.6, "fastgen"): (4.3, 7.5),
}

BURST_RATES = {"sharegpt": 3.8, "humaneval": 9.0, "longbench": 1.5}
BURSTY = ("vllm", "sarathi", PROJECTED, ABSORBED)  # Figure 9
ABLATED = (KV, PROJECTED, ABSORBED, FCFS, FCFS_ABSORBED)
TABLES = {
    # data set, rate, CV: Table 4's K and V only, the hybrid cache, and Table 5's FCFS, percent
    ("sharegpt", 3.0, 1): (99.5, 99.5, 26.4),
    ("sharegpt", 3.0, 5): (94.7, 95.9, 59.7),
    ("sharegpt", 3.0, 10): (75.1, 78.2, 11.9),
    ("sharegpt", 6.0, 1): (65.7, 67.3, 20.0),
    ("sharegpt", 6.0, 5): (66.7, 67.7, 18.1),
    ("sharegpt", 6.0, 10): (57.1, 58.4, 9.9),
    ("longbench", 1.5, 1): (96.6, 98.2, 11.8),
    ("longbench", 1.5, 5): (70.0, 76.0, 10.8),
    ("longbench", 1.5, 10): (43.4, 50.8, 5.4),
    ("longbench", 3.0, 1): (70.0, 77.6, 4.8),
    ("longbench", 3.0, 5): (58.8, 64.8, 4.6),
    ("longbench", 3.0, 10): (35.6, 42.5, 4.2),
}
PENALTIES = ("step", "redecide", "remaining")

LATENCY_RATES = {"sharegpt": 6.0, "humaneval": 9.0, "longbench": 2.0}  # Figure 10
DECAY = 0.4
DECAYED = f"aptserve, decay {DECAY:g}"
SWITCHES: dict[str, tuple[tuple[str, float], ...]] = {
    FCFS: (),
    PROJECTED: (),
    DECAYED: (("slo_decay", DECAY),),
}
READS = {"projected": "", "absorbed": ", absorbed"}

LONG = {
    # Figure 12. Data set: GPUs, rates
    "wikitext": (1, (1.0, 2.0, 4.0, 8.0)),
    "arxiv": (2, (0.5, 1.0, 2.0, 4.0)),
    "bookcorpus": (4, (0.25, 0.5, 1.0, 2.0)),
}
LONG_MODELS = ("llama-3-8b", "yi-6b")
LONG_SYSTEMS = ("vllm", "aptserve")
LONG_SLO = (10.0, 1.0)
LONG_C = 32768

PLAN_MS = {50: 0.3, 100: 0.5, 200: 1.0, 400: 2.1, 800: 4.8, 1600: 10.8}  # Table 6, by candidates
TIMES = "aptserve_plan.json"
Times = dict[str, dict[str, float]]  # situation: candidates: milliseconds


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        requests: Of a trace.
        long_requests: Of a trace of Figure 12.
        models: Names in MODELS.
        data_sets: Names in LABELS.
        levels: Attainments at which rates are compared.
        cvs: Of the arrivals in Figure 9.
        costs: Factors on the cost of hidden tokens.
        candidates: Requests to choose from in the plans that are timed.
        plan_repeats: Plans that a median is taken over.
    """

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


class AptServe(page.Page[OnlineCase, OnlineNumbers]):
    """What the template beside this asks for.

    Args:
        scale: how much is run.
        results: of the runs.
        figures: the folder of figures, where measurements are kept too.
        earlier: the same of an earlier run, if there was one.
    """

    name, kind = "aptserve", OnlineCase
    held = tuple(
        OnlineCase(policy, MODELS[ONE], "sharegpt", 9.0, 1.0, 1.0, requests=150, hidden_read=read)
        for policy, read in (
            *((policy, "auto") for policy in (*BASELINES, KV, FCFS)),
            *product((PROJECTED, CHUNKED), READS),
        )
    )
    scale: Scale
    labels, baselines, ratios_there = LABELS, BASELINES, RATIOS
    kv, projected, absorbed, fcfs, fcfs_absorbed = KV, PROJECTED, ABSORBED, FCFS, FCFS_ABSORBED
    effective, beyond, bursty = EFFECTIVE, BEYOND, BURSTY
    decayed, decay, plan_there = DECAYED, DECAY, PLAN_MS
    step_command, load_command = steps.COMMAND, load.COMMAND

    def __init__(
        self,
        scale: Scale,
        results: Results[OnlineCase, OnlineNumbers],
        figures: Path,
        earlier: Path | None = None,
    ) -> None:
        super().__init__(scale, results)
        self._figures, self._earlier = figures, earlier

    def case(self, system: str, model: str, data: str, rate: float, **more: object) -> OnlineCase:
        """A trace of the main setting.

        Args:
            system: A policy, or ABSORBED. `aptserve`s read hidden caches projected unless it says
                so.
            model: A name in MODELS.
            data: The data set.
            rate: Requests/s.
            **more: Other fields of `OnlineCase`.
        """
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

    def kept(self) -> Iterator[OnlineCase]:
        """What a hidden token may cost, and what a hidden cache may be charged."""
        for data, rate in self.poisson:
            for cost in self.scale.costs:
                yield self.case(PROJECTED, ONE, data, rate, hidden_cost=cost)
            for system, penalty in product((PROJECTED, ABSORBED), PENALTIES):
                yield self.case(system, ONE, data, rate, switches=(("penalty", penalty),))

    def numbers_of(self, system: str, data: str, rate: float, **more: object) -> OnlineNumbers:
        """The numbers of such a trace of the model ONE."""
        return self.results[self.case(system, ONE, data, rate, **more)]

    def systems(self) -> str:
        """A table with a line per system."""
        rows = []
        for name in self.scale.models:
            rhos = [system_of(MODELS[name], read).rho or 0.0 for read in READS]
            rows.append([*page.system_cells(MODELS[name]), *(f"{1e6 * rho:.2f}" for rho in rhos)])
        return page.table([*page.SYSTEM, "rho projected, us", "rho absorbed, us"], rows)

    # Attainment against rate, each system's rates found by a search.

    @property
    def panels(self) -> list[tuple[str, str]]:
        """Models and data sets, row by row."""
        return [(model, data) for data in self.scale.data_sets for model in self.scale.models]

    def attainments(self, system: str, model: str, data: str) -> dict[float, float]:
        """Shares of the requests within both targets by rate, requests/s, ascending."""

        def attain(index: int) -> float | None:
            found = self.results.get(self.case(system, model, data, COARSE.rate(index)))
            return None if found is None else found.attainment

        ahead = 0 if system in BASELINES else AHEAD[data]
        start = START[data] - LARGER[model] + ahead
        found, _ = COARSE.tried(attain, start, self.scale.levels)
        return {COARSE.rate(index): found[index] for index in sorted(found)}

    def sustained(self, system: str, model: str, data: str, level: float) -> Crossing:
        """The rate up to which attainment stays at a level or above, or a bound on it.

        Args:
            system, model, data: As in `case`.
            level: A share of the requests.

        Returns:
            Requests/s; nan while nothing is known.
        """
        found = self.attainments(system, model, data)
        return crossing(found, level) if found else Crossing(float("nan"))

    def ratios(self, level: float, above: str, below: str, data: str = "") -> dict[str, Crossing]:
        """The rate that one system sustains over the rate that another does, by panel.

        Args:
            level: Attainment to sustain.
            above, below: The two systems.
            data: Only the panels of this data set; "" for all.
        """
        return {
            f"{LABELS[of]}, {model}": ratio(
                self.sustained(above, model, of, level), self.sustained(below, model, of, level)
            )
            for model, of in self.panels
            if data in ("", of)
        }

    def mean_ratio(self, level: float, above: str, below: str, data: str = "") -> str:
        """The mean of the ratios. See `ratios`."""
        return mean(list(self.ratios(level, above, below, data).values())).times()

    def spread(self, level: float, above: str, below: str) -> str:
        """The mean of `ratios`, and where the largest and the smallest are."""
        found = self.ratios(level, above, below)
        where = page.ends({key: one.rate for key, one in found.items()})
        said = " to ".join(f"{found[key].times()} ({key})" for key in where)
        return f"{self.mean_ratio(level, above, below)} on average, {said}"

    def by_rate(self, file: str, caption: str, systems: Sequence[str]) -> str:
        """Figure 8, nine panels of these systems: a row per data set, a column per model."""
        panels = [
            [self._panel(model, data, systems) for model in self.scale.models]
            for data in self.scale.data_sets
        ]
        return self.chart(file, caption, panels, "requests/s", dpi=95)

    def _panel(self, model: str, data: str, systems: Sequence[str]) -> Panel:
        lines = {}
        for system in systems:
            points = self.attainments(system, model, data)
            lines[system] = (list(points), list(points.values()))
        return Panel(f"{LABELS[data]}, {model}", "SLO attainment", lines)

    def vllm(self) -> str:
        """The rate that vLLM sustains with the first model on ShareGPT, the only one that the paper
        prints."""
        return " and ".join(
            f"{self.sustained('vllm', self.scale.models[0], 'sharegpt', level)}/s at {level:.0%}"
            for level in self.scale.levels
        )

    def decode_ms(self) -> float:
        """Milliseconds of the one step that the paper times."""
        place = system_of(MODELS[self.scale.models[0]])
        full = BatchFeatures(BATCH, BATCH, place.kv_tokens, BATCH, 0, 0, 0)
        return 1e3 * float(place.cost_model.batch_time(full))

    # Bursts (6.4).

    @property
    def _bursts(self) -> list[tuple[str, float]]:
        return [(data, cv) for data in self.scale.data_sets for cv in self.scale.cvs]

    def burst(self, system: str, data: str, cv: float) -> float:
        """Attainment. cv: of the gaps between arrivals, standard deviation over mean; 1 is
        Poisson."""
        return self.numbers_of(system, data, BURST_RATES[data], cv=cv).attainment

    def falls(self, system: str) -> int:
        """In how many data sets the system attains less at the largest CV than at the smallest."""
        first, last = self.scale.cvs[0], self.scale.cvs[-1]
        sets = self.scale.data_sets
        return sum(self.burst(system, d, last) <= self.burst(system, d, first) for d in sets)

    def no_worse(self, system: str) -> str:
        """In how many settings the system is no worse than the baselines."""
        good = sum(
            self.burst(system, *at) >= max(self.burst(below, *at) for below in BURSTY[:2])
            for at in self._bursts
        )
        return f"{good} of {len(self._bursts)} settings"

    def most(self, system: str) -> str:
        """The largest factor over a baseline; one that attains nothing counts as 1e-9."""
        found = {}
        for (data, cv), below in product(self._bursts, BURSTY[:2]):
            theirs = max(self.burst(below, data, cv), 1e-9)
            found[f"{LABELS[data]}, CV {cv:g}, `{below}`"] = self.burst(system, data, cv) / theirs
        return page.Extreme.of_values(found).times()

    def by_burst(self) -> str:
        """A figure."""
        panels = [
            panel(
                f"{LABELS[data]}, {BURST_RATES[data]:g}/s",
                "SLO attainment",
                BURSTY,
                self.scale.cvs,
                lambda system, cv, data=data: self.burst(system, data, cv),
            )
            for data in self.scale.data_sets
        ]
        caption = "Attainment against the burstiness of arrivals"
        x_label = "CV of the gaps between arrivals"
        return self.chart("aptserve-9-bursts.png", caption, [panels], x_label)

    # The hybrid cache and the schedule, apart.

    @property
    def settings(self) -> list[tuple[str, float, int]]:
        """Data sets, rates in requests/s and CVs of the paper's tables, as far as the scale has
        them."""
        return [
            (data, rate, cv)
            for data, rate, cv in TABLES
            if data in self.scale.data_sets and (cv == 1 or len(self.scale.cvs) > 1)
        ]

    @property
    def poisson(self) -> list[tuple[str, float]]:
        """The settings with a CV of 1."""
        return [(data, rate) for data, rate, cv in self.settings if cv == 1]

    def points(self, above: str, below: str) -> str:
        """By how many points `above` attains more than `below`."""
        found = {}
        for data, rate, cv in self.settings:
            ours, theirs = (
                self.numbers_of(s, data, rate, cv=cv).attainment for s in (above, below)
            )
            found[f"{LABELS[data]}, {rate:g}/s, CV {cv}"] = 100 * (ours - theirs)
        said = " to ".join(f"{found[where]:+.1f} ({where})" for where in page.ends(found))
        better = sum(value > 0 for value in found.values())
        return f"{said} points; better in {better} of {len(found)}"

    def most_by_itself(self, above: str, below: str) -> str:
        """The command that gives the setting where `above` attains most more than `below`."""
        found = {
            (data, rate, cv): [self.case(one, ONE, data, rate, cv=cv) for one in (above, below)]
            for data, rate, cv in self.settings
        }
        gains = {
            at: float.__sub__(*(self.results[case].attainment for case in cases))
            for at, cases in found.items()
        }
        return self.by_itself("attainment", *found[max(gains, key=gains.__getitem__)])

    def sustained_by_itself(self, level: float, above: str, below: str) -> str:
        """The command that gives what both attain at the highest rate tried of both at which
        `above` is still at the level, where their ratio is largest."""
        ratios = {
            at: ratio(*(self.sustained(one, *at, level) for one in (above, below)))
            for at in self.panels
        }
        model, data = max(ratios, key=lambda at: ratios[at].rate)
        ours, theirs = (self.attainments(one, model, data) for one in (above, below))
        rate = max(
            (rate for rate, share in ours.items() if share >= level and rate in theirs),
            # Before anything has run: where the search begins.
            default=min(ours, default=COARSE.rate(START[data] - LARGER[model] + AHEAD[data])),
        )
        cases = (self.case(one, model, data, rate) for one in (above, below))
        return self.by_itself("attainment", *cases)

    def hidden_and_step(self, system: str) -> str:
        """Hidden caches and step time at the first setting."""
        data, rate, cv = self.settings[0]
        n = self.numbers_of(system, data, rate, cv=cv)
        return f"{n.hidden:.0%} of requests hidden, {1e3 * n.step:.0f} ms per step"

    def dear(self) -> dict[str, float]:
        """What a projected hidden cache costs.

        `times`: a hidden token over K and V. `prompt`: mean of LongBench, tokens. `longer`: what
        such a prompt adds to every step, ms. `weights`: reading all weights, ms.
        """
        case = self.case(PROJECTED, ONE, "longbench", 1.0)
        model, prompt = place_of(case).cost_model, float(workload_of(case).prompt_len.mean())
        k = model.coefficients
        return {
            "times": k.hidden_token / k.decode_kv,
            "prompt": prompt,
            "longer": 1e3 * model.num_layers * prompt * (k.hidden_token - k.decode_kv),
            "weights": 1e3 * model.num_layers * k.token_bias,
        }

    # What the schedule does to the distribution of latencies.

    def latencies(self, system: str, data: str, read: str) -> OnlineNumbers:
        """The numbers with their quantiles. read: a key of READS."""
        policy = (FCFS if system == FCFS else PROJECTED) + READS[read]
        switches = SWITCHES[system]
        return self.numbers_of(policy, data, LATENCY_RATES[data], switches=switches, quantiles=True)

    def _each(self, say: Callable[[str, str], str]) -> str:
        """The texts of `say` by read and data set."""
        return "; ".join(
            f"{read} "
            + ", ".join(f"{say(data, read)} ({LABELS[data]})" for data in self.scale.data_sets)
            for read in READS
        )

    def attained(self, system: str) -> str:
        """Attainments."""
        return self._each(
            lambda data, read: f"{page.percent(self.latencies(system, data, read).attainment)}%"
        )

    def tails(self) -> str:
        """What decay does to the 99th percentile of TTFT."""
        return self._each(
            lambda data, read: " for ".join(
                f"{self.latencies(system, data, read).ttft_p99:,.4g} s"
                for system in (DECAYED, PROJECTED)
            )
        )

    # The time of a plan.

    @cached_property
    def _plan_ms(self) -> Times:
        """Milliseconds of plans as `jaxserve bench plan` measures them, or as an earlier run
        did."""
        scale = self.scale
        times = load_times(self._earlier / TIMES, scale.candidates) if self._earlier else None
        times = times or planning_time.measure(PROJECTED, scale.candidates, scale.plan_repeats)
        dump_times(times, self._figures / TIMES)
        return times

    def slowest(self) -> float:
        """Milliseconds of a plan with most candidates, in the slowest situation. nan until
        simulations are done: they would disturb it."""
        if not self.results.complete:
            return float("nan")
        most = str(self.scale.candidates[-1])
        return max(found[most] for found in self._plan_ms.values())

    # On Sarathi's batches.

    def over(self, below: str) -> str:
        """The rate that `aptserve_s` sustains over the one that `below` does, by level and data
        set. Bounds of the two rates are not marked."""

        def times(data: str, level: float) -> float:
            ours, theirs = (self.sustained(s, ONE, data, level).rate for s in (CHUNKED, below))
            return ours / theirs

        return "; ".join(
            f"at {level:.0%} "
            + ", ".join(f"{times(d, level):.3g}x ({LABELS[d]})" for d in self.scale.data_sets)
            for level in self.scale.levels
        )

    # Long contexts.

    def _long(self) -> Iterator[tuple[str, str, tuple[float, ...]]]:
        """Models, data sets and the rates to try, requests/s; only the first of each where the
        scale has one model."""
        few = 1 if len(self.scale.models) == 1 else None
        for model in LONG_MODELS[:few]:
            for data, (_, rates) in list(LONG.items())[:few]:
                yield model, data, rates[:few]

    def _long_case(self, system: str, model: str, data: str, rate: float) -> OnlineCase:
        return OnlineCase(
            system,
            f"{model}@{LONG[data][0]}xa100-40g",
            data,
            rate,
            *LONG_SLO,
            requests=self.scale.long_requests,
            longest=None,
            max_batch_tokens=LONG_C,
        )

    def long(self) -> dict[str, int]:
        """About long contexts.

        `better`: settings, of `count`, where aptserve attains more than vllm. `tbt`: settings where
        it attains less of TBT.
        """
        settings = [
            [self.results[self._long_case(s, model, data, rate)] for s in LONG_SYSTEMS]
            for model, data, rates in self._long()
            for rate in rates
        ]
        return {
            "better": sum(apt.attainment > vllm.attainment for vllm, apt in settings),
            "tbt": sum(apt.tbt_attainment < vllm.tbt_attainment for vllm, apt in settings),
            "count": len(settings),
        }

    def long_tbt(self) -> str:
        """Attainment of TBT at the paper's point, if the scale has it."""
        if ("yi-6b", "bookcorpus") not in {(model, data) for model, data, _ in self._long()}:
            return ""
        cases = [self._long_case(system, "yi-6b", "bookcorpus", 0.5) for system in LONG_SYSTEMS]
        each = (f"{page.percent(self.results[c].tbt_attainment)}% (`{c.policy}`)" for c in cases)
        return " and ".join(each) + " attain it there; "

    def sizes(self) -> str:
        """Elements of a token's hidden vector against its K and V."""
        return ", ".join(
            f"{SHAPES[m].hidden_bytes // 2:,} elements against {SHAPES[m].kv_bytes // 2:,} ({m})"
            for m in LONG_MODELS
        )

    def prefill(self) -> tuple[int, float]:
        """Tokens of a mean BookCorpus prompt, and the seconds for which it blocks the others."""
        case = self._long_case("vllm", "yi-6b", "bookcorpus", 0.5)
        tokens = int(workload_of(case).prompt_len.mean())
        batch = BatchFeatures(tokens, tokens, 0, 0, tokens**2, 1, 0)
        return tokens, float(place_of(case).cost_model.batch_time(batch))

    # What is measured.

    def steps(self) -> dict[str, Any]:
        """Times of decode steps; empty if never measured."""
        return steps.said(self._figures / steps.FILE_NAME)

    def load(self) -> dict[str, Any]:
        """Numbers of real serving; empty if never measured."""
        found = load.said(self._figures / load.FILE_NAME)
        if found:
            caption = "Attainment against rate of vllm, sarathi and aptserve, served on CPU"
            found["figure"] = self.chart(
                "aptserve_load.png", caption, [[found["panel"]]], "requests/s"
            )
        return found


def dump_times(times: Times, path: Path) -> None:
    """Writes milliseconds by situation and candidates as JSON; makes the folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"policy": PROJECTED, "plan_ms": times}
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def load_times(path: Path, candidates: Sequence[int]) -> Times | None:
    """Reads what `dump_times` wrote; None if the file is missing or has other numbers of
    candidates. ValueError if it holds something else."""
    if not path.exists():
        return None
    try:
        times: Times = json.loads(path.read_text("utf-8"))["plan_ms"]
        known = all(list(found) == [str(n) for n in candidates] for found in times.values())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not the times of an earlier run ({error})") from error
    return times if known else None


def _measure(wanted: Sequence[str], figures: Path, earlier: Path | None) -> None:
    """The engine itself. wanted: what to measure now; the rest is as it was measured last, beside
    the numbers of the earlier run if there is one."""
    if "steps" in wanted:
        measured.write(figures / steps.FILE_NAME, steps.COMMAND, "steps", steps.measure())
    if "load" in wanted:
        slo = {"ttft": load.SLO_ASKED.ttft, "tbt": load.SLO_ASKED.tbt}
        path = figures / load.FILE_NAME
        measured.write(path, load.COMMAND, "loads", load.measure(), slo=slo)
    for name in (steps.FILE_NAME, load.FILE_NAME):
        if earlier and (earlier / name).exists() and not (figures / name).exists():
            figures.mkdir(parents=True, exist_ok=True)
            shutil.copy(earlier / name, figures / name)


def _measurements(text: str) -> list[str]:
    """The names that --measure lists."""
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - {"steps", "load"}:
        raise ArgumentTypeError(f"steps, load or both, not {', '.join(sorted(unknown))}")
    return names


def _make(args: Namespace, known: Path | None) -> AptServe:
    figures, earlier = Path(args.out) / "figures", known.parent if known else None
    results = Results(run, lambda _: OnlineNumbers, known)
    _measure(args.measure, figures, earlier)
    return AptServe(QUICK if args.quick else Scale(), results, figures, earlier)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    parser = page.flags("aptserve", __doc__)
    parser.add_argument(
        "--measure", type=_measurements, default=[], help="steps, load or both: run the engine"
    )
    return page.write_page(parser, argv, _make)
