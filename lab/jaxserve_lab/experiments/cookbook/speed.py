"""How fast a model is on this machine. Speed does not depend on weights, so they are random."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.output import Timings
from jaxserve.machine import machine, versions
from jaxserve.offline.llm import LLM
from jaxserve.sched.request import SamplingParams

PROMPT, OUTPUT, STREAMS, TIMES = 512, 64, 8, 3


@dataclass(frozen=True)
class Speed:
    """What is measured of a preset.

    Attributes:
        preset: Its name.
        weights: Dtype or quantisation of its weights.
        ttft_ms: Of a prompt of PROMPT tokens, alone.
        one: Tokens/s of one stream, after its first token.
        streams: Tokens/s of STREAMS streams together, prompts included.
        machine: Processor, cores, version of jax.
    """

    preset: str
    weights: str
    ttft_ms: int
    one: float
    streams: float
    machine: str


def measure(preset: str, quantization: str) -> Speed:
    """Medians of TIMES runs, after one that warms up.

    Args:
        preset: Of `jaxserve.models.presets`.
        quantization: Of the weights; "" for none.
    """
    length = PROMPT + OUTPUT
    fields: dict[str, Any] = {
        "model__preset": preset,
        "model__load_format": "random",
        "model__dtype": "bfloat16",
        "model__quantization": quantization,
        "cache__prefix_caching": False,
        "cache__block_size": 16,
        "cache__num_blocks": (STREAMS + 1) * length // 16,
        "engine__max_model_len": length,
    }
    with LLM(**fields) as llm:

        def runs(streams: int) -> list[tuple[float, Timings]]:
            """Of each run its seconds and when the tokens of its first stream came."""
            prompts = [[(7 * i + 31 * n) % 1000 + 3 for i in range(PROMPT)] for n in range(streams)]
            asked, found = SamplingParams(max_tokens=OUTPUT, ignore_eos=True), []
            for _ in range(TIMES + 1):
                begin = time.perf_counter()
                first = llm.generate(prompts, asked, progress=False)[0].outputs[0]
                assert first.timings is not None
                found.append((time.perf_counter() - begin, first.timings))
            return found[1:]

        alone = [timings for _, timings in runs(1)]
        first = statistics.median(timings.ttft for timings in alone)
        gap = statistics.median(timings.tbt_mean for timings in alone if timings.tbt_mean)
        together = statistics.median(seconds for seconds, _ in runs(STREAMS))
    here = machine()
    return Speed(
        preset=preset,
        weights=quantization or "bfloat16",
        ttft_ms=round(1e3 * first),
        one=round(1 / gap, 1),
        streams=round(STREAMS * OUTPUT / together, 1),
        machine=f"{here['cpu']}, {here['cores']} cores, jax {versions()['jax']}",
    )
