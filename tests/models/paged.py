"""Feeds sequences through the paged pool in steps, as the engine does, and collects the logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.models.base import AttentionInput, Family, LayerIndex, ModelConfig, Params, StepInputs
from jaxserve.models.forward import forward, logits
from jaxserve.models.sharding import named, pool_kv_heads
from jaxserve.pallas_kernels.attention import paged_attention, write
from jaxserve.pallas_kernels.batch import LEFT, RIGHT, AttentionBatch
from jaxserve.pallas_kernels.delta_net import DeltaInput, StateRows
from jaxserve.pallas_kernels.pool import make_pool
from jaxserve.pallas_kernels.recurrence import recur


class PagedRun:
    """A pool with every sequence's blocks, and a jitted step for each (rows, tokens) bucket.

    Blocks are dealt out in random order, and the pool starts full of NaN, so that a read of a slot
    that nobody wrote shows.

    Args:
        lengths: tokens that each row may hold.
        backend: of the kernels. Activations are of float32, whatever parameters and pool are.
        compiler_options: of XLA, for the steps.
    """

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        params: Params,
        lengths: list[int],
        block_size: int,
        mesh: Mesh | None = None,
        *,
        pool_dtype: str = "float32",
        backend: str = "xla",
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.family, self.config, self.params, self.mesh = family, config, params, mesh
        self.done = [0] * len(lengths)
        self.width = -(-max(lengths) // block_size)
        num_blocks = 2 * len(lengths) * self.width
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        self.tables = order.reshape(len(lengths), 2, self.width)
        kv_heads = pool_kv_heads(config, 1 if mesh is None else mesh.size)
        each = 0
        if config.delta is not None:  # layers have slots of their own, so one state's blocks do
            each = config.delta.blocks(kv_heads, block_size, config.head_dim, pool_dtype)
        ids = num_blocks + np.arange(2 * len(lengths) * each, dtype=np.int32)
        self.states = ids[::-1].reshape(len(lengths), 2, each)
        num_blocks += len(ids)
        sharding = None
        if mesh is not None:
            sharding = named(mesh, ("layers", "blocks", "kv_heads", "slots", "head_dim"))
        shape = (config.num_layers, num_blocks, kv_heads, block_size, config.head_dim)
        pool = make_pool(*shape, pool_dtype, sharding)
        self.pool = jax.jit(lambda p: p + jnp.nan, donate_argnums=0)(pool)
        self._step = jax.jit(
            self._forward,
            static_argnames="decode_only",
            donate_argnums=1,
            compiler_options=compiler_options,
        )

    def step(
        self, chunks: list[tuple[int, np.ndarray]], rows: int, tokens: int
    ) -> list[np.ndarray]:
        """Computes the next tokens of some rows, in a bucket of `rows` and `tokens`.

        chunks: (row, its next tokens), the one-token ones first. Returns float32 [n, V] for each.
        """
        counts = [len(ids) for _, ids in chunks]
        batch, flat, positions = self._batch(chunks, rows, tokens)
        states = np.zeros((rows, *self.states.shape[1:]), np.int32)
        for i, (row, _) in enumerate(chunks):
            states[i] = self.states[row]
            self.states[row] = self.states[row, ::-1]
        decode_only = rows == tokens and set(counts) == {1}
        logits, self.pool = self._step(
            self.params, self.pool, flat, positions, batch, states, decode_only=decode_only
        )
        found = np.asarray(logits)
        for row, ids in chunks:
            self.done[row] += len(ids)
        return np.split(found[: sum(counts)], np.cumsum(counts)[:-1])

    def _batch(
        self, chunks: list[tuple[int, np.ndarray]], rows: int, tokens: int
    ) -> tuple[AttentionBatch, np.ndarray, np.ndarray]:
        counts = np.zeros(rows, np.int32)
        counts[: len(chunks)] = [len(ids) for _, ids in chunks]
        context, tables = np.zeros(rows, np.int32), np.zeros((rows, 2, self.width), np.int32)
        direction = np.full(rows, LEFT, np.int32)
        flat, positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
        token_row = np.full(tokens, rows, np.int32)
        start = np.zeros(rows, np.int32)
        at = 0
        for i, (row, ids) in enumerate(chunks):
            part = slice(at, at + len(ids))
            flat[part], token_row[part], start[i] = ids, i, at
            positions[part] = self.done[row] + np.arange(len(ids))
            context[i], tables[i] = self.done[row] + len(ids), self.tables[row]
            direction[i] = RIGHT if row % 2 else LEFT
            at += len(ids)
        batch = AttentionBatch(
            tables=tables,
            context_lens=context,
            query_start=start,
            query_lens=counts,
            direction=direction,
            kind=np.zeros(rows, np.int32),
            token_row=token_row,
            num_decodes=np.int32((counts == 1).sum()),
            num_rows=np.int32(len(chunks)),
        )
        return jax.tree.map(jnp.asarray, batch), flat, positions

    def _forward(
        self,
        params: Params,
        pool: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        batch: AttentionBatch,
        states: jax.Array,
        decode_only: bool,
    ) -> tuple[jax.Array, jax.Array]:
        config, mesh = self.config, self.mesh
        names = ("context_lens", "query_start", "query_lens", "token_row")
        given: dict[str, Any] = {name: getattr(batch, name) for name in names}

        def attend(
            pool: jax.Array, layer: LayerIndex, inputs: AttentionInput | DeltaInput
        ) -> tuple[jax.Array, jax.Array]:
            where: dict[str, Any] = {"backend": self.backend, "mesh": mesh}
            if isinstance(inputs, DeltaInput):
                of = StateRows(states, **given, decode_only=decode_only)
                return recur(pool, layer, inputs, of, **where)
            pool = write(pool, layer, inputs.k, inputs.v, batch, **where)
            mixed = paged_attention(
                inputs.q,
                pool,
                layer,
                batch,
                scale=config.attn_scale,
                sliding_window=inputs.kind.sliding_window,
                soft_cap=config.soft_cap,
                sinks=inputs.sinks,
                halves=config.halves,
                decode_only=decode_only,
                **where,
            )
            return pool, mixed

        inputs = StepInputs(tokens, positions, batch.token_row, batch.token_row < batch.max_rows)
        pool, x = forward(
            self.family,
            params,
            config,
            inputs,
            attend,
            pool,
            dtype=jnp.float32,
            mesh=mesh,
        )
        return logits(self.family, params, config, x, mesh=mesh), pool
