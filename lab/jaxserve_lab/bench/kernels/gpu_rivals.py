"""Decode attention by backends other than the default: are they correct, and faster?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jaxserve.pallas_kernels import KV
from jaxserve.pallas_kernels.backends import select_backend
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.device_timing import measure
from jaxserve_lab.bench.kernels.kernel_cases import Workload, decode_case
from jaxserve_lab.bench.kernels.kernel_checks import Check, check_decodes
from jaxserve_lab.bench.kernels.kernel_inputs import Heads
from jaxserve_lab.bench.kernels.kernels import Measured

FLAG = "--config.engine.attention_backend"


@dataclass(frozen=True)
class Trial:
    """Decode attention with a model's shape by another backend.

    Attributes:
        model: The model with this shape.
        backend: The tried backend.
        why: Why it was not run; "" if it was.
        wrong: Number of failed checks.
        seconds: Time of a call.
        own: Time of the same call by the default backend; 0 if not measured.
    """

    model: str
    backend: str
    why: str = ""
    wrong: int = 0
    seconds: float = 0.0
    own: float = 0.0

    @property
    def verdict(self) -> str:
        """Whether to serve with it."""
        if self.why:
            return f"not run: {self.why}"
        if self.wrong:
            return f"**wrong** in {self.wrong} checks: not to be served with"
        if not (self.seconds > 0 and self.own > 0):
            return "not compared"
        ratio = self.own / self.seconds
        if ratio > 1:
            return f"{ratio:.2f} times as fast: `{FLAG}={self.backend}`"
        return f"{ratio:.2f} times as fast: stay"


def run_trials(
    backends: Sequence[str],
    models: Sequence[str],
    work: Workload,
    measured: Sequence[Measured],
    *,
    dtypes: Sequence[str],
    shapes: Sequence[Heads],
    tell: Callable[[str], None],
) -> Iterator[Trial]:
    """Checks and times other backends' decode attention: one trial for each backend and model.

    Args:
        backends: The backends to try.
        models: Presets whose shapes to try.
        work: The batches to time.
        measured: Times of the default backend, for comparison.
        dtypes: Dtypes of the checks.
        shapes: Heads of the checks.
        tell: Prints a line of progress.
    """
    own = {
        one.model: one.seconds
        for one in measured
        if one.kernel == "decode attention" and one.dtype == work.dtype
    }
    for backend in backends:
        checks: list[Check] | None = None
        for model in models:
            heads = inputs.model_heads(model)
            why = _refusal(backend, heads, work)
            if why:
                yield Trial(model, backend, why)
                continue
            if checks is None:
                checks = list(check_decodes(backend, dtypes, shapes))
            wrong = sum(not check.passed for check in checks if not check.why)
            sizes = (work.layers, work.blocks, work.block_size, jnp.dtype(work.dtype))
            timing = measure(
                decode_case(heads, work, backend).make(inputs.random_pool(heads, *sizes))
            )
            trial = Trial(model, backend, "", wrong, timing.seconds, own.get(model, 0.0))
            tell(f"{model}, decode attention by {backend}: {trial.verdict}")
            yield trial


def _refusal(backend: str, heads: Heads, work: Workload) -> str:
    """Why a backend cannot run decodes with these heads here, or nothing."""
    try:
        select_backend(backend, (KV,), heads.shape(work.block_size, work.dtype))
    except ValueError as error:
        return str(error)
    return ""
