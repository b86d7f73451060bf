"""Seconds of work on the device: many calls inside one compiled loop, to exclude launching, and the
difference between two lengths of the loop, to exclude its start and end.

On an NVIDIA GPU the clock is CUPTI's, the device's timestamps at each kernel's start and end;
elsewhere, or if CUPTI does not work, the host's.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

SHORT = 2  # calls in the shorter loop
MOST = 128  # most additional calls in the longer one
LEAST_SEEN = 0.2  # of the host's seconds; CUPTI may miss kernels, such as in CUDA graphs
DEVICE, HOST = "cupti", "host clock"
_CUPTI = "jax._src.lib.mosaic_gpu"  # jax has no public door to it


@dataclass(frozen=True)
class Timing:
    """How long a call of a `Loop` takes.

    Attributes:
        seconds: Time of a call.
        clock: The clock, DEVICE or HOST.
        host_seconds: The same by the host's clock, as a cross-check.
    """

    seconds: float
    clock: str
    host_seconds: float


@dataclass
class Loop:
    """A kernel to be called again and again.

    Attributes:
        step: step(i, carry, inputs) -> carry. The traced int32 i counts the calls; it selects a
            layer or a set of inputs, so that data of the previous call in a cache does not help.
            carry: The first call's carry; donated. inputs: The same for all calls.
    """

    step: Callable[[jax.Array, Any, Any], Any]
    carry: Any
    inputs: Any

    def compiled(self, calls: int) -> Callable[[], None]:
        """Compiles a loop of that many calls. The returned function runs it and waits."""

        def body(carry: Any, inputs: Any) -> Any:
            return jax.lax.fori_loop(0, calls, lambda i, c: self.step(i, c, inputs), carry)

        run = jax.jit(body, donate_argnums=0)

        def once() -> None:
            self.carry = jax.block_until_ready(run(self.carry, self.inputs))

        once()
        return once


def measure(loop: Loop, *, budget: float = 0.3, repeats: int = 5) -> Timing:
    """Times a call: the median of some repeats, each of about `budget` seconds on a fast device."""
    short = loop.compiled(SHORT)
    rough = max(_host_seconds(short) / SHORT, 1e-7)
    more = int(min(max(budget / rough, SHORT), MOST))
    long = loop.compiled(SHORT + more)
    host = _difference(_host_seconds, short, long, more, repeats)
    device = _difference(_device_seconds, short, long, more, repeats) if has_cupti() else 0.0
    seen = device > LEAST_SEEN * host
    return Timing(device if seen else host, DEVICE if seen else HOST, host)


def has_cupti() -> bool:
    """Whether the device itself can time kernels."""
    return jax.default_backend() == "gpu" and _cupti() is not None


def _difference(
    clock: Callable[[Callable[[], None]], float],
    short: Callable[[], None],
    long: Callable[[], None],
    more: int,
    repeats: int,
) -> float:
    pairs = [(clock(short), clock(long)) for _ in range(repeats)]
    return max(statistics.median(b - a for a, b in pairs) / more, 0.0)


def _host_seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _device_seconds(run: Callable[[], None]) -> float:
    """Sum of the run's kernels; 0 if CUPTI reports none."""
    cupti = _cupti()
    if cupti is None:
        return 0.0
    cupti._cupti_init()
    try:
        run()
    finally:
        kernels = cupti._cupti_get_timings(True)
    return sum(milliseconds for _, milliseconds in kernels or ()) / 1e3


def _cupti() -> Any:
    """jaxlib's extension that talks to CUPTI, or None."""
    try:
        module = importlib.import_module(_CUPTI)
    except ImportError:
        return None
    extension = getattr(module, "_mosaic_gpu_ext", None)
    return extension if hasattr(extension, "_cupti_get_timings") else None
