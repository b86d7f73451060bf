"""The rates that a machine's matmuls alone would allow for the comparison, as a line of JSON.

    .venv/bin/python tools/vllm_cpu/matmuls.py --dtype=float32

Only the matmuls of a model's weights as XLA computes them in the engine's steps: no attention, no
norms, no host work. The rates are those of an engine for which all of these are free.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import workload

from jaxserve.models.fused import fused_specs
from jaxserve.models.layers import matmul
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for

CHUNK = 512  # tokens of a step with prompts, as in the presets


def factors(model: str) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """The weight shapes [in, out] that every token of a step is multiplied with, and the shape
    [vocabulary, width] of the output embedding."""
    family = family_for(preset(model))
    config: Any = family.config_from_hf(preset(model))
    specs = fused_specs(family, config, 1)
    layers = [spec.shape for spec in jax.tree.leaves(specs.layers) if len(spec.shape) == 2]
    table = specs.embed_tokens if specs.lm_head is None else specs.lm_head
    return layers, table.shape


def seconds(model: str, dtype: str, tokens: int, rows: int, repeats: int) -> float:
    """Times the matmuls of a step; returns the median.

    Args:
        model: Name of a preset.
        dtype: Dtype of the weights.
        tokens: Tokens of the step.
        rows: Rows with logits.
        repeats: Steps timed, after one that compiles.
    """
    shapes, table_shape = factors(model)
    weights = [jnp.full(shape, 0.01, dtype) for shape in shapes]
    table = jnp.full(table_shape, 0.01, dtype)
    inputs = {wide: jnp.ones((tokens, wide)) for wide, _ in shapes}
    last = jnp.ones((rows, table_shape[1]))

    @jax.jit
    def step(
        inputs: dict[int, jax.Array], last: jax.Array, weights: list[jax.Array], table: jax.Array
    ) -> list[jax.Array]:
        return [
            *(matmul(inputs[w.shape[0]], w)[:1, :1] for w in weights),
            matmul(last, table, transposed=True)[:, :1],
        ]

    times = []
    for _ in range(repeats + 1):  # the first compiles
        begin = time.perf_counter()
        jax.block_until_ready(step(inputs, last, weights, table))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def limit(args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second of all requests at once, and of one alone."""

    def timed(tokens: int, rows: int) -> float:
        return seconds(args.model, args.dtype, tokens, rows, args.repeats)

    count, prompt, output = args.num_requests, args.input_len, args.output_len
    decode, chunk = timed(count, count), timed(CHUNK, min(count, CHUNK // prompt + 1))
    alone, first = timed(1, 1), timed(prompt, 1)
    batch = count * output / (output * decode + count * prompt / CHUNK * chunk)
    return {
        "command": "matmuls",
        "model": args.model,
        "dtype": args.dtype,
        "steps_s": {"decode": decode, "chunk": chunk, "one_row": alone, "one_prompt": first},
        "results": {
            "batch": {"output_tokens_per_s": {"median": batch}},
            "single": {"output_tokens_per_s": {"median": output / (output * alone + first)}},
        },
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the workload, as in bench.py. Exits with 2 on errors."""
    parser = workload.parser(__doc__, 20)
    parser.add_argument("--dtype", choices=workload.DTYPES, default="float32")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the line; returns the exit status."""
    print(json.dumps(limit(parse(argv))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
