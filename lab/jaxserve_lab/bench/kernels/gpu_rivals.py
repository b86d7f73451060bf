"""Attention by backends other than the default: are they correct, and faster?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jaxserve.pallas_kernels import KV
from jaxserve.pallas_kernels.backends import select_backend
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.device_timing import measure
from jaxserve_lab.bench.kernels.kernel_cases import (
    KernelCase,
    Workload,
    decode_case,
    narrowed,
    prefill_case,
)
from jaxserve_lab.bench.kernels.kernel_checks import Check, check_paged
from jaxserve_lab.bench.kernels.kernel_inputs import Heads
from jaxserve_lab.bench.kernels.kernels import Measured

FLAG = "--config.engine.attention_backend"


@dataclass(frozen=True)
class Trial:
    """Attention with a model's shape by another backend.

    Attributes:
        model: The model with this shape.
        kernel: Which steps: "decode attention" or "prefill attention", with the pool's dtype if it
            is not the workload's.
        backend: The tried backend.
        why: Why it was not run; "" if it was.
        wrong: Number of failed checks.
        seconds: Time of a call.
        own: Time of the same call by the default backend; 0 if not measured.
    """

    model: str
    kernel: str
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
    caches: Sequence[str],
    measured: Sequence[Measured],
    *,
    dtypes: Sequence[str],
    shapes: Sequence[Heads],
    tell: Callable[[str], None],
) -> Iterator[Trial]:
    """Checks and times other backends' attention: one trial for each backend, model and kernel.

    Args:
        backends: The backends to try.
        models: Presets whose shapes to try.
        work: The batches to time.
        caches: Other dtypes of pools, with which decodes are tried, too.
        measured: Times of the default backend, for comparison.
        dtypes: Dtypes of the checks.
        shapes: Heads of the checks.
        tell: Prints a line of progress.
    """
    own = {(one.model, one.kernel, one.dtype): one.seconds for one in measured}
    for backend in backends:
        checks: list[Check] | None = None
        for model, (case_of, dtype) in itertools.product(models, _tried(work, caches)):
            heads, sized = inputs.model_heads(model), narrowed(work, dtype)
            case = case_of(heads, sized, backend)
            name = case.name if dtype == work.dtype else f"{case.name}, {dtype}"
            why = _refusal(backend, heads, sized)
            if why:
                yield Trial(model, name, backend, why)
                continue
            if checks is None:
                checks = list(check_paged(backend, dtypes, shapes))
            wrong = sum(not check.passed for check in checks if not check.why)
            sizes = (sized.layers, sized.blocks, sized.block_size, jnp.dtype(dtype))
            timing = measure(case.make(inputs.random_pool(heads, *sizes)))
            before = own.get((model, case.name, dtype), 0.0)
            trial = Trial(model, name, backend, "", wrong, timing.seconds, before)
            tell(f"{model}, {name} by {backend}: {trial.verdict}")
            yield trial


def _tried(work: Workload, caches: Sequence[str]) -> list[tuple[Callable[..., KernelCase], str]]:
    """The kernels that are tried, each with the dtype of the pool."""
    decodes = [(decode_case, dtype) for dtype in (work.dtype, *caches)]
    return [*decodes, (prefill_case, work.dtype)]


def _refusal(backend: str, heads: Heads, work: Workload) -> str:
    """Why a backend cannot attend with these heads here, or nothing."""
    try:
        select_backend(backend, (KV,), heads.shape(work.block_size, work.dtype))
    except ValueError as error:
        return str(error)
    return ""
