"""Whether a CPU multiplies bfloat16 faster than float32."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.models.layers import matmul

INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # Linux's names, x86 and Arm
ROWS, WIDTH = 32, 1024  # of the probe: a decode step of a small model
ROUNDS = 20
GAIN = 1.1


def has_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has products of bfloat16. False where Linux does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = (line.partition(":") for line in lines)
    found = (value.split() for key, _, value in flags if key.strip() in ("flags", "Features"))
    return not INSTRUCTIONS.isdisjoint(next(found, []))


def measured_gain() -> float:
    """Seconds of a float32 matmul over those of a mixed one, see `layers.matmul`: the fastest of
    some of each, in turns, so that other work on the machine does not decide."""
    x = jnp.ones((ROWS, WIDTH), jnp.float32)
    run = jax.jit(matmul)
    wide, narrow = (jnp.ones((WIDTH, WIDTH), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    best = {"wide": float("inf"), "narrow": float("inf")}
    for _ in range(ROUNDS + 1):  # the first of each compiles, and is never the fastest
        for name, weights in (("wide", wide), ("narrow", narrow)):
            begin = time.perf_counter()
            run(x, weights).block_until_ready()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best["wide"] / best["narrow"]


@cache
def bfloat16_pays(
    supported: Callable[[], bool] = has_instructions, gain: Callable[[], float] = measured_gain
) -> bool:
    """Whether to serve with weights of bfloat16: the instructions are there, and what XLA makes of
    them is faster. Found out once a process."""
    return supported() and gain() >= GAIN
