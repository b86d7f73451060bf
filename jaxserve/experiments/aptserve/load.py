"""Real serving, not simulated: attainment against rate with a pool that holds about ten requests,
by the same measurement as `jaxserve bench load`."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.bench import runs
from jaxserve.bench.load_target import EngineTarget
from jaxserve.config import Config
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.configs import opt_125m_cpu
from jaxserve.engine.stats import Observer
from jaxserve.experiments.common.claims import Row, Section
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.machine import machine, versions
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.request import SLO
from jaxserve.sched.slo.slo_columns import Terms
from jaxserve.sched.workloads.classes import with_targets
from jaxserve.sched.workloads.lengths import sampler
from jaxserve.sched.workloads.workload import Lengths, Workload, poisson_arrivals

POLICIES = ("vllm", "sarathi", "aptserve")
RATES = (0.8, 1.2, 1.6)
REQUESTS, REPEATS = 40, 3
SCALE, LONGEST = 1 / 3, 255  # of ShareGPT's lengths; tokens in and out of one request
HELD = 10  # requests whose K and V the pool holds, at their mean final length
SLO_ASKED = SLO(ttft=2.0, tbt=1.0)
FILE_NAME = "aptserve_load.json"
_BLOCK = 16  # tokens
COMMAND = "python -m jaxserve.experiments.aptserve --measure=load"


@dataclass(frozen=True)
class Load:
    """One run. rate: requests/s; attainment: share of requests within both targets; ttft, p99_tbt:
    seconds, the median over requests; hidden_share: largest share of the used blocks that were
    hidden at any token; preemptions: of all requests."""

    policy: str
    rate: float
    repeat: int
    attainment: float
    ttft: float
    p99_tbt: float
    hidden_share: float
    preemptions: int
    seconds: float


def workload(rate: float, repeat: int, count: int) -> Workload:
    """ShareGPT's lengths, scaled down, at Poisson arrivals; the same for every policy."""
    drawn = sampler("sharegpt")(count, np.random.default_rng(repeat))
    half = LONGEST // 2
    prompt = np.clip((drawn.prompt_len * SCALE).astype(np.int64), 4, half)
    output = np.clip((drawn.output_len * SCALE).astype(np.int64), 4, half)
    rng = np.random.default_rng((repeat, 1))
    terms = with_targets(Terms.none(count), SLO_ASKED)
    arrival = poisson_arrivals(rate, count, rng)
    return Workload.of(arrival, Lengths(prompt, output), limit=output, terms=terms)


def config_of(policy: str, config: Config) -> Config:
    """The configuration, for serving with this policy from a small pool."""
    sample = workload(1.0, 0, 1000)
    mean = float((sample.prompt_len + sample.output_len).mean())
    return config.with_fields(
        scheduler__policy=policy,
        scheduler__max_batch_tokens=LONGEST + 1,
        scheduler__max_prefill_tokens=LONGEST + 1,
        engine__max_model_len=LONGEST + 1,
        cache__block_size=_BLOCK,
        cache__num_blocks=HELD * int(blocks_for(math.ceil(mean), _BLOCK)),
    )


def measure(
    rates: Sequence[float] = RATES,
    count: int = REQUESTS,
    repeats: int = REPEATS,
    policies: Sequence[str] = POLICIES,
    base: Config | None = None,
) -> list[Load]:
    """On this machine. Repeats go round all policies and rates, so that a disturbance falls on one
    sample of several. base: the configuration to start from, `opt_125m_cpu` without one."""
    from jaxserve.engine.startup.build import build_engine

    base = base or config_from_config_dict(opt_125m_cpu.get_config())
    engines: dict[str, Any] = {}
    try:
        for policy in policies:
            engines[policy] = build_engine(config_of(policy, base), progress=sys.stderr.isatty())
            engines[policy].start()
            runs.warm_up(EngineTarget(engines[policy]), 8, 32, 16, 0)
        kinds = {policy: _Kinds(engine) for policy, engine in engines.items()}
        wanted = [(n, rate, p) for n in range(repeats) for rate in rates for p in policies]
        shown = tqdm(wanted, desc="serving", unit="load", disable=not sys.stderr.isatty())
        return [_one(engines[p], kinds[p], p, rate, n, count) for n, rate, p in shown]
    finally:
        for engine in engines.values():
            engine.stop()


class _Kinds(Observer):
    """An observer: the largest share of the used blocks that are hidden."""

    def __init__(self, engine: Any) -> None:
        self.share = 0.0
        self._engine = engine
        engine.add_observer(self)

    def on_step(self, stats: Any) -> None:
        blocks = self._engine.stats().blocks
        hidden = sum(count for (kind, _), count in blocks.items() if kind == "hidden")
        self.share = max(self.share, hidden / max(1, sum(blocks.values())))


