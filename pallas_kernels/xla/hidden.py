"""Attention over hidden vectors in plain XLA operations: absorbed, and projected."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import HIDDEN, AttentionBatch
from jaxserve.pallas_kernels.hidden import HiddenProjection, project
from jaxserve.pallas_kernels.pool import Pool, read_as
from jaxserve.pallas_kernels.xla import softmax
from jaxserve.pallas_kernels.xla.attention import TILE_QUERIES, Read, attend_row, decode
from jaxserve.pallas_kernels.xla.gather import chunk_blocks, gather_runs, in_token_order, runs

PROJECT_CONTEXT = 128  # tokens of context projected at once

_KV = tuple[jax.Array, jax.Array]


def absorbed_attention(
    qx: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scoring: Scoring,
    axis_name: str | None = None,
) -> jax.Array:
    """See `attention.absorbed_attention`: qx [T, H, E] -> the same. Hidden vectors are stored in
    the pool as kv_heads parts: two matmuls batched over parts, with the first one's results summed
    over them."""
    tokens, num_heads, _ = qx.shape
    rows, parts, head_dim = batch.max_rows, pool.shape[2], pool.shape[4]
    wanted = (batch.kind == HIDDEN) & (jnp.arange(rows, dtype=jnp.int32) < batch.num_decodes)
    token = jnp.where(wanted, batch.query_start, tokens)

    def attend(out: jax.Array) -> jax.Array:
        queries = qx.at[token].get(mode="fill", fill_value=0) * scoring.scale
        queries = queries.astype(read_as(pool.dtype, qx.dtype))
        done = decode(
            queries.reshape(rows, num_heads, parts, head_dim).transpose(0, 2, 1, 3),
            pool,
            layer,
            batch,
            jnp.where(wanted, batch.context_lens, 0),
            softmax.step(scoring.soft_cap, shared=True, axis_name=axis_name),
            sliding_window=scoring.sliding_window,
            shared=True,
        )
        done = done.transpose(0, 2, 1, 3).reshape(rows, *qx.shape[1:]).astype(qx.dtype)
        return out.at[token].set(done, mode="drop")

    # Steps without hidden decodes skip this.
    return lax.cond(wanted.any(), attend, lambda out: out, jnp.zeros_like(qx))


def projected_attention(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    projection: HiddenProjection,
    *,
    scoring: Scoring,
    decode_only: bool,
) -> jax.Array:
    """See `attention.projected_attention`: q [T, H, D] -> the same. A row's context is projected
    once, into K and V of this row alone, over which its queries then attend: projecting is by far
    the most expensive part."""
    # One loop for all rows: the engine reads hidden decodes separately, with `decode_only`, and a
    # second loop would double the compile time.
    tile = 1 if decode_only else min(TILE_QUERIES, len(q))
    heads, padding = q.shape[1], ((0, tile), (0, 0), (0, 0))
    dtype = read_as(pool.dtype, q.dtype)
    queries = jnp.pad((q * scoring.scale).astype(dtype), padding)
    rows = _Rows(pool, layer, batch, projection, heads, scoring.sliding_window, dtype)
    # A KV row has neither tokens nor context here.
    mine = dataclasses.replace(
        batch, query_lens=jnp.where(batch.kind == HIDDEN, batch.query_lens, 0)
    )

    def fill(row: jax.Array, state: tuple[jax.Array, _KV]) -> tuple[jax.Array, _KV]:
        out, scratch = state
        scratch = rows.project(row, scratch)
        out = attend_row(
            out,
            queries,
            mine,
            row,
            rows.read(row, scratch),
            softmax.step(scoring.soft_cap),
            kv_heads=heads,
            tile=tile,
            sliding_window=scoring.sliding_window,
        )
        return out, scratch

    def attend(out: jax.Array) -> jax.Array:
        state = (jnp.pad(out, padding), rows.scratch())
        return lax.fori_loop(0, batch.num_rows, fill, state)[0][: len(q)]

    # Steps without hidden rows skip this.
    return lax.cond((mine.query_lens > 0).any(), attend, lambda out: out, jnp.zeros_like(q))


class _Rows:
    """Projects hidden vectors to K and V [heads, context, D], one row after another."""

    def __init__(
        self,
        pool: Pool,
        layer: jax.Array | int,
        batch: AttentionBatch,
        projection: HiddenProjection,
        heads: int,
        sliding_window: int | None,
        dtype: DTypeLike,
    ) -> None:
        self._batch, self._projection, self._heads = batch, projection, heads
        self._window = sliding_window
        self._parts, self._block_size, self._head_dim = pool.shape[2:]
        self._chunk = chunk_blocks(PROJECT_CONTEXT, self._block_size, batch)
        self._width = self._chunk * self._block_size
        self._runs, self._dtype = runs(pool, layer, self._chunk), dtype

    def scratch(self) -> _KV:
        """Room for one row. Values of an earlier row are never read."""
        chunks = -(-self._batch.table_width // self._chunk)
        room = jnp.zeros((self._heads, chunks * self._width, self._head_dim), self._dtype)
        return room, room

    def project(self, row: jax.Array, scratch: _KV) -> _KV:
        """The scratch, filled with everything that the row's queries can see; unchanged if the row
        is not hidden."""
        batch, width = self._batch, self._width
        context = batch.context_lens[row]
        first = jnp.zeros_like(context)
        if self._window is not None:
            first = jnp.maximum(context - batch.query_lens[row] - self._window + 1, 0)
        table = jnp.pad(batch.tables[row, 0], (0, -batch.table_width % self._chunk))
        slot = self._slots(row)

        def one_chunk(j: jax.Array, made: _KV) -> _KV:
            ids = lax.dynamic_slice_in_dim(table, j * self._chunk, self._chunk)
            position = j * width + slot
            (x,) = gather_runs(
                self._runs,
                [self._runs.of(ids[None])],
                (1, self._parts, width, self._head_dim),
                ((position >= first) & (position < context))[:, None],
                (j * width >= first) & ((j + 1) * width <= context),
                self._dtype,
            )
            x = x[0].transpose(1, 0, 2).reshape(width, self._parts * self._head_dim)
            k, v = project(x, position, self._projection, self._heads)
            return _put(made[0], k, j * width), _put(made[1], v, j * width)

        last = jnp.where(batch.kind[row] == HIDDEN, -(-context // width), 0)
        return lax.fori_loop(first // width, last, one_chunk, scratch)

    def read(self, row: jax.Array, scratch: _KV) -> Read:
        """Reads the row's context from the scratch, once projected."""
        slot = self._slots(row)

        def chunk_of(j: jax.Array, lower: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            k, v = (
                lax.dynamic_slice_in_dim(a, j * self._width, self._width, axis=1)[None]
                for a in scratch
            )
            return k, v, j * self._width + slot

        return Read(self._width, chunk_of)

    def _slots(self, row: jax.Array) -> jax.Array:
        side = self._batch.direction[row]
        return in_token_order(self._chunk, self._block_size, side[None])[0]


def _put(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, axis=1)
