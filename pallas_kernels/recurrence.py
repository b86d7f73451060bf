"""The interface to the recurrence of gated delta nets over states in the block pool."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels import checks
from jaxserve.pallas_kernels.backends import get_backend
from jaxserve.pallas_kernels.checks import HEAD_AXIS
from jaxserve.pallas_kernels.delta_net import DeltaInput, StateRows
from jaxserve.pallas_kernels.pool import SamePool, ScaledPool
from jaxserve.pallas_kernels.sharding import BY_HEAD, OF_HEADS, POOL, WHOLE, over_heads
from jaxserve.pallas_kernels.xla import delta


def recur(
    pool: SamePool,
    layer: jax.Array | int,
    inputs: DeltaInput,
    rows: StateRows,
    *,
    backend: str = "xla",
    mesh: Mesh | None = None,
) -> tuple[SamePool, jax.Array]:
    """Convolves each row's tokens, updates its state by them one after another, and reads it after
    each (Yang et al. 2024, equation 10). Everything is float32, and each token's sums have one
    order, whatever else is in its chunk.

    A state lies in blocks of the pool, as bits: head p of the pool holds the p-th part of the key
    heads, one after another (`DeltaNet.kept`).

    Args:
        pool: [layers, blocks, kv_heads, block_size, head_dim]; updated in place where it is
            donated. `kv_heads` divides the key heads.
        layer: Index into the whole pool; may be traced.
        inputs: The layer's.
        rows: The states and tokens of the step's rows.
        backend: As for `get_backend`.
        mesh: Shards heads over its axis "tensor"; None for one device.

    Returns:
        The pool, and float32 [T, value_heads, value_dim]; arbitrary for padding tokens.

    Raises:
        ValueError: A wrong shape.
    """
    checks.check_pool(pool)
    checks.check_layer(pool, layer)
    if inputs.net.key_heads % pool.shape[2]:
        raise ValueError(
            f"pool: its {pool.shape[2]} KV heads do not divide {inputs.net.key_heads} key heads"
        )
    kernel = get_backend(backend).recur or delta.recur
    shards = 1 if mesh is None else mesh.shape[HEAD_AXIS]
    values, scales = (pool.values, pool.scales) if isinstance(pool, ScaledPool) else (pool, None)

    def one_shard(values: Any, layer: Any, inputs: Any, rows: Any) -> Any:
        return kernel(values, layer, inputs.of_shard(shards), rows)

    by_head = {"mixed": BY_HEAD, "gates": BY_HEAD}
    of_heads = dict.fromkeys(("conv", "rate", "shift"), OF_HEADS)
    of_inputs: Any = dataclasses.replace(inputs, **by_head, **of_heads)  # type: ignore[arg-type]
    takes, gives = (POOL, WHOLE, of_inputs, WHOLE), (POOL, P(None, HEAD_AXIS))
    run = over_heads(one_shard, mesh, takes, gives, pool=pool.shape[2])  # type: ignore[arg-type]
    values, out = run(values, jnp.asarray(layer, jnp.int32), inputs, rows)
    after: Any = values if scales is None else ScaledPool(values, scales)
    return after, out


def recur_text(inputs: DeltaInput) -> jax.Array:
    """The same for the tokens of one text from its beginning, without a pool. Returns float32 [T,
    value_heads, value_dim]."""
    rows = jnp.zeros(len(inputs.mixed), jnp.int32)
    _, out = delta.scan(inputs, delta.zeros(inputs.net, 1), rows)
    return out.reshape(len(out), -1, out.shape[-1])
