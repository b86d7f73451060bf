"""Several backends' attention, timed on the first device: which is right, and how fast.

    python -m jaxserve.pallas_kernels.trials '{"names": ["triton", "mosaic-gpu"], "shape": {...}}'

prints the result of `run_trials` as JSON. A process of its own, since a kernel that reads beyond
its memory, or waits for ever, takes its process with it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.attention import paged_attention, plan_attention
from jaxserve.pallas_kernels.backends import KernelShape
from jaxserve.pallas_kernels.batch import KV, LEFT, AttentionBatch
from jaxserve.pallas_kernels.pool import Pool, ScaledPool

DECODES, PROMPTS = "decodes", "prompts"
ROWS, CONTEXT = 32, 1024  # of the decodes
PROMPT = 2048  # tokens of the prompt
CALLS = 16  # in one program, so that the host's part of a launch does not count
ROUNDS = 5
# Relative distance (L2) of results in 16 bits: twice what each may be off by.
LIMIT = 0.02


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The timed work.

    Attributes:
        rows: Decodes in a step.
        context: Cached tokens of each.
        prompt: Tokens of the prompt.
    """

    rows: int = ROWS
    context: int = CONTEXT
    prompt: int = PROMPT


def run_trials(
    names: Sequence[str],
    shape: KernelShape,
    sizes: Sizes = Sizes(),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Times the backends' attention, taking turns.

    Args:
        names: The backends; results of the first are what others are held against.
        shape: One shard's heads, and the pool's blocks and dtype.
        sizes: The timed work.
        clock: Gives seconds.

    Returns:
        For `DECODES` and `PROMPTS`, each backend's seconds for `CALLS` calls, the least of
        `ROUNDS`; without those that failed or gave other results.
    """
    rows = {DECODES: (sizes.rows, sizes.context, 1), PROMPTS: (1, sizes.prompt, sizes.prompt)}
    return {kind: _times(names, shape, *each, clock) for kind, each in rows.items()}


def _times(
    names: Sequence[str],
    shape: KernelShape,
    rows: int,
    context: int,
    tokens: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    batch, pool = _batch(rows, context, tokens, shape.block_size), _pool(rows, context, shape)
    wide = pool.dtype if pool.dtype.itemsize > 1 else jnp.dtype(jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (rows * tokens, shape.num_heads, shape.head_dim), wide)
    ran: dict[str, Callable[[], Any]] = {}
    want: np.ndarray | None = None
    for name in names:
        attend = functools.partial(_attend, name=name, decode_only=tokens == 1)
        try:
            got = np.asarray(jax.jit(attend)(q, pool, batch), np.float32)
            run = functools.partial(jax.jit(functools.partial(_loop, attend)), q, pool, batch)
            jax.block_until_ready(run())
        except Exception as error:  # of any layer of the compiler
            print(f"{name}: {error}", file=sys.stderr)
            continue
        want = got if want is None else want
        if np.linalg.norm(got - want) <= LIMIT * np.linalg.norm(want):  # not so with NaN
            ran[name] = run
    return _least(ran, clock)


def _least(ran: Mapping[str, Callable[[], Any]], clock: Callable[[], float]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, run in ran.items():
            begin = clock()
            jax.block_until_ready(run())
            seconds[name] = min(seconds.get(name, float("inf")), clock() - begin)
    return seconds


def _attend(
    q: jax.Array, pool: Pool, batch: AttentionBatch, *, name: str, decode_only: bool
) -> jax.Array:
    return paged_attention(
        q,
        pool,
        jnp.int32(0),
        batch,
        scale=q.shape[-1] ** -0.5,
        decode_only=decode_only,
        plan=_plan(pool, batch, q.shape[1], name=name, decode_only=decode_only),
        backend=name,
    )


def _plan(pool: Pool, batch: AttentionBatch, heads: int, *, name: str, decode_only: bool) -> Any:
    """Made once a step, for all layers: so once for all calls."""
    return plan_attention(pool, batch, heads, decode_only=decode_only, backend=name)


def _loop(attend: Callable[..., jax.Array], q: jax.Array, pool: Pool, batch: Any) -> jax.Array:
    """Each call's output is the next one's query."""
    return jax.lax.fori_loop(0, CALLS, lambda _, q: attend(q, pool, batch), q)


def _batch(rows: int, context: int, tokens: int, block_size: int) -> AttentionBatch:
    width = -(-context // block_size)
    row = jnp.arange(rows, dtype=jnp.int32)
    same = functools.partial(jnp.full, (rows,), dtype=jnp.int32)
    return AttentionBatch(
        tables=jnp.arange(2 * rows * width, dtype=jnp.int32).reshape(rows, 2, width),
        context_lens=same(context),
        query_start=row * tokens,
        query_lens=same(tokens),
        direction=same(LEFT),
        kind=same(KV),
        token_row=jnp.repeat(row, tokens),
        num_decodes=jnp.int32(rows if tokens == 1 else 0),
        num_rows=jnp.int32(rows),
    )


def _pool(rows: int, context: int, shape: KernelShape) -> Pool:
    blocks = 2 * rows * -(-context // shape.block_size)
    whole = (1, blocks, shape.kv_heads, shape.block_size, shape.head_dim)
    key, dtype = jax.random.key(0), jnp.dtype(shape.dtype)
    if dtype != jnp.int8:
        return jax.random.normal(key, whole, jnp.bfloat16).astype(dtype)
    scales = jnp.full(whole[:4], 0.02, jnp.float32)
    return ScaledPool(jax.random.randint(key, whole, -127, 128, jnp.int8), scales)


def main() -> None:
    """See above."""
    given = json.loads(sys.argv[1])
    print(json.dumps(run_trials(given["names"], KernelShape(**given["shape"]))))


if __name__ == "__main__":
    main()
