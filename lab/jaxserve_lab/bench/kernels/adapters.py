"""The cost of adapters (LoRA) for half of a decode step's rows, compared with the step without.

    jaxserve bench adapters
    jaxserve bench adapters --model=opt-125m --dtype=bfloat16 --adapters=8 --rank=16
    jaxserve bench adapters --loras=16 --json

Both are the engine's own steps with random weights. They take turns, so that drift of
the machine affects both.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.command import BenchParser
from jaxserve.command_line import print_result
from jaxserve.config import LoraConfig
from jaxserve.engine.device.batch_layout import Layout, Rows
from jaxserve.engine.device.model_step import make_model_step
from jaxserve.engine.device.sampling_state import Newest
from jaxserve.engine.device.step_model import StepModel, activations_in, cached_in
from jaxserve.engine.startup.choices.model_options import lora_slots
from jaxserve.machine import machine, versions
from jaxserve.models.lora import (
    Layers,
    adapter_specs,
    bucket,
    empty_adapter,
    make_adapters,
    make_put,
)
from jaxserve.models.registry import get_family
from jaxserve.pallas_kernels import KV, pool_format, skips_columns
from jaxserve.pallas_kernels.backends import resolve_backend
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.server.startup.launch import UsageError
from jaxserve.weights import fuse_loaded, load_params, transpose_loaded
from jaxserve_lab.bench.kernels import kernel_inputs as inputs

BLOCK = 16
DTYPES = ("float32", "bfloat16", "float16")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line. Raises UsageError."""
    parser = BenchParser("adapters", description=__doc__)
    parser.add_argument("--model", default="opt-125m", help="a preset, or tiny (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="%(default)s")
    parser.number("rows", 16, "rows of the step, every other one with an adapter", least=2)
    parser.number("context", 128, "cached tokens of each row")
    parser.number("adapters", 4, "adapters, used by these rows in turns")
    parser.number("rank", 16, "of each")
    parser.number("loras", 0, "lora.max_loras; 0: as many as adapters", least=0)
    parser.number("max_rank", 16, "lora.max_rank")
    parser.number("repeats", 15, "pairs of runs, of 5 steps each")
    args = parser.parse_args(argv)
    parser.check(args)
    try:
        inputs.model_config(args.model)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from None
    args.loras = args.loras or args.adapters
    if args.adapters > args.loras or args.rank > args.max_rank:
        raise UsageError("--adapters and --rank may not be more than --loras and --max_rank")
    return args


def show(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    base, adapted = measure(args)
    ratio = statistics.median(b / a for a, b in zip(base, adapted, strict=True))
    lines = (
        f"{args.model}, {args.dtype}, {args.rows} rows of {args.context} tokens, half of them with "
        f"one of {args.adapters} adapters of rank {args.rank}, room for {args.loras} of "
        f"{args.max_rank}\n"
        f"without {1e3 * statistics.median(base):.2f} ms per step, with "
        f"{1e3 * statistics.median(adapted):.2f} ms, ratio {ratio:.3f}"
    )
    result = {
        "command": "adapters",
        "workload": {k: v for k, v in vars(args).items() if k not in ("command", "json")},
        "results": {"base_s": base, "adapted_s": adapted, "ratio": ratio},
        "machine": machine(),
        "versions": versions(),
    }
    print_result(args, lines, result)
    return 0


def measure(args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of a step without and with adapters, for each pair of runs."""
    config = inputs.model_config(args.model)
    family, platform = get_family(config.family), jax.default_backend()
    dtype, backend = jnp.dtype(args.dtype), resolve_backend("auto")
    slots = lora_slots(LoraConfig(args.loras, args.max_rank), family, config)
    assert slots is not None
    params = load_params(None, family, config, dtype=dtype, load_format="random")
    params = transpose_loaded(fuse_loaded(params, family, config), dtype)
    adapters = make_adapters(adapter_specs(family, config, slots, fused=True), dtype, None)
    put, columns = make_put(adapters), bucket(args.rank)
    adapter = _random(empty_adapter(adapters, columns))
    for number in range(args.adapters):
        adapters = put(adapters, adapter, np.int32(number + 1), np.int32(number * columns))
    widths = slots.widths(skips=skips_columns())
    width = next(choice for choice in widths if args.adapters * columns <= choice)
    blocks = args.rows * int(blocks_for(args.context, BLOCK))
    cached = cached_in(platform, dtype, backend, hidden=False)
    heads = inputs.model_heads(args.model)
    pool = inputs.random_pool(heads, config.num_layers, blocks, BLOCK, cached)
    placed = pool_format(pool)
    pool = jax.device_put(pool, placed)
    model = StepModel(
        family=family,
        config=config,
        backend=backend,
        mesh=None,
        activations=activations_in(platform, dtype),
        lora=slots,
    )
    step = make_model_step(model, placed)
    tokens = jax.device_put(jnp.ones(args.rows, jnp.int32), pool.sharding)
    numbers = np.zeros(args.rows, np.int32)
    numbers[1::2] = np.arange(args.rows // 2) % args.adapters + 1
    rows = Rows(
        counts=np.ones(args.rows, np.int64),
        contexts=np.full(args.rows, args.context - 1),
        tables=np.random.default_rng(0).permutation(blocks).reshape(args.rows, 2, -1),
        kind=KV,
        tokens=((),) * args.rows,
        slots=np.arange(args.rows),
        emits=1,
        adapters=numbers,
    )
    plain = Layout(args.rows, args.rows, rows.tables.shape[2], args.rows, True)
    layouts = (plain, dataclasses.replace(plain, lora=width))
    packed = [jax.device_put(layout.pack(rows).buffer, pool.sharding) for layout in layouts]

    def run(which: int, pool: Any, count: int) -> tuple[Any, float]:
        more = (adapters,) if layouts[which].lora else ()
        begin = time.perf_counter()
        for _ in range(count):
            newest = Newest(tokens, tokens)
            done = step(params, pool, newest, packed[which], *more, layout=layouts[which])
            pool = done.pool
        jax.block_until_ready(done)
        return pool, (time.perf_counter() - begin) / count

    for kind in (0, 1, 0, 1):
        pool, _ = run(kind, pool, 2)  # compiles
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.repeats):
        for kind in (0, 1):
            pool, seconds = run(kind, pool, 5)
            times[kind].append(seconds)
    return times


def _random(adapter: Layers) -> Layers:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: (rng.normal(size=x.shape) * 0.01).astype(x.dtype), adapter)
