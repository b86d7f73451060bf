"""The kernels with a model's shapes: what to run, and the least that must be read, written and
multiplied."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import HIDDEN
from jaxserve.pallas_kernels import attention as attend
from jaxserve.pallas_kernels import move as moving
from jaxserve.pallas_kernels.pool import Pool
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.device_timing import Loop
from jaxserve_lab.bench.kernels.kernel_inputs import Heads, Row

DRAFTS = 3  # per row, for rows with drafts


@dataclass(frozen=True)
class Workload:
    """The batches with which the kernels are timed.

    Attributes:
        rows: Requests of a batch of decodes.
        context: Cached tokens of each decode.
        prefill: Tokens of a prompt.
        moves: Slots that are moved or staged.
        layers: Layers of the pool; calls rotate through them.
        block_size: Tokens of a block.
        dtype: Dtype of the pool. If that has 8 bits, everything else is bfloat16.
    """

    rows: int = 32
    context: int = 2048
    prefill: int = 4096
    moves: int = 4096
    layers: int = 4
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def blocks(self) -> int:
        """Blocks of the pool: enough for K and V of the decodes or of the prompt, and for the slots
        that move."""
        decode = 2 * self.rows * -(-self.context // self.block_size)
        prompt = 2 * -(-self.prefill // self.block_size)
        return max(decode, prompt, 2 * -(-self.moves // self.block_size) + 1)


def narrowed(work: Workload, dtype: str) -> Workload:
    """The workload with a pool of this dtype; if that has 8 bits instead of 16, twice as many
    layers: Pallas-Triton cannot index pools of 8 bits between 2 and 4 GiB."""
    if dtype == work.dtype:
        return work
    return replace(work, dtype=dtype, layers=2 * work.layers)


@dataclass(frozen=True)
class KernelCase:
    """One kernel to time.

    Attributes:
        name: The kernel's name.
        shape: Its shape, in words.
        moved: Bytes that must be read and written.
        operations: Multiplies and adds; 0 for a kernel that only copies.
        make: Builds its loop over a pool or other inputs.
    """

    name: str
    shape: str
    moved: int
    operations: int
    make: Callable[[Any], Loop]


def cases(heads: Heads, work: Workload, backend: str) -> Iterator[KernelCase]:
    """Every kernel that a model with these heads can use."""
    yield decode_case(heads, work, backend)
    yield _drafts(heads, work, backend)
    yield prefill_case(heads, work, backend)
    if heads.offers_hidden:
        yield from _hidden(heads, work, backend)
    yield _write(heads, work, backend)
    yield from _moves(heads, work, backend)


def _layer(i: jax.Array, work: Workload) -> jax.Array:
    return jax.lax.rem(i, jnp.int32(work.layers))


def _attention(
    name: str,
    function: Callable[..., jax.Array],
    rows: list[Row],
    heads: Heads,
    work: Workload,
    *,
    vectors: int,
    operations: int,
    weights: int = 0,
    width: int = 0,
    drafts: bool = False,
    **options: Any,
) -> KernelCase:
    """A kernel whose output is the next call's query, so that calls wait for each other. vectors:
    vectors of the pool that must be read. weights: numbers that must be read. width: of a query; 0
    for a head's. drafts: as in `AttentionBatch`."""
    dtype = inputs.activations(work.dtype)
    tokens = sum(row.query for row in rows)
    q_shape = (tokens, heads.num_heads, width or heads.head_dim)

    def make(pool: Pool) -> Loop:
        rng = np.random.default_rng(0)
        batch = inputs.make_batch(rows, work.block_size, work.blocks, rng, drafts=drafts)
        bound = functools.partial(function, scale=heads.head_dim**-0.5, **options)

        def step(i: jax.Array, q: jax.Array, given: Any) -> jax.Array:
            pool, batch, *more = given
            return bound(q, pool, _layer(i, work), batch, *more)

        extra: tuple[Any, ...] = ()
        if function is attend.projected_attention:
            longest = max(row.context for row in rows)
            extra = (inputs.make_projection(heads, longest, dtype),)
        q = inputs.vectors(q_shape, dtype, 1)
        return Loop(step, q, (pool, batch, *extra))

    shape = f"{len(rows)} x {rows[0].context}"
    moved = vectors * heads.vector_bytes(work.dtype)
    moved += (weights + 2 * math.prod(q_shape)) * dtype.itemsize
    return KernelCase(name, shape, moved, operations, make)


def decode_case(heads: Heads, work: Workload, backend: str) -> KernelCase:
    """Attention of `work.rows` decodes over K and V."""
    cached, rows = work.rows * work.context, [Row(work.context)] * work.rows
    return _attention(
        "decode attention",
        attend.paged_attention,
        rows,
        heads,
        work,
        vectors=2 * cached,
        operations=4 * cached * heads.num_heads * heads.head_dim,
        decode_only=True,
        backend=backend,
    )


