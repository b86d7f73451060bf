"""How fast the kernels are, relative to the device's best rates.

    jaxserve bench kernels
    jaxserve bench kernels --model=tiny --rows=2 --context=64 --prefill=64 --moves=16
    jaxserve bench kernels --backend=xla --json

Only necessary bytes and operations count: what a kernel does beyond them lowers its rate. Ceilings
are measured in the same run: scaling an array in place, and a square matrix product. See
device_timing.py for the clock. The default sizes are for a GPU; on a CPU use small ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxserve.bench.command import BenchParser
from jaxserve.machine import machine, versions
from jaxserve.pallas_kernels import HIDDEN, KV
from jaxserve.pallas_kernels.backends import select_backend
from jaxserve.pallas_kernels.pool import POOL_DTYPES
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.device_timing import Loop, Timing, measure
from jaxserve_lab.bench.kernels.kernel_cases import KernelCase, Workload, cases

MODELS = "opt-13b,llama-3-8b"
Tell = Callable[[str], None]
Progress = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True)
class Ceilings:
    """The device's best rates.

    Attributes:
        copy: Bytes/s of a copy, read and written.
        matmul: Operations/s of a matrix product in the kernels' dtype.
    """

    copy: float
    matmul: float


@dataclass(frozen=True)
class Measured:
    """A kernel, timed with one shape.

    Attributes:
        model: The model with this shape.
        kernel: Its name.
        shape: Its shape, in words.
        dtype: Dtype of the pool.
        backend: The backend that ran it.
        seconds, clock, host_seconds: As in `Timing`.
        bytes_per_s: Rate of necessary bytes.
        flop_per_s: Rate of necessary operations.
        copy_share: bytes_per_s over the ceiling of a copy.
        matmul_share: flop_per_s over the ceiling of a matrix product.
    """

    model: str
    kernel: str
    shape: str
    dtype: str
    backend: str
    seconds: float
    clock: str
    host_seconds: float
    bytes_per_s: float
    flop_per_s: float
    copy_share: float
    matmul_share: float


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line; argparse exits on errors."""
    parser = BenchParser("kernels", description=__doc__)
    parser.add_argument("--model", default=MODELS, help="presets, or tiny (%(default)s)")
    parser.add_argument("--backend", default="auto", help="attention backend (%(default)s)")
    parser.add_argument("--dtype", choices=POOL_DTYPES, default=Workload.dtype, help="%(default)s")
    for name, default in asdict(Workload()).items():
        if name != "dtype":
            parser.number(name, default, "")
    parser.number("matrix", 8192, "ceilings: its side")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        parser.check(args)
        args.model = args.model.split(",")
        for model in args.model:
            inputs.model_heads(model)
    except ValueError as error:
        parser.error(str(error))
    return args