def _one(engine: Any, kinds: _Kinds, policy: str, rate: float, repeat: int, count: int) -> Load:
    kinds.share = 0.0
    found = runs.load(EngineTarget(engine), workload(rate, repeat, count), repeat)
    return Load(
        policy,
        rate,
        repeat,
        found["slo"]["attainment"],
        found["ttft_ms"]["p50"] / 1e3,
        found["request_p99_tbt_ms"]["p50"] / 1e3,
        kinds.share,
        found["preemptions"],
        found["duration_s"],
    )


def dump(found: Sequence[Load], path: Path) -> None:
    """As JSON, with the machine, the versions and the targets in seconds; makes the folder where
    there is none. PackageNotFoundError where jaxserve was never installed."""
    content = {
        "command": COMMAND,
        "machine": machine(),
        "versions": versions(),
        "slo": {"ttft": SLO_ASKED.ttft, "tbt": SLO_ASKED.tbt},
        "loads": [asdict(one) for one in found],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def section(path: Path, figures: Path, number: int) -> Section:
    """Of what `dump` wrote; says so if it has not been measured. ValueError if it is something
    else."""
    title = f"{number}. Served for real: attainment against rate"
    if not path.exists():
        return Section(title, f"Not measured here: `{COMMAND}`.", [], [], [])
    try:
        content = json.loads(path.read_text("utf-8"))
        found = [Load(**one) for one in content["loads"]]
        where, soft, slo = content["machine"], content["versions"], content["slo"]
        ran = f"{where['cpu']}, {where['cores']} cores; jax {soft['jax']}"
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not measured loads ({error})") from error
    repeats = 1 + max(one.repeat for one in found)
    name = "aptserve_load.png"
    lines = {
        policy: (rates, [100 * share for share in attained])
        for policy, (rates, attained) in _curves(found).items()
    }
    chart(figures / name, [[Panel("OPT-125M, CPU", "attainment, %", lines, False)]], "requests/s")
    hidden = max(one.hidden_share for one in found)
    return Section(
        title,
        f"The engine itself, OPT-125M shapes in float32 with random weights, on CPU ({ran}). "
        f"ShareGPT's lengths times {SCALE:.2g}, Poisson arrivals, {REQUESTS} requests a run, a "
        f"pool that holds the K and V of about {HELD} of them; TTFT {slo['ttft']:g} s, P99 TBT "
        f"{slo['tbt']:g} s. Medians of {repeats} runs, least and most in brackets; every policy "
        f"gets the same requests. `{COMMAND}` measures them, with the code of `python -m "
        f"jaxserve.bench load`.",
        [
            Row(
                "`aptserve` keeps attainment where the others lose it",
                _verdict(found),
                f"Hidden caches took up to {hidden:.0%} of the used blocks. On two cores a step's "
                "time grows almost with its requests (the table before), so that more of them at "
                "once gain less than they do on a GPU.",
            )
        ],
        [(name, "Attainment against rate of vllm, sarathi and aptserve, served on CPU")],
        ["\n".join(_lines(found))],
    )


def _curves(found: Sequence[Load]) -> dict[str, tuple[list[float], list[float]]]:
    """Rates and the medians of attainment at them, by policy."""
    rates = sorted({one.rate for one in found})
    by: dict[str, tuple[list[float], list[float]]] = {}
    for policy in dict.fromkeys(one.policy for one in found):
        runs_at = [_at(found, policy, rate) for rate in rates]
        by[policy] = rates, [statistics.median(o.attainment for o in here) for here in runs_at]
    return by


def _at(found: Sequence[Load], policy: str, rate: float) -> list[Load]:
    return [one for one in found if (one.policy, one.rate) == (policy, rate)]


def _verdict(found: Sequence[Load]) -> str:
    """Medians at the highest rate."""
    return ", ".join(
        f"`{policy}` {attained[-1]:.0%} at {rates[-1]:g}/s"
        for policy, (rates, attained) in _curves(found).items()
    )


def _lines(found: Sequence[Load]) -> Iterator[str]:
    yield "| policy | requests/s | attainment | TTFT, s | P99 TBT, s | preemptions |"
    yield "|---|---|---|---|---|---|"
    for policy, (rates, attained) in _curves(found).items():
        for rate, median in zip(rates, attained, strict=True):
            mine = _at(found, policy, rate)
            shares = [one.attainment for one in mine]
            ttft, tbt, preemptions = (
                statistics.median(getattr(one, name) for one in mine)
                for name in ("ttft", "p99_tbt", "preemptions")
            )
            yield (
                f"| `{policy}` | {rate:g} | {median:.0%} ({min(shares):.0%} to {max(shares):.0%}) "
                f"| {ttft:.2f} | {tbt:.2f} | {preemptions:g} |"
            )
