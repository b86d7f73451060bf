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
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from jaxserve.command_line import Parser
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.model_shapes import MODELS as SHAPES
from jaxserve.simulator.capacity import COARSE, Crossing, crossing, mean, ratio
from jaxserve.simulator.systems.systems import system as system_of
from jaxserve_lab.bench import planning_time
from jaxserve_lab.experiments.aptserve import measured
from jaxserve_lab.experiments.aptserve.case import OnlineCase, place_of, run, workload_of
from jaxserve_lab.experiments.claims.claim import POINTS, Claim, Form, Places, Point, places
from jaxserve_lab.experiments.claims.page import SYSTEM, ClaimsPage, Shown, system_cells
from jaxserve_lab.experiments.common.figures import Panel
from jaxserve_lab.experiments.common.page import table

MODELS = {"13B": "opt-13b@a100-40g", "30B": "opt-30b@2xa100-40g", "66B": "opt-66b@4xa100-40g"}
LABELS = {"sharegpt": "ShareGPT", "humaneval": "HumanEval", "longbench": "LongBench"}
SLOS = {
    # Table 3: TTFT and P99 TBT in seconds, by model.
    "sharegpt": {"13B": (1.0, 1.0), "30B": (1.5, 1.0), "66B": (2.0, 1.0)},
    "humaneval": {"13B": (0.5, 0.5), "30B": (1.0, 0.5), "66B": (1.5, 0.5)},
    "longbench": {"13B": (4.0, 1.0), "30B": (4.5, 1.0), "66B": (5.0, 1.0)},
}
# Where searches begin, steps of `COARSE`: of the baselines with 13B, less for a larger model, more
# for Apt-Serve. They decide how many rates are tried, not what is found.
START = {"sharegpt": 3, "humaneval": 12, "longbench": 1}
LARGER = {"13B": 0, "30B": 1, "66B": 3}
AHEAD = {"sharegpt": 4, "humaneval": 1, "longbench": 1}
BASELINES = ("vllm", "sarathi", "fastgen")
HIDDEN = ", absorbed"  # after the name of a policy that reads hidden caches so, not projected
PROJECTED, ABSORBED = "aptserve", "aptserve" + HIDDEN
KV, FCFS, CHUNKED = "aptserve_kv", "aptserve_fcfs", "aptserve_s"
DECAY = 0.4
DECAYED = f"aptserve, decay {DECAY:g}"
ONE = "13B"  # the model where there is one
BATCH = 50  # decodes, whose step the paper times

BURST_RATES = {"sharegpt": 3.8, "humaneval": 9.0, "longbench": 1.5}
BURSTY = ("vllm", "sarathi", PROJECTED, ABSORBED)  # Figure 9
TABLE_RATES = {"sharegpt": (3.0, 6.0), "humaneval": (), "longbench": (1.5, 3.0)}  # 4 and 5
LATENCY_RATES = {"sharegpt": 6.0, "humaneval": 9.0, "longbench": 2.0}  # Figure 10
PENALTIES = ("step", "redecide", "remaining")

LONG_GPUS = {"wikitext": 1, "arxiv": 2, "bookcorpus": 4}  # Figure 12
LONG_RATES = {
    "wikitext": (1.0, 2.0, 4.0, 8.0),
    "arxiv": (0.5, 1.0, 2.0, 4.0),
    "bookcorpus": (0.25, 0.5, 1.0, 2.0),
}
LONG_MODELS, LONG_SLO, LONG_C = ("llama-3-8b", "yi-6b"), (10.0, 1.0), 32768

PLAN_MS = {50: 0.3, 100: 0.5, 200: 1.0, 400: 2.1, 800: 4.8, 1600: 10.8}  # Table 6, by candidates
TIMES = "aptserve_plan.json"

