"""How long a decode step takes that reads K and V, or hidden vectors, absorbed or projected: the
engine's own steps, measured on OPT-125M shapes with random weights."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxserve.config import Config
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.configs import opt_125m_cpu
from jaxserve.engine.startup.pool_size import choose_block_size
from jaxserve.engine.startup.step_timer import CHAIN, Shape, StepTimer
from jaxserve.experiments.common.claims import Row, Section
from jaxserve.machine import machine, versions
from jaxserve.sched.cache.block_sizes import blocks_for

ROWS, TOKENS = (1, 8, 32), (512, 1024, 1900)
READS = ("absorbed", "projected")
TARGET = 1.3  # times the KV step, absorbed
ROUNDS, BUDGET_S, SLOW_S = 9, 20.0, 0.5
FILE_NAME = "aptserve_steps.json"
COMMAND = "python -m jaxserve.experiments.aptserve --measure=steps"


@dataclass(frozen=True)
class StepTimes:
    """Medians, in seconds, of steps of `rows` decodes over `tokens` cached tokens each; kv: taken
    in turns with hidden, on the same engine."""

    read: str
    rows: int
    tokens: int
    kv: float
    hidden: float

    @property
    def ratio(self) -> float:
        """How many times the KV step the hidden one takes."""
        return self.hidden / self.kv


def measure(
    rows: Sequence[int] = ROWS,
    tokens: Sequence[int] = TOKENS,
    reads: Sequence[str] = READS,
    base: Config | None = None,
) -> list[StepTimes]:
    """On this machine; an engine for either way of reading. base: the configuration to start
    from, `opt_125m_cpu` without one."""
    # Imported late: jax takes seconds, and the page can be written without it.
    from jaxserve.engine.startup.build import build_engine

    base = base or config_from_config_dict(opt_125m_cpu.get_config())
    found = []
    for read in reads:
        engine = build_engine(_config(base, read, rows, tokens), progress=False)
        timer = StepTimer(engine.executor, engine.info().num_blocks)
        for count in rows:
            for length in tokens:
                kv, hidden = _pair(timer, Shape(decodes=(length,) * count))
                found.append(StepTimes(read, count, length, kv, hidden))
        engine.stop()
    return found


def _pair(timer: StepTimer, shape: Shape) -> tuple[float, float]:
    hidden = replace(shape, hidden=True)
    first = [timer.seconds(one, 1) for one in (shape, hidden)]
    chain = 1 if max(first) > SLOW_S else CHAIN
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + BUDGET_S
    while len(pairs) < 3 or (len(pairs) < ROUNDS and time.perf_counter() < end):
        pairs.append((timer.seconds(shape, chain), timer.seconds(hidden, chain)))
    kv, other = zip(*pairs, strict=True)
    return statistics.median(kv), statistics.median(other)


def _config(config: Config, read: str, rows: Sequence[int], tokens: Sequence[int]) -> Config:
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


def dump(found: Sequence[StepTimes], path: Path) -> None:
    """As JSON, with the machine and the versions, times in seconds; makes the folder where there is
    none. PackageNotFoundError where jaxserve was never installed."""
    content = {
        "command": COMMAND,
        "machine": machine(),
        "versions": versions(),
        "steps": [asdict(one) for one in found],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def section(path: Path, number: int) -> Section:
    """Of what `dump` wrote; says so if it has not been measured. ValueError if it is something
    else."""
    title = f"{number}. Measured: a decode step by cache"
    if not path.exists():
        return Section(title, f"Not measured here: `{COMMAND}`.", [], [], [])
    try:
        content = json.loads(path.read_text("utf-8"))
        found = [StepTimes(**one) for one in content["steps"]]
        where, soft = content["machine"], content["versions"]
        ran = f"{where['cpu']}, {where['cores']} cores; jax {soft['jax']}, jaxserve"
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not measured steps ({error})") from error
    lines = ["| requests | tokens cached | KV, ms | absorbed, of KV | projected, of KV |"]
    lines += ["|---|---|---|---|---|"]
    by = {(one.read, one.rows, one.tokens): one for one in found}
    for read, rows, tokens in by:
        if read == READS[0]:
            absorbed, projected = (by[name, rows, tokens] for name in READS)
            lines.append(
                f"| {rows} | {tokens:,} | {1e3 * absorbed.kv:.1f} | {absorbed.ratio:.2f} | "
                f"{projected.ratio:.1f} |"
            )
    ratios = {read: sorted(one.ratio for one in found if one.read == read) for read in READS}
    absorbed_median, worst = statistics.median(ratios[READS[0]]), ratios[READS[0]][-1]
    met = sum(ratio <= TARGET for ratio in ratios[READS[0]])
    return Section(
        title,
        f"OPT-125M shapes, float32, random weights, blocks of 32, on CPU ({ran} "
        f"{soft['jaxserve']}). Each step is timed in turns with the KV step of the same engine; "
        f"medians. `{COMMAND}` measures them.",
        [
            Row(
                f"ours to reach: absorbed at most {TARGET} times the KV step",
                f"{absorbed_median:.2f} times in the median, {worst:.2f} at worst; {met} of "
                f"{len(ratios[READS[0]])} shapes reach it",
                _WHY_ABSORBED if worst > TARGET else "",
            ),
            Row(
                "projecting costs 2 H² multiply-adds a cached token and layer (section 3.1)",
                f"{ratios[READS[1]][0]:.1f} to {ratios[READS[1]][-1]:.1f} times the KV step",
                "As expected: every cached vector is projected again for every new token.",
            ),
        ],
        [],
        ["\n".join(lines)],
    )


_WHY_ABSORBED = (
    "Half the bytes are read, but with twelve heads over one vector the sums take H multiply-adds "
    "a head instead of H / 12, and Wk and Wv are applied once more a step. On two cores that is "
    "not hidden behind the memory."
)
