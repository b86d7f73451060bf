"""What `jaxserve bench gpu` is to measure, and what it found."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.pallas_kernels.pool import FLOAT8
from jaxserve_lab.bench.kernels.end_to_end import Load, StepSize, StepTime
from jaxserve_lab.bench.kernels.gpu_rivals import Trial
from jaxserve_lab.bench.kernels.kernel_cases import Workload
from jaxserve_lab.bench.kernels.kernel_checks import HEADS, LIMITS, Check
from jaxserve_lab.bench.kernels.kernel_inputs import Heads
from jaxserve_lab.bench.kernels.kernels import Ceilings, Measured
from jaxserve_lab.bench.kernels.products import FORMATS

MINUTES = 9.0
_LLAMA = StepSize("llama-3-8b", context=2048)
STEPS = (
    StepSize("opt-13b"),
    _LLAMA,
    replace(_LLAMA, cache="int8"),
    replace(_LLAMA, quantization="int8"),
    replace(_LLAMA, quantization="int4"),
    replace(_LLAMA, quantization="int4", cache="int8"),
    StepSize("qwen3-30b-a3b", context=2048),
)


@dataclass(frozen=True)
class Plan:
    """What is measured; the defaults are for a GPU with 80 GB or more.

    Attributes:
        backend: of the kernels and the model.
        dtypes: of the checks.
        shapes: heads of the checks.
        models: presets at whose shapes the kernels are timed.
        workload: with which they are timed.
        caches: dtypes of other pools with which attention over K and V is timed.
        formats: of weights in few bits: their products are checked, and timed with `rows` rows.
        rows: of the products that are timed.
        mixtures: presets whose mixtures of experts are timed.
        tokens: of the mixtures that are timed.
        matrix: side of the square matrices for the ceilings.
        steps: the decode steps that are timed.
        load: of the throughput run.
        rivals: other backends whose decode attention is tried.
        minutes: that all of it may take.
    """

    backend: str = "triton"
    dtypes: tuple[str, ...] = tuple(LIMITS)
    shapes: tuple[Heads, ...] = HEADS
    models: tuple[str, ...] = ("opt-13b", "llama-3-8b")
    workload: Workload = field(default_factory=Workload)
    caches: tuple[str, ...] = ("int8", FLOAT8)
    formats: tuple[str, ...] = FORMATS
    rows: tuple[int, ...] = (1, 64, 2048)
    mixtures: tuple[str, ...] = ("qwen3-30b-a3b", "mixtral-8x7b")
    tokens: tuple[int, ...] = (1, 16, 64, 256, 2048)
    matrix: int = 8192
    steps: tuple[StepSize, ...] = STEPS
    load: Load = field(default_factory=lambda: Load("opt-13b"))
    rivals: tuple[str, ...] = ("mosaic-gpu",)
    minutes: float = MINUTES


@dataclass
class Outcome:
    """What was measured.

    Attributes:
        device: its name.
        checks: whether the kernels are right.
        ceilings: what the device does at best; None until measured.
        kernels: their times.
        products: times of products with weights in few bits, whose format is the dtype.
        mixtures: times of a layer's mixture of experts.
        trials: of other backends.
        steps: times of decode steps.
        load: what `runs.throughput` returned.
        seconds: that each section took, by its name.
        left_out: sections for which no time was left.
        broken: the error that ended a section early, by its name.
    """

    device: str
    checks: list[Check] = field(default_factory=list)
    ceilings: Ceilings | None = None
    kernels: list[Measured] = field(default_factory=list)
    products: list[Measured] = field(default_factory=list)
    mixtures: list[Measured] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    load: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Check]:
        """Checks that ran and found an error; a check of what a backend does not take did not
        run."""
        return [check for check in self.checks if not check.passed and not check.why]