# Of rates that are sustained, or of bounds on them.
RATE = Form(ratio, Crossing.times, mean, lambda found: found.rate)
PLAIN_RATE = Form(lambda ours, theirs: ours.rate / theirs.rate, "{:.3g}x".format)
CLAIMS = (
    *(
        Claim(
            f"{ours} over {theirs} at {level}", said, f"rate at {level}", ours, theirs, "all", RATE
        )
        for (level, theirs), said in {
            ("90%", "vllm"): ("2.3x", "4.0x"),
            ("90%", "sarathi"): ("1.9x", "3.4x"),
            ("90%", "fastgen"): ("1.8x", "3.3x"),
            ("60%", "vllm"): ("4.9x", "8.8x"),
            ("60%", "sarathi"): ("4.4x", "7.9x"),
            ("60%", "fastgen"): ("4.3x", "7.5x"),
        }.items()
        for ours in (PROJECTED, KV, ABSORBED)
    ),
    *(
        Claim(f"{ours} in bursts", "never less", "attainment", ours, BURSTY[:2], "bursts", POINTS)
        for ours in (PROJECTED, ABSORBED)
    ),
    *(
        Claim(f"{ours} in a burst", "7.5x", "attainment", ours, "", "bursts of each")
        for ours in (PROJECTED, ABSORBED)
    ),
    *(
        Claim(f"{ours} over {theirs}", said, "attainment", ours, theirs, "tables", POINTS)
        for ours, theirs, said in (
            (PROJECTED, KV, "0.0 to 7.4"),
            (ABSORBED, KV, "0.0 to 7.4"),
            (PROJECTED, FCFS, "36.2 to 86.4"),
            (ABSORBED, FCFS + HIDDEN, "36.2 to 86.4"),
        )
    ),
    *(
        Claim(
            f"chunks over {theirs} at {level}",
            "better",
            f"rate at {level}",
            CHUNKED,
            theirs,
            "one",
            PLAIN_RATE,
        )
        for theirs in ("sarathi", PROJECTED)
        for level in ("90%", "60%")
    ),
    Claim("long", "more", "attainment", "aptserve", "vllm", "long", POINTS),
    Claim("long tbt", "60%", "tbt_attainment", "vllm", "aptserve", "long", POINTS),
)


class Scale:
    """How much is run."""

    requests = 1000  # of a trace
    long_requests = 500  # of a trace of Figure 12
    models: Sequence[str] = tuple(MODELS)
    data_sets: Sequence[str] = tuple(LABELS)
    levels: Sequence[float] = (0.9, 0.6)  # attainments at which rates are compared
    cvs: Sequence[float] = (1, 2, 5, 10)  # of the arrivals in Figure 9
    table_cvs: Sequence[float] = (1, 5, 10)  # in Tables 4 and 5
    long: Sequence[str] = tuple(LONG_GPUS)
    long_models: Sequence[str] = LONG_MODELS
    long_rates = 4  # of LONG_RATES
    costs: Sequence[float] = (1, 1 / 4, 1 / 16, 1 / 64)  # factors on the cost of hidden tokens
    candidates: Sequence[int] = tuple(PLAN_MS)  # of the plans that are timed
    plan_repeats = 50  # plans that a median is taken over


class Quick(Scale):
    """Toy sizes."""

    requests, long_requests, models, data_sets, levels = 40, 12, ("13B",), ("sharegpt",), (0.9,)
    cvs, table_cvs, costs = (1,), (1,), (1, 1 / 4)
    long, long_models, long_rates = ("wikitext",), ("llama-3-8b",), 1
    candidates, plan_repeats = (8,), 2


