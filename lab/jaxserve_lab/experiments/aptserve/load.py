"""Real serving, not simulated: attainment against rate with a pool that holds about ten requests,
by the same measurement as `jaxserve bench load`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.request import SLO, Rule
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.lengths import sampler
from jaxserve.simulator.workloads.workload import Lengths, Workload, poisson_arrivals
from jaxserve_lab.experiments.aptserve import measured
from jaxserve_lab.experiments.common.figures import Panel

POLICIES = ("vllm", "sarathi", "aptserve")
RATES = (0.8, 1.2, 1.6)
REQUESTS, REPEATS = 40, 3
SCALE, LONGEST = 1 / 3, 255  # of ShareGPT's lengths; tokens in and out of one request
HELD = 10  # requests whose K and V the pool holds, at their mean final length
SLO_ASKED = SLO(ttft=2.0, tbt=1.0)
FILE_NAME = "aptserve_load.json"
_BLOCK = 16  # tokens
COMMAND = "python -m jaxserve_lab.experiments.aptserve --measure=load"


@dataclass(frozen=True)
class Load:
    """What one run of the engine came to.

    Attributes:
        policy: Its name.
        rate: Requests/s.
        repeat: Number of the repeat, from 0.
        attainment: Share of the requests within both targets.
        ttft, p99_tbt: Medians over requests, seconds.
        hidden_share: Largest share of the used blocks that were hidden at any step.
        preemptions: Of all requests.
        seconds: How long the run took.
    """

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
    terms = with_targets(SloColumns.none(count), SLO_ASKED)
    arrival = poisson_arrivals(rate, count, rng)
    return Workload.create(arrival, Lengths(prompt, output), limit=output, terms=terms)


def config_of(policy: str, config: Config) -> Config:
    """The configuration, changed to serve with this policy from a small pool."""
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
    """Measures on this machine. Repeats go round all policies and rates, so that a disturbance hits
    one sample of several.

    Args:
        rates: Requests/s.
        count: Requests of a run.
        repeats: Runs of each policy at each rate.
        policies: Their names.
        base: The configuration to start from; None for `opt_125m_cpu`.
    """
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
    """Observes the largest share of the used blocks that are hidden."""

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
    found = runs.load(EngineTarget(engine), workload(rate, repeat, count), repeat, Rule.PAPERS)
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


def said(path: Path) -> dict[str, Any]:
    """What a page needs of the measurements; empty if there is no such file. ValueError if the file
    holds something else."""
    content = measured.read(path, loads=Load, slo=SLO)
    if not content:
        return {}
    found = content["loads"]
    curves = _curves(found)
    lines = {
        policy: (rates, [100 * share for share in attained])
        for policy, (rates, attained) in curves.items()
    }
    return {
        "where": content["where"],
        "slo": content["slo"],
        "scale": SCALE,
        "requests": REQUESTS,
        "held": HELD,
        "repeats": 1 + max(one.repeat for one in found),
        "hidden": max(one.hidden_share for one in found),
        "verdict": ", ".join(  # medians at the highest rate
            f"`{policy}` {attained[-1]:.0%} at {rates[-1]:g}/s"
            for policy, (rates, attained) in curves.items()
        ),
        "panel": Panel("OPT-125M, CPU", "attainment, %", lines),
    }


def _curves(found: Sequence[Load]) -> dict[str, tuple[list[float], list[float]]]:
    """The rates, and the median attainment at each, by policy."""
    rates = sorted({one.rate for one in found})
    return {
        policy: (rates, [_median(_at(found, policy, rate), "attainment") for rate in rates])
        for policy in dict.fromkeys(one.policy for one in found)
    }


def _at(found: Sequence[Load], policy: str, rate: float) -> list[Load]:
    return [one for one in found if (one.policy, one.rate) == (policy, rate)]


def _median(found: Sequence[Load], name: str) -> float:
    return statistics.median(getattr(one, name) for one in found)
