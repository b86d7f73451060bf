"""The plan and the results of `jaxserve bench gpu`."""

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
from jaxserve_lab.bench.kernels.products import CONTENDERS, FORMATS

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
    """The plan of measurements; the defaults are for a GPU with 80 GB or more.

    Attributes:
        backend: Backend of the kernels and the model.
        dtypes: Dtypes of the checks.
        shapes: Heads of the checks.
        models: Presets with whose shapes the kernels are timed.
        workload: Batches with which they are timed.
        caches: Dtypes of other pools with which attention over K and V is timed.
        formats: Formats of quantised weights whose products are checked, and timed with `rows`.
        rows: Rows of the timed products.
        contenders: Of `products.CONTENDERS`, also checked, and timed with `many_rows`.
        many_rows: See there.
        mixtures: Presets whose mixtures of experts are timed.
        tokens: Tokens of the timed mixtures.
        matrix: Side of the square matrices for the ceilings.
        steps: The timed decode steps.
        load: The throughput run.
        rivals: Other backends whose attention is tried.
        minutes: Time limit for everything.
    """

    backend: str = "triton"
    dtypes: tuple[str, ...] = tuple(LIMITS)
    shapes: tuple[Heads, ...] = HEADS
    models: tuple[str, ...] = ("opt-13b", "llama-3-8b")
    workload: Workload = field(default_factory=Workload)
    caches: tuple[str, ...] = ("int8", FLOAT8)
    formats: tuple[str, ...] = FORMATS
    rows: tuple[int, ...] = (1, 64, 2048)
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    many_rows: tuple[int, ...] = (512, 1024, 2048)
    mixtures: tuple[str, ...] = ("qwen3-30b-a3b", "mixtral-8x7b")
    tokens: tuple[int, ...] = (1, 16, 64, 256, 2048)
    matrix: int = 8192
    steps: tuple[StepSize, ...] = STEPS
    load: Load = field(default_factory=lambda: Load("opt-13b"))
    rivals: tuple[str, ...] = ("mosaic-gpu",)
    minutes: float = MINUTES


@dataclass
class Outcome:
    """The results.

    Attributes:
        device: Its name.
        checks: Results of the kernels' checks.
        ceilings: The device's best rates; None until measured.
        kernels: The kernels' times.
        products: Times of products with quantised weights, with the format as dtype.
        contended: The same by each contender.
        mixtures: Times of a layer's mixture of experts.
        trials: Trials of other backends.
        steps: Times of decode steps.
        load: The result of `runs.throughput`.
        seconds: Time of each section, by its name.
        left_out: Sections for which there was no time.
        broken: Errors that ended sections early, by name.
    """

    device: str
    checks: list[Check] = field(default_factory=list)
    ceilings: Ceilings | None = None
    kernels: list[Measured] = field(default_factory=list)
    products: list[Measured] = field(default_factory=list)
    contended: list[Measured] = field(default_factory=list)
    mixtures: list[Measured] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    load: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Check]:
        """Checks that ran and found an error; checks of unsupported cases did not run."""
        return [check for check in self.checks if not check.passed and not check.why]