class AptServe(ClaimsPage):
    """What the template beside this asks for."""

    name, kind, run, sizes, claims = "aptserve", OnlineCase, run, (Scale, Quick), CLAIMS
    called: ClassVar = LABELS
    held = tuple(
        OnlineCase(policy, MODELS[ONE], "sharegpt", 9.0, 1.0, 1.0, requests=150, hidden_read=read)
        for policy, read in (
            *((policy, "auto") for policy in (*BASELINES, KV, FCFS)),
            *((policy, read) for policy in (PROJECTED, CHUNKED) for read in measured.READS),
        )
    )
    baselines, one, decayed, plan_there = BASELINES, ONE, DECAYED, PLAN_MS
    kv, projected, absorbed, fcfs = KV, PROJECTED, ABSORBED, FCFS
    effective, beyond, bursty = (*BASELINES, PROJECTED), ("vllm", KV, PROJECTED, ABSORBED), BURSTY
    reads: ClassVar = {"projected": "", "absorbed": HIDDEN}
    attainment, command = Shown("attainment", "SLO attainment"), measured.COMMAND
    also: ClassVar = {"costs": (PROJECTED,), "penalties": (PROJECTED, ABSORBED)}

    def cases(
        self, policy: str, model: str, data: str, rate: float, **more: Any
    ) -> list[OnlineCase]:
        """The case of a trace.

        Args:
            policy: Its name, DECAYED, or either with HIDDEN.
            model: A name in MODELS or LONG_MODELS.
            data: The data set.
            rate: Requests/s.
            **more: Other fields of `OnlineCase`.
        """
        name, scale = policy.removesuffix(HIDDEN), self.scale
        if data in LONG_GPUS:
            place, count = f"{model}@{LONG_GPUS[data]}xa100-40g", scale.long_requests
            long = {"requests": count, "longest": None, "max_batch_tokens": LONG_C}
            return [OnlineCase(name, place, data, rate, *LONG_SLO, **long)]
        if name == DECAYED:
            name, more["switches"] = PROJECTED, (("slo_decay", DECAY),)
        more["hidden_read"] = "absorbed" if policy.endswith(HIDDEN) else "projected"
        ttft, tbt = SLOS[data][model]
        more["requests"] = scale.requests
        return [OnlineCase(name, MODELS[model], data, rate, ttft, tbt, **more)]

    @cached_property
    def where(self) -> dict[str, Places]:
        """Of ONE model but for rates that are sustained, and long contexts."""
        scale = self.scale

        def at(label: str, rates: Mapping[str, Any] | None = None, **axes: Any) -> Places:
            if rates:
                axes = {"rate": lambda at: rates[at["data"]], **axes}
            return places(label, LABELS, data=scale.data_sets, **{"model": [ONE], **axes})

        bursts = {data: [rate] for data, rate in BURST_RATES.items()}
        latencies = {data: [rate] for data, rate in LATENCY_RATES.items()}
        penalties = [(("penalty", name),) for name in PENALTIES]
        return {
            "all": at("{data}, {model}", model=scale.models),
            "one": at("{data}"),
            "bursts": at("{data}, CV {cv:g}", bursts, cv=scale.cvs),
            "bursts of each": at(
                "{data}, CV {cv:g}, `{theirs}`", bursts, cv=scale.cvs, theirs=BURSTY[:2]
            ),
            "calm": at("{data}", bursts, cv=scale.cvs[:1]),
            "wild": at("{data}", bursts, cv=scale.cvs[-1:]),
            "tables": at("{data}, {rate:g}/s, CV {cv}", TABLE_RATES, cv=scale.table_cvs),
            "latencies": at("{data}", latencies, quantiles=[True]),
            "costs": at("{data}, {rate}, {hidden_cost}", TABLE_RATES, hidden_cost=scale.costs),
            "penalties": at("{data}, {rate}, {switches}", TABLE_RATES, switches=penalties),
            "long": places(
                "{model}, {data}, {rate:g}/s",
                model=scale.long_models,
                data=scale.long,
                rate=lambda at: LONG_RATES[at["data"]][: scale.long_rates],
            ),
        }

    def systems(self) -> str:
        """A table with a line per system."""
        rows = []
        for name in self.scale.models:
            rhos = [system_of(MODELS[name], read).rho or 0.0 for read in self.reads]
            rows.append([*system_cells(MODELS[name]), *(f"{1e6 * rho:.2f}" for rho in rhos)])
        return table([*SYSTEM, "rho projected, us", "rho absorbed, us"], rows)

    # Attainment against rate, each system's rates found by a search.

    def attainments(self, policy: str, at: Point) -> dict[float, float]:
        """Shares of the requests within both targets by rate, requests/s, ascending."""

        def attain(index: int) -> float | None:
            (case,) = self.cases(policy, rate=COARSE.rate(index), **at)
            found = self.results.get(case)
            return None if found is None else found["attainment"]

        start = START[at["data"]] - LARGER[at["model"]]
        start += 0 if policy in BASELINES else AHEAD[at["data"]]
        found, _ = COARSE.tried(attain, start, self.scale.levels)
        return {COARSE.rate(index): found[index] for index in sorted(found)}

    def value(self, number: str, policy: str, point: Point) -> Any:
        """As `ClaimsPage`; of `rate at 90%` the rate up to which so many meet both targets, or
        a bound on it."""
        name, _, level = number.partition("rate at ")
        if name:
            return super().value(number, policy, point)
        found = self.attainments(policy, point)
        return crossing(found, float(level.rstrip("%")) / 100) if found else Crossing(float("nan"))

    def sustained_by_itself(self, claim: str, level: float, above: str, below: str) -> str:
        """The command that gives what both attain at the highest rate tried of both at which
        `above` is still at the level, where their ratio is largest.

        Args:
            claim: Compares them.
            level: A share of the requests.
            above, below: The policies.
        """
        at = self.of[claim].at(max)
        ours, theirs = (self.attainments(policy, at) for policy in (above, below))
        if not ours:
            return ""
        rates = (rate for rate, share in ours.items() if share >= level and rate in theirs)
        rate = max(rates, default=min(ours))
        both = (self.cases(policy, rate=rate, **at)[0] for policy in (above, below))
        return self.by_itself("attainment", *both)

    def by_rate(self, file: str, caption: str, policies: Sequence[str]) -> str:
        """A figure of these policies, a row per data set, a column per model."""
        panels: dict[str, list[Panel]] = {}
        for label, at in self.where["all"].items():
            found = {policy: self.attainments(policy, at) for policy in policies}
            lines = {policy: (list(one), list(one.values())) for policy, one in found.items()}
            panels.setdefault(at["data"], []).append(Panel(label, "SLO attainment", lines))
        return self.chart(file, caption, list(panels.values()), "requests/s", dpi=95)

    def decode_ms(self) -> float:
        """Milliseconds of the one step that the paper times."""
        place = system_of(MODELS[self.scale.models[0]])
        full = BatchFeatures(BATCH, BATCH, place.kv_tokens, BATCH, 0, 0, 0)
        return 1e3 * float(place.cost_model.batch_time(full))

    def falls(self, policy: str) -> int:
        """In how many data sets the policy attains less at the largest CV than at the smallest."""
        both = (self.values("attainment", name, policy) for name in ("calm", "wild"))
        return sum(wild <= calm for calm, wild in zip(*both, strict=True))

    def dear(self) -> dict[str, float]:
        """What a projected hidden cache costs.

        `times`: a hidden token over K and V. `longer`: what a mean prompt of LongBench adds to
        every step, ms. `weights`: reading all weights, ms.
        """
        (case,) = self.cases(PROJECTED, ONE, "longbench", 1.0)
        model, prompt = place_of(case).cost_model, float(workload_of(case).prompt_len.mean())
        k = model.coefficients
        return {
            "times": k.hidden_token / k.decode_kv,
            "longer": 1e3 * model.num_layers * prompt * (k.hidden_token - k.decode_kv),
            "weights": 1e3 * model.num_layers * k.token_bias,
        }

    def elements(self) -> str:
        """Elements of a token's hidden vector against its K and V."""
        return ", ".join(
            f"{SHAPES[m].hidden_bytes // 2:,} elements against {SHAPES[m].kv_bytes // 2:,} ({m})"
            for m in LONG_MODELS
        )

    def prefill(self) -> tuple[int, float]:
        """Tokens of a mean BookCorpus prompt, and the seconds for which it blocks the others."""
        (case,) = self.cases("vllm", "yi-6b", "bookcorpus", 0.5)
        tokens = int(workload_of(case).prompt_len.mean())
        batch = BatchFeatures(tokens, tokens, 0, 0, tokens**2, 1, 0)
        return tokens, float(place_of(case).cost_model.batch_time(batch))

    # What is measured.

    @property
    def _figures(self) -> Path:
        return Path(self.args.out) / "figures"

    @cached_property
    def _plan_ms(self) -> dict[str, dict[str, float]]:
        """Milliseconds of plans by situation and candidates, as `jaxserve bench plan` measures
        them, or as an earlier run did."""
        scale, earlier = self.scale, self.args.numbers
        times = load_times(Path(earlier).parent / TIMES, scale.candidates) if earlier else None
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

    def steps(self) -> dict[str, Any]:
        """Times of decode steps; empty if never measured."""
        return measured.steps_said(self._figures / measured.STEPS_FILE)

    def load(self) -> dict[str, Any]:
        """Numbers of real serving; empty if never measured."""
        found = measured.loads_said(self._figures / measured.LOADS_FILE)
        if found:
            caption = "Attainment against rate of vllm, sarathi and aptserve, served on CPU"
            panels = [[found["panel"]]]
            found["figure"] = self.chart("aptserve_load.png", caption, panels, "requests/s")
        return found

    @classmethod
    def add_flags(cls, parser: Parser) -> None:
        """What is measured now."""
        about = "steps, load or both: run the engine"
        parser.add_argument("--measure", type=_measurements, default=[], help=about)

    @classmethod
    def made(cls, args: Namespace, known: Path | None) -> ClaimsPage:
        """As `ClaimsPage`. Measures first what is asked for; the rest is as it was measured last,
        beside the numbers of the earlier run if there is one."""
        page = super().made(args, known)
        figures = Path(args.out) / "figures"
        if "steps" in args.measure:
            measured.write_steps(measured.measure_steps(), figures / measured.STEPS_FILE)
        if "load" in args.measure:
            measured.write_loads(measured.measure_loads(), figures / measured.LOADS_FILE)
        for name in (measured.STEPS_FILE, measured.LOADS_FILE):
            if known and (known.parent / name).exists() and not (figures / name).exists():
                figures.mkdir(parents=True, exist_ok=True)
                shutil.copy(known.parent / name, figures / name)
        return page


def dump_times(times: dict[str, dict[str, float]], path: Path) -> None:
    """Writes milliseconds by situation and candidates as JSON; makes the folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"policy": PROJECTED, "plan_ms": times}
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def load_times(path: Path, candidates: Sequence[int]) -> dict[str, dict[str, float]] | None:
    """Reads what `dump_times` wrote; None if the file is missing or has other numbers of
    candidates. ValueError if it holds something else."""
    if not path.exists():
        return None
    try:
        times: dict[str, dict[str, float]] = json.loads(path.read_text("utf-8"))["plan_ms"]
        known = all(list(found) == [str(n) for n in candidates] for found in times.values())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not the times of an earlier run ({error})") from error
    return times if known else None


def _measurements(text: str) -> list[str]:
    """The names that --measure lists."""
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - {"steps", "load"}:
        raise ArgumentTypeError(f"steps, load or both, not {', '.join(sorted(unknown))}")
    return names
