"""How fast a CPU multiplies a model's weights: our kernels against XLA, and the memory's read rate.

    jaxserve bench matmuls
    jaxserve bench matmuls --model=qwen2.5-0.5b --dtypes=bfloat16 --rows=1,16,512 --json

Both sides use all cores and take turns. XLA has the weights as [in, out] or [out, in], whichever is
faster. Copies of a weight take turns, so that they come from memory, as in a model. Run nothing
else meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.command import BenchParser
from jaxserve.command_line import print_result
from jaxserve.machine import machine, versions
from jaxserve.models.fused import fused_specs
from jaxserve.models.layers import matmul
from jaxserve.models.presets import preset, preset_names
from jaxserve.models.registry import family_for

ROWS = (1, 16, 32, 64, 128, 512, 2048)
DTYPES = ("bfloat16", "float32")
_MEMORY = 512 << 20  # bytes of a weight's copies: more than any processor's last cache
_LEAST_S = 0.05  # of a measurement
Product = Callable[[jax.Array, jax.Array], jax.Array]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line; argparse exits on errors."""
    parser = BenchParser("matmuls", description=__doc__)
    parser.add_argument("--model", choices=preset_names(), default="opt-125m", help="a preset")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of %(default)s")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="(%(default)s)")
    parser.number("rounds", 5, "measurements a median")
    args: argparse.Namespace = parser.parse_args(argv)
    parser.check(args)
    try:
        args.dtypes, args.rows = args.dtypes.split(","), [int(n) for n in args.rows.split(",")]
        if not set(args.dtypes) <= set(DTYPES) or min(args.rows) < 1:
            raise ValueError(f"--dtypes are of {', '.join(DTYPES)}, --rows at least 1")
    except ValueError as error:
        parser.error(str(error))
    return args


def show(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    measured = [
        measure(shape, dtype, rows, args.rounds)
        for dtype, shape in itertools.product(args.dtypes, shapes(args.model))
        for rows in args.rows
    ]
    rate = read_rate(args.rounds)
    result = {
        "command": "matmuls",
        "model": args.model,
        "machine": machine(),
        "versions": versions(),
        "matmuls": measured,
        "read_gb_per_s": rate,
    }
    print_result(args, table(measured) + f"\n\nMemory is read at {rate:.1f} GB/s.", result)
    return 0


def shapes(model: str) -> list[tuple[int, int]]:
    """The different shapes [in, out] of a layer's weights, as a step multiplies them."""
    family = family_for(preset(model))
    config: Any = family.config_from_hf(preset(model))
    leaves = jax.tree.leaves(fused_specs(family, config, 1).layers)
    return list(dict.fromkeys(leaf.shape for leaf in leaves if len(leaf.shape) == 2))


def measure(shape: tuple[int, int], dtype: str, rows: int, rounds: int) -> dict[str, Any]:
    """Times one product on both sides.

    Args:
        shape: Of the weights, [in, out].
        dtype: Of the weights; x is float32, as between an engine's layers.
        rows: Of x.
        rounds: Measurements; all sides are measured in each.

    Returns:
        GFLOP/s of each side by the median time, and their ratio by the median of the rounds.
    """
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, shape[0]), np.float32))
    sides = {
        "ours": _timer(_ours, x, shape[::-1], dtype),
        "xla [in, out]": _timer(_xla(0), x, shape, dtype),
        "xla [out, in]": _timer(_xla(1), x, shape[::-1], dtype),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, timed in sides.items():
            times[name].append(timed())
    best = min(list(sides)[1:], key=lambda name: statistics.median(times[name]))
    work = 2 * rows * shape[0] * shape[1] / 1e9
    ours, xla = (work / statistics.median(times[name]) for name in ("ours", best))
    ratios = [theirs / mine for mine, theirs in zip(times["ours"], times[best], strict=True)]
    ratio = statistics.median(ratios)
    return {"dtype": dtype, "shape": shape, "rows": rows, "ours": ours, "xla": xla, "ratio": ratio}


def _ours(x: jax.Array, weights: jax.Array) -> jax.Array:
    return matmul(x, weights, transposed=True)


def _xla(contracted: int) -> Product:
    """XLA's product over that axis of the weights. It rounds x as our kernels do."""

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        numbers = (((1,), (contracted,)), ((), ()))
        x = x.astype(weights.dtype)
        return jax.lax.dot_general(x, weights, numbers, preferred_element_type=jnp.float32)

    return product


def _timer(
    product: Product, x: jax.Array, shape: tuple[int, int], dtype: str
) -> Callable[[], float]:
    """A function that measures the seconds of one product, warmed up.

    Args:
        product: What to time.
        x: Its rows.
        shape: Of the weights, as the product has them.
        dtype: Of the weights.
    """
    drawn = np.random.default_rng(1).standard_normal(shape, np.float32)
    one = jnp.asarray(drawn, dtype)
    copies = itertools.cycle([one.copy() for _ in range(1 + _MEMORY // one.nbytes)])
    run = jax.jit(product)

    def timed(count: int) -> float:
        begin = time.perf_counter()
        for weights in itertools.islice(copies, count):
            run(x, weights).block_until_ready()
        return (time.perf_counter() - begin) / count

    timed(2)  # compiles
    count = max(1, round(_LEAST_S / timed(3)))
    return lambda: timed(count)


def read_rate(rounds: int) -> float:
    """The best rate at which all cores together read memory, GB/s."""
    cores = len(os.sched_getaffinity(0))
    parts = np.ones((cores, _MEMORY // 4), np.float32)

    with ThreadPoolExecutor(cores) as threads:

        def seconds() -> float:
            begin = time.perf_counter()
            list(threads.map(np.max, parts))  # NumPy lets the other threads run
            return time.perf_counter() - begin

        seconds()
        return parts.nbytes / 1e9 / min(seconds() for _ in range(rounds))


def table(measured: Sequence[dict[str, Any]]) -> str:
    """Markdown, a row for each dtype and shape, as in docs/performance.md."""
    rows = list(dict.fromkeys(one["rows"] for one in measured))

    def lines() -> Iterator[Sequence[str]]:
        yield ["GFLOP/s (over XLA's)", *(f"{n:,} rows" if n > 1 else "1 row" for n in rows)]
        yield ["---"] * (1 + len(rows))
        for (dtype, shape), group in itertools.groupby(
            measured, lambda one: (one["dtype"], one["shape"])
        ):
            cells = (f"{one['ours']:.0f} ({one['ratio']:.2f})" for one in group)
            yield [f"{dtype}, {shape[0]:,} x {shape[1]:,}", *cells]

    return "\n".join("| " + " | ".join(line) + " |" for line in lines())
