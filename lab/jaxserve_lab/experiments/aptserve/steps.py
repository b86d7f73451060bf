"""How long a decode step takes that reads K and V, or hidden vectors, absorbed or projected: the
engine's own steps, measured on OPT-125M shapes with random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.config import Config
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.configs import opt_125m_cpu
from jaxserve.engine.startup.choices.pool_size import choose_block_size
from jaxserve.engine.startup.step_timer import CHAIN, Shape, StepTimer
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve_lab.experiments.aptserve import measured

ROWS, TOKENS = (1, 8, 32), (512, 1024, 1900)
READS = ("absorbed", "projected")
TARGET = 1.3  # times the KV step, absorbed
ROUNDS, BUDGET_S, SLOW_S = 9, 20.0, 0.5
FILE_NAME = "aptserve_steps.json"
COMMAND = "python -m jaxserve_lab.experiments.aptserve --measure=steps"


@dataclass(frozen=True)
class StepTimes:
    """Decode steps over K and V, and over hidden caches, taken in turns on one engine.

    Attributes:
        read: How hidden caches are read, one of READS.
        rows: Decodes of a step.
        tokens: Cached tokens of each.
        kv, hidden: Median seconds of a step.
    """

    read: str
    rows: int
    tokens: int
    kv: float
    hidden: float

    @property
    def ratio(self) -> float:
        """Time of the hidden step over that of the KV step."""
        return self.hidden / self.kv


def measure(
    rows: Sequence[int] = ROWS,
    tokens: Sequence[int] = TOKENS,
    reads: Sequence[str] = READS,
    base: Config | None = None,
) -> list[StepTimes]:
    """Measures on this machine, with an engine for each way of reading.

    Args:
        rows: Decodes of a step, ascending.
        tokens: Cached tokens of each decode, ascending.
        reads: Ways of reading hidden caches.
        base: The configuration to start from; None for `opt_125m_cpu`.
    """
    # Imported late: jax takes seconds, and the page can be written without it.
    from jaxserve.engine.startup.build import build_engine

    base = base or config_from_config_dict(opt_125m_cpu.get_config())
    found = []
    for read in reads:
        engine = build_engine(_config(base, read, rows, tokens), progress=False)
        info = engine.info()
        timer = StepTimer(engine.executor, info.num_blocks, info.vocab_size)
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


def said(path: Path) -> dict[str, Any]:
    """What a page needs of the measurements; empty if there is no such file. ValueError if the file
    holds something else."""
    content = measured.read(path, steps=StepTimes)
    if not content:
        return {}
    absorbed_ratios, projected_ratios = (
        sorted(one.ratio for one in content["steps"] if one.read == read) for read in READS
    )
    return {
        "where": f"{content['where']}, jaxserve {content['versions']['jaxserve']}",
        "target": TARGET,
        "median": statistics.median(absorbed_ratios),
        "worst": absorbed_ratios[-1],
        "met": sum(ratio <= TARGET for ratio in absorbed_ratios),
        "shapes": len(absorbed_ratios),
        "projected": (projected_ratios[0], projected_ratios[-1]),
    }