def show(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    out = sys.stderr if args.json else sys.stdout

    shown = sys.stderr.isatty()

    def tell(text: str) -> None:
        tqdm.write(text, file=out)
        out.flush()

    def bar(work: Iterable[Any]) -> Iterable[Any]:
        return tqdm(work, desc="measuring", unit="kernel", disable=not shown)

    if shown:
        print("measuring the rates of a copy and a matrix product", file=sys.stderr, flush=True)
    work = Workload(**{item.name: getattr(args, item.name) for item in fields(Workload)})
    try:
        ceilings, timings = run(args.model, work, args.backend, args.matrix, tell, bar)
    except ValueError as error:  # a backend that does not support the shape
        print(f"jaxserve bench: {error}", file=sys.stderr)
        return 2
    if args.json:
        about = {"machine": machine(), "versions": versions(), "device": device_name()}
        result = {
            "command": "kernels",
            "workload": asdict(work),
            **about,
            **as_json(ceilings, timings),
        }
        print(json.dumps(result, allow_nan=False), flush=True)
    return 0


def run(
    models: Sequence[str],
    work: Workload,
    backend: str,
    matrix: int,
    tell: Tell,
    progress: Progress = iter,
    *,
    ceilings: Ceilings | None = None,
    only: Sequence[str] = (),
) -> tuple[Ceilings, list[Measured]]:
    """Measures the ceilings, then every kernel of every model.

    Args:
        models: Presets, or "tiny".
        work: The batches to time.
        backend: A backend's name, or "auto".
        matrix: Side of the square matrices for the ceilings.
        tell: Prints a line.
        progress: Wraps the list of kernels, as tqdm does.
        ceilings: Ceilings that were measured before; None to measure them.
        only: Names of the kernels; none for all.

    Raises:
        ValueError: A named backend does not support a model's shape.
    """
    dtype, wide = jnp.dtype(work.dtype), inputs.activations(work.dtype)
    planned = [item for model in models for item in _planned(model, work, backend, tell, only)]
    ceilings = ceilings or measure_ceilings(matrix, wide)
    tell(
        f"{device_name()}: copy {ceilings.copy / 1e9:,.1f} GB/s, {wide.name} matrix product "
        f"{ceilings.matmul / 1e12:,.3f} TFLOP/s"
    )
    tell(HEAD)
    timings = []
    for model, heads, chosen, case in progress(planned):
        pool = inputs.random_pool(heads, work.layers, work.blocks, work.block_size, dtype)
        timing = measure(case.make(pool))
        timings.append(measured(model, case, work.dtype, chosen, timing, ceilings))
        tell(line(timings[-1]))
    return ceilings, timings


def _planned(
    model: str, work: Workload, backend: str, tell: Tell, only: Sequence[str]
) -> list[tuple[str, inputs.Heads, str, KernelCase]]:
    """The cases of a model, with their backend."""
    heads = inputs.model_heads(model)
    kinds = (KV, HIDDEN) if heads.offers_hidden else (KV,)
    chosen, reason = select_backend(backend, kinds, heads.shape(work.block_size, work.dtype))
    if reason:
        tell(f"{model}: {reason}; measuring {chosen}")
    planned = cases(heads, work, chosen)
    return [(model, heads, chosen, case) for case in planned if not only or case.name in only]


def measure_ceilings(matrix: int, dtype: jnp.dtype) -> Ceilings:
    """Measures on arrays of [matrix, matrix]; the copied one is 8 times as large."""
    wide = inputs.vectors((8 * matrix, matrix), dtype, 5)

    def scale(i: jax.Array, a: jax.Array, by: jax.Array) -> jax.Array:
        return a * by

    copied = measure(Loop(scale, wide, jnp.asarray(-1, dtype)))
    a = inputs.vectors((matrix, matrix), dtype, 6)
    b = inputs.vectors((matrix, matrix), dtype, 7) * jnp.asarray(matrix**-0.5, dtype)

    def multiply(i: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return a @ b

    multiplied = measure(Loop(multiply, a, b))
    size = 2 * 8 * matrix * matrix * dtype.itemsize
    return Ceilings(size / _positive(copied), 2 * matrix**3 / _positive(multiplied))


def _positive(timing: Timing) -> float:
    """Divides; 0 if the clock measured nothing."""
    return max(timing.seconds, 1e-9)


def measured(
    model: str, case: KernelCase, dtype: str, backend: str, timing: Timing, ceilings: Ceilings
) -> Measured:
    """A case's time relative to the device's best rates.

    Args:
        model: The model with this shape.
        case: The timed case.
        dtype: Dtype of the pool, or format of weights.
        backend: The backend that ran it; "" for none.
        timing: Its time.
        ceilings: The device's best rates.
    """
    seconds = _positive(timing)
    moved, done = case.moved / seconds, case.operations / seconds
    return Measured(
        model=model,
        kernel=case.name,
        shape=case.shape,
        dtype=dtype,
        backend=backend,
        seconds=timing.seconds,
        clock=timing.clock,
        host_seconds=timing.host_seconds,
        bytes_per_s=moved,
        flop_per_s=done,
        copy_share=moved / ceilings.copy,
        matmul_share=done / ceilings.matmul,
    )


def device_name() -> str:
    """The name of the device."""
    return str(jax.devices()[0].device_kind)


HEAD = (
    f"{'model':<12}{'kernel':<26}{'shape':<24}{'dtype':<20}{'us':>10}{'GB/s':>9}{'of copy':>9}"
    f"{'TFLOP/s':>9}{'of matmul':>11}"
)


def line(one: Measured) -> str:
    """One kernel's line of the table under `HEAD`."""
    done = f"{one.flop_per_s / 1e12:>9.3f}{one.matmul_share:>11.1%}" if one.flop_per_s else ""
    return (
        f"{one.model:<12}{one.kernel:<26}{one.shape:<24}{one.dtype:<20}{one.seconds * 1e6:>10.1f}"
        f"{one.bytes_per_s / 1e9:>9.1f}{one.copy_share:>9.1%}{done}"
    )


def as_json(ceilings: Ceilings, found: Sequence[Measured]) -> dict[str, Any]:
    """The measurements as JSON objects."""
    return {"ceilings": asdict(ceilings), "kernels": [asdict(one) for one in found]}