def _drafts(heads: Heads, work: Workload, backend: str) -> KernelCase:
    """The same with drafts; each row reads its context once for all of them."""
    cached, rows = work.rows * work.context, [Row(work.context, 1 + DRAFTS)] * work.rows
    return _attention(
        f"attention with {DRAFTS} drafts",
        attend.paged_attention,
        rows,
        heads,
        work,
        vectors=2 * cached,
        operations=4 * cached * (1 + DRAFTS) * heads.num_heads * heads.head_dim,
        decode_only=False,
        drafts=True,
        backend=backend,
    )


def prefill_case(heads: Heads, work: Workload, backend: str) -> KernelCase:
    """Attention of a prompt of `work.prefill` tokens."""
    tokens = work.prefill
    return _attention(
        "prefill attention",
        attend.paged_attention,
        [Row(tokens, tokens)],
        heads,
        work,
        vectors=2 * tokens,
        operations=2 * tokens * (tokens + 1) * heads.num_heads * heads.head_dim,
        decode_only=False,
        backend=backend,
    )


def _hidden(heads: Heads, work: Workload, backend: str) -> Iterator[KernelCase]:
    """Decodes over hidden vectors: absorbed, if keys are not rotated, and projected."""
    cached, rows = work.rows * work.context, [Row(work.context, kind=HIDDEN)] * work.rows
    width = heads.width
    if not heads.rotary:
        yield _attention(
            "absorbed hidden decode",
            attend.absorbed_attention,
            rows,
            heads,
            work,
            vectors=cached,
            operations=4 * cached * heads.num_heads * width,
            width=width,
            backend=backend,
        )
    yield _attention(
        "projected hidden decode",
        attend.projected_attention,
        rows,
        heads,
        work,
        vectors=cached,
        weights=2 * width * width,
        operations=4 * cached * width * (width + 1),
        decode_only=True,
        backend=backend,
    )


def _write(heads: Heads, work: Workload, backend: str) -> KernelCase:
    tokens, dtype = work.prefill, inputs.activations(work.dtype)

    def make(pool: Pool) -> Loop:
        rng = np.random.default_rng(0)
        rows = [Row(tokens, tokens)]
        batch = inputs.make_batch(rows, work.block_size, work.blocks, rng)
        new = inputs.vectors((tokens, heads.kv_heads, heads.head_dim), dtype, 2)

        def step(i: jax.Array, pool: Pool, given: Any) -> Pool:
            batch, new = given
            return attend.write(pool, _layer(i, work), new, new, batch, backend=backend)

        return Loop(step, pool, (batch, new))

    moved = 2 * tokens * (heads.width * dtype.itemsize + heads.vector_bytes(work.dtype))
    return KernelCase("write", f"{tokens} tokens", moved, 0, make)


def _moves(heads: Heads, work: Workload, backend: str) -> Iterator[KernelCase]:
    count = work.moves
    moved = 2 * count * work.layers * heads.vector_bytes(work.dtype)

    def places(pool: Pool, sets: int) -> jax.Array:
        """[sets, 2 * count, 2]: (block, slot), unique within a set."""
        rng = np.random.default_rng(3)
        slots = [rng.permutation(pool.shape[1] * work.block_size) for _ in range(sets)]
        flat = np.stack(slots)[:, : 2 * count]
        both = np.stack(np.divmod(flat, work.block_size), axis=-1)
        return jnp.asarray(both, jnp.int32)

    def make(pool: Pool, run: Callable[..., Any], staging: bool) -> Loop:
        sets = 4
        found = places(pool, sets)
        buffer = None
        if staging:
            buffer = moving.stage_out(pool, found[0, :count], count, backend=backend)

        def step(i: jax.Array, pool: Pool, given: Any) -> Pool:
            found, buffer = given
            chosen = found[jax.lax.rem(i, jnp.int32(sets))]
            changed: Pool = run(pool, chosen, buffer)
            return changed

        return Loop(step, pool, (found, buffer))

    def move(pool: Pool, chosen: jax.Array, _: None) -> Pool:
        pairs = jnp.concatenate([chosen[:count], chosen[count:]], axis=1)
        return moving.move_slots(pool, pairs, count, backend=backend)

    def stage_in(pool: Pool, chosen: jax.Array, buffer: jax.Array) -> Pool:
        return moving.stage_in(pool, buffer, chosen[:count], count, backend=backend)

    def out_loop(pool: Pool) -> Loop:
        base = make(pool, stage_in, True)
        found, buffer = base.inputs

        def step(i: jax.Array, buffer: jax.Array, given: Any) -> jax.Array:
            pool, found = given
            chosen = found[jax.lax.rem(i, jnp.int32(len(found)))]
            return moving.stage_out(pool, chosen[:count], count, backend=backend)

        return Loop(step, buffer, (pool, found))

    shape = f"{count} slots, {work.layers} layers"
    yield KernelCase("move", shape, moved, 0, lambda pool: make(pool, move, False))
    yield KernelCase("stage out", shape, moved, 0, out_loop)
    yield KernelCase("stage in", shape, moved, 0, lambda pool: make(pool, stage_in, True))
