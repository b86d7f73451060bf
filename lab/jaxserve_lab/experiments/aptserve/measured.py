"""What is measured for the page with the engine itself, on OPT-125M shapes with random weights:
decode steps by what they read, and attainment against rate with a pool for about ten requests."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.bench import runs
from jaxserve.bench.load_target import EngineTarget
from jaxserve.config import Config
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.configs import opt_125m_cpu
from jaxserve.engine.startup.choices.pool_size import choose_block_size
from jaxserve.engine.startup.step_timer import CHAIN, Shape, StepTimer
from jaxserve.engine.stats import Observer
from jaxserve.machine import machine, versions
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.request import SLO, Rule
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.lengths import sampler
from jaxserve.simulator.workloads.workload import Lengths, Workload, poisson_arrivals
from jaxserve_lab.experiments.common.figures import Panel

COMMAND = "python -m jaxserve_lab.experiments.aptserve --measure="
Rows = list[dict[str, Any]]

STEPS_FILE = "aptserve_steps.json"
ROWS, TOKENS = (1, 8, 32), (512, 1024, 1900)  # decodes of a step, and cached tokens of each
READS = ("absorbed", "projected")
TARGET = 1.3  # times the KV step, absorbed
ROUNDS, BUDGET_S, SLOW_S = 9, 20.0, 0.5

LOADS_FILE = "aptserve_load.json"
POLICIES, RATES = ("vllm", "sarathi", "aptserve"), (0.8, 1.2, 1.6)  # requests/s
REQUESTS, REPEATS = 40, 3
SCALE, LONGEST = 1 / 3, 255  # of ShareGPT's lengths; tokens in and out of one request
HELD, BLOCK = 10, 16  # requests whose K and V the pool holds, at their mean length; tokens
TARGETS = SLO(ttft=2.0, tbt=1.0)


def measure_steps(
    rows: Sequence[int] = ROWS,
    tokens: Sequence[int] = TOKENS,
    reads: Sequence[str] = READS,
    base: Config | None = None,
) -> Rows:
    """Median seconds of decode steps over K and V, and over hidden caches, taken in turns.

    Args:
        rows: Decodes of a step, ascending.
        tokens: Cached tokens of each decode, ascending.
        reads: Ways of reading hidden caches, with an engine for each.
        base: The configuration to start from; None for `opt_125m_cpu`.
    """
    # Imported late: jax takes seconds, and the page can be written without it.
    from jaxserve.engine.startup.build import build_engine

    found = []
    for read in reads:
        engine = build_engine(_steps_config(_base(base), read, rows, tokens), progress=False)
        info = engine.info()
        timer = StepTimer(engine.executor, info.num_blocks, info.vocab_size)
        for count in rows:
            for length in tokens:
                kv, hidden = _pair(timer, Shape(decodes=(length,) * count))
                shape = {"read": read, "rows": count, "tokens": length}
                found.append({**shape, "kv": kv, "hidden": hidden})
        engine.stop()
    return found


def _base(config: Config | None) -> Config:
    return config or config_from_config_dict(opt_125m_cpu.get_config())


def _pair(timer: StepTimer, shape: Shape) -> tuple[float, float]:
    both = (shape, replace(shape, hidden=True))
    chain = 1 if max(timer.seconds(one, 1) for one in both) > SLOW_S else CHAIN
    pairs: list[list[float]] = []
    end = time.perf_counter() + BUDGET_S
    while len(pairs) < 3 or (len(pairs) < ROUNDS and time.perf_counter() < end):
        pairs.append([timer.seconds(one, chain) for one in both])
    kv, hidden = map(statistics.median, zip(*pairs, strict=True))
    return kv, hidden


def _steps_config(config: Config, read: str, rows: Sequence[int], tokens: Sequence[int]) -> Config:
    size, longest = choose_block_size(config.cache.block_size), tokens[-1] + 1
    return config.with_fields(
        scheduler__policy="aptserve_s",
        scheduler__max_rows=rows[-1],
        scheduler__max_batch_tokens=rows[-1],
        scheduler__max_prefill_tokens=rows[-1],
        engine__row_buckets=tuple(rows),
        engine__token_buckets=(rows[-1],),
        engine__max_model_len=longest,
        engine__compilation_cache_dir="",
        cache__hidden_read=read,
        cache__rho="0",
        cache__memory_gib=0.0,
        cache__num_blocks=rows[-1] * int(blocks_for(longest, size)),
    )


def workload(rate: float, repeat: int, count: int) -> Workload:
    """ShareGPT's lengths, scaled down, at Poisson arrivals; the same for every policy."""
    drawn = sampler("sharegpt")(count, np.random.default_rng(repeat))
    prompt, output = (
        np.clip((lengths * SCALE).astype(np.int64), 4, LONGEST // 2)
        for lengths in (drawn.prompt_len, drawn.output_len)
    )
    arrival = poisson_arrivals(rate, count, np.random.default_rng((repeat, 1)))
    terms = with_targets(SloColumns.none(count), TARGETS)
    return Workload.create(arrival, Lengths(prompt, output), limit=output, terms=terms)


def _load_config(policy: str, config: Config) -> Config:
    """Serves with this policy from a small pool."""
    sample = workload(1.0, 0, 1000)
    mean = float((sample.prompt_len + sample.output_len).mean())
    return config.with_fields(
        scheduler__policy=policy,
        scheduler__max_batch_tokens=LONGEST + 1,
        scheduler__max_prefill_tokens=LONGEST + 1,
        engine__max_model_len=LONGEST + 1,
        cache__block_size=BLOCK,
        cache__num_blocks=HELD * int(blocks_for(math.ceil(mean), BLOCK)),
    )


def measure_loads(
    rates: Sequence[float] = RATES,
    count: int = REQUESTS,
    repeats: int = REPEATS,
    policies: Sequence[str] = POLICIES,
    base: Config | None = None,
) -> Rows:
    """What serving comes to, by the same measurement as `jaxserve bench load`. Repeats go round all
    policies and rates, so that a disturbance hits one sample of several.

    Args:
        rates: Requests/s.
        count: Requests of a run.
        repeats: Runs of each policy at each rate.
        policies: Their names.
        base: The configuration to start from; None for `opt_125m_cpu`.
    """
    from jaxserve.engine.startup.build import build_engine

    engines: dict[str, Any] = {}
    try:
        for policy in policies:
            config = _load_config(policy, _base(base))
            engines[policy] = build_engine(config, progress=sys.stderr.isatty())
            engines[policy].start()
            runs.warm_up(EngineTarget(engines[policy]), 8, 32, 16, 0)
        kinds = {policy: _Kinds(engine) for policy, engine in engines.items()}
        wanted = [(n, rate, p) for n in range(repeats) for rate in rates for p in policies]
        shown = tqdm(wanted, desc="serving", unit="load", disable=not sys.stderr.isatty())
        found = []
        for repeat, rate, policy in shown:
            kinds[policy].share = 0.0
            asked, target = workload(rate, repeat, count), EngineTarget(engines[policy])
            load = runs.load(target, asked, repeat, Rule.PAPERS)
            found.append(
                {
                    "policy": policy,
                    "rate": rate,
                    "repeat": repeat,
                    "attainment": load["slo"]["attainment"],
                    # Medians over requests, seconds.
                    "ttft": load["ttft_ms"]["p50"] / 1e3,
                    "p99_tbt": load["request_p99_tbt_ms"]["p50"] / 1e3,
                    "hidden_share": kinds[policy].share,
                    "preemptions": load["preemptions"],
                    "seconds": load["duration_s"],
                }
            )
        return found
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


# Files beside the page's numbers.


def write_steps(found: Rows, path: Path) -> None:
    """Writes what `measure_steps` found."""
    _write(path, {"command": f"{COMMAND}steps"}, {"steps": found})


def write_loads(found: Rows, path: Path) -> None:
    """Writes what `measure_loads` found."""
    slo = {"ttft": TARGETS.ttft, "tbt": TARGETS.tbt}
    _write(path, {"command": f"{COMMAND}load"}, {"slo": slo, "loads": found})


def _write(path: Path, head: dict[str, Any], found: dict[str, Any]) -> None:
    content = {**head, "machine": machine(), "versions": versions(), **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def steps_said(path: Path) -> dict[str, Any]:
    """What a page needs of measured steps; empty if there is no such file. ValueError if the file
    holds something else."""
    return _read(path, "steps", _steps)


def loads_said(path: Path) -> dict[str, Any]:
    """The same of measured loads."""
    return _read(path, "loads", _loads)


def _read(path: Path, name: str, said: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
        where, jax = content["machine"], content["versions"]["jax"]
        text = f"{where['cpu']}, {where['cores']} cores; jax {jax}"
        return {"where": text, **said(content)}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not measured {name} ({error})") from error


def _steps(content: Any) -> dict[str, Any]:
    absorbed, projected = (
        sorted(one["hidden"] / one["kv"] for one in content["steps"] if one["read"] == read)
        for read in READS
    )
    return {
        "version": content["versions"]["jaxserve"],
        "target": TARGET,
        "median": statistics.median(absorbed),
        "worst": absorbed[-1],
        "shapes": len(absorbed),
        "projected": (projected[0], projected[-1]),
    }


def _loads(content: Any) -> dict[str, Any]:
    found = content["loads"]
    rates = sorted({one["rate"] for one in found})
    curves = {
        policy: [
            statistics.median(
                one["attainment"] for one in found if (one["policy"], one["rate"]) == (policy, rate)
            )
            for rate in rates
        ]
        for policy in dict.fromkeys(one["policy"] for one in found)
    }
    lines = {policy: (rates, [100 * share for share in curves[policy]]) for policy in curves}
    return {
        "slo": content["slo"],
        "scale": SCALE,
        "requests": REQUESTS,
        "held": HELD,
        "repeats": 1 + max(one["repeat"] for one in found),
        "hidden": max(one["hidden_share"] for one in found),
        "verdict": ", ".join(  # at the highest rate
            f"`{policy}` {shares[-1]:.0%} at {rates[-1]:g}/s" for policy, shares in curves.items()
        ),
        "panel": Panel("OPT-125M, CPU", "attainment, %", lines),
    }
