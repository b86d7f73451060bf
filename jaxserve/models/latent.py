"""Latent projections of one layer's attention (multi-head latent attention, DeepSeek-AI 2024,
section 2.1): K and V of a token are computed from a small latent vector, and from a rotated part of
K that all heads share. Queries may also be computed from a latent vector.

Attention gets the full K and V of each head, and caches them like that. Heads of V have fewer
elements than those of K, and are padded with zeros. Weights stay the low-rank factors of
checkpoints. A cache of the latent vectors alone, with `kv_b` folded into queries and outputs, would
store the output of `kv_a`; there is none yet.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.models.base import AttentionInput, LayerKind, ModelConfig
from jaxserve.models.layers import Linear, Norm, linear, linear_leaves, norm_leaves
from jaxserve.models.rope import rotate_pairs
from jaxserve.models.sharding import constrain
from jaxserve.pallas_kernels import rms_norm

NORM_EPS = 1e-6  # of the norms of latent vectors, whatever the others'


@flax.struct.dataclass
class LatentAttention:
    """One layer's attention parameters, as in checkpoints and in steps. In the columns of a head,
    the plain part is before the rotated one, and K before V.

    Attributes:
        q_a: [d_model, q_rank]; None if queries are projected directly.
        q_a_norm: [q_rank], likewise.
        q_b: [q_rank, num_heads * (plain + rotated)], or [d_model, ...].
        kv_a: [d_model, rank + rotated], the rotated part of K last.
        kv_a_norm: [rank].
        kv_b: [rank, num_heads * (plain + values)].
        o: [num_heads * values, d_model].
    """

    q_a: Linear | None
    q_a_norm: Norm | None
    q_b: Linear
    kv_a: Linear
    kv_a_norm: Norm
    kv_b: Linear
    o: Linear


def latent_leaves(config: ModelConfig, name: str, *, bias: bool) -> LatentAttention:
    """The leaves of one attention, see `Family.leaves`.

    Args:
        config: the model's, with latent projections.
        name: its prefix in checkpoints.
        bias: whether the projections to latent vectors and the output projection have biases.
    """
    latent = config.latent
    assert latent is not None

    def projection(
        part: str,
        shape: tuple[int, int],
        axes: tuple[str, str],
        granule: int = 1,
        bias: bool = False,
    ) -> Linear:
        full = f"{name}.{part}"
        return linear_leaves(full, shape, axes, bias=bias, std=config.init_std, granule=granule)

    d, heads = config.d_model, config.num_heads
    query, both = latent.plain + latent.rotated, latent.plain + latent.values
    q_a = q_a_norm = None
    q_b = projection("q_proj", (d, heads * query), ("embed", "heads"), query)
    if latent.q_rank is not None:
        q_a = projection("q_a_proj", (d, latent.q_rank), ("embed", "latent"), bias=bias)
        q_a_norm = norm_leaves(f"{name}.q_a_layernorm", latent.q_rank)
        shape = (latent.q_rank, heads * query)
        q_b = projection("q_b_proj", shape, ("latent", "heads"), query)
    return LatentAttention(
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=q_b,
        kv_a=projection(
            "kv_a_proj_with_mqa",
            (d, latent.rank + latent.rotated),
            ("embed", "latent"),
            bias=bias,
        ),
        kv_a_norm=norm_leaves(f"{name}.kv_a_layernorm", latent.rank),
        kv_b=projection("kv_b_proj", (latent.rank, heads * both), ("latent", "heads"), both),
        o=projection(
            "o_proj", (heads * latent.values, d), ("heads", "embed"), latent.values, bias=bias
        ),
    )


def latent_input(
    weights: LatentAttention,
    config: ModelConfig,
    x: jax.Array,
    kind: LayerKind,
    rotation: tuple[jax.Array, jax.Array] | None,
    mesh: Mesh | None,
) -> AttentionInput:
    """Projects a layer's input to queries, keys and values, see `attention.attention_input`.

    Args:
        weights: the layer's attention parameters.
        config: the model's.
        x: [T, d_model], normalised.
        kind: the layer's.
        rotation: angles of its rope, see `rope.angles`.
        mesh: the devices that the parameters are sharded over; None for one.
    """
    latent = config.latent
    assert latent is not None and rotation is not None
    # Replicated: otherwise XLA would have each shard compute its own part of them, and gather the
    # parts.
    x = constrain(x, mesh, None, None)

    def by_head(x: jax.Array, part: Linear) -> jax.Array:
        y = linear(x, part, mesh).reshape(len(x), config.num_heads, -1)
        return constrain(y, mesh, None, "heads", None)

    few = x
    if weights.q_a is not None and weights.q_a_norm is not None:
        few = constrain(linear(x, weights.q_a, mesh), mesh, None, None)
        few = rms_norm(few, weights.q_a_norm.scale, NORM_EPS)
    q_plain, q_rotated = jnp.split(by_head(few, weights.q_b), (latent.plain,), axis=-1)
    few, shared = jnp.split(linear(x, weights.kv_a, mesh), (latent.rank,), axis=-1)
    few = constrain(few, mesh, None, None)
    few = rms_norm(few, weights.kv_a_norm.scale, NORM_EPS)
    k_plain, v = jnp.split(by_head(few, weights.kv_b), (latent.plain,), axis=-1)
    q_rotated = rotate_pairs(q_rotated, *rotation)
    shared = rotate_pairs(constrain(shared, mesh, None, None)[:, None], *rotation)
    k_rotated = jnp.broadcast_to(shared, q_rotated.shape)

    def whole(*parts: jax.Array) -> jax.Array:
        head = jnp.concatenate(parts, axis=-1)
        head = jnp.pad(head, ((0, 0), (0, 0), (0, config.head_dim - head.shape[-1])))
        return constrain(head, mesh, None, "heads", None)

    return AttentionInput(
        whole(q_plain, q_rotated), whole(k_plain, k_rotated), whole(v), x, None, kind
    )
