"""One layer's attention, shared by all families: its projections into heads, per-head norms,
rotation, and the output projection. What attends is passed in."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.models.base import (
    AttentionInput,
    KVProjection,
    KVWeights,
    LayerKind,
    ModelConfig,
    Params,
)
from jaxserve.models.layers import Linear, Norm, linear, linear_leaves, norm_leaves, rms_norm
from jaxserve.models.rope import angle_table, rotate
from jaxserve.models.sharding import TENSOR, constrain, heads_a_shard, pool_kv_heads

Rotation = tuple[jax.Array, jax.Array]


@flax.struct.dataclass
class AttentionParams:
    """One layer's attention parameters, as in checkpoints. Steps with hidden caches need them in
    this form, since they read the weights of K and V separately.

    Attributes:
        q: [d_model, num_heads * head_dim].
        k, v: [d_model, num_kv_heads * head_dim].
        o: [num_heads * head_dim, d_model].
        q_norm, k_norm: scales [head_dim] of the RMS norms over each head (Qwen3), or None.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None


@flax.struct.dataclass
class FusedAttention:
    """One layer's attention parameters with q, k and v as one projection, for all other steps.

    Attributes:
        qkv: [d_model, columns], in the order that `jaxserve.models.fused` says.
        o, q_norm, k_norm: as in `AttentionParams`.
    """

    qkv: Linear
    o: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None


def attention_leaves(
    config: ModelConfig,
    name: str,
    *,
    out: str,
    bias: bool,
    out_bias: bool,
    head_norms: bool = False,
) -> AttentionParams:
    """The leaves of one attention, see `Family.leaves`.

    Args:
        config: the model's.
        name: its prefix in checkpoints.
        out: name of its output projection.
        bias: whether q, k and v have biases.
        out_bias: whether the output projection has one.
        head_norms: whether q and k have norms over each head.
    """
    head_dim = config.head_dim

    def projection(part: str, heads: int, axis: str) -> Linear:
        return linear_leaves(
            f"{name}.{part}",
            (config.d_model, heads * head_dim),
            ("embed", axis),
            bias=bias,
            std=config.init_std,
            granule=head_dim,
        )

    return AttentionParams(
        q=projection("q_proj", config.num_heads, "heads"),
        k=projection("k_proj", config.num_kv_heads, "kv_heads"),
        v=projection("v_proj", config.num_kv_heads, "kv_heads"),
        o=linear_leaves(
            f"{name}.{out}",
            (config.num_heads * head_dim, config.d_model),
            ("heads", "embed"),
            bias=out_bias,
            std=config.init_std,
            granule=head_dim,
        ),
        q_norm=norm_leaves(f"{name}.q_norm", head_dim) if head_norms else None,
        k_norm=norm_leaves(f"{name}.k_norm", head_dim) if head_norms else None,
    )


def attention_input(
    weights: AttentionParams | FusedAttention,
    config: ModelConfig,
    x: jax.Array,
    kind: LayerKind,
    rotation: Rotation | None,
    mesh: Mesh | None,
) -> AttentionInput:
    """Projects a layer's input to queries, keys and values.

    Args:
        weights: the layer's attention parameters.
        config: the model's.
        x: [T, d_model], normalised.
        kind: the layer's.
        rotation: of its rope, see `rope.angles`; None if positions are not rotated.
        mesh: the devices that the parameters are sharded over; None for one.
    """
    if isinstance(weights, FusedAttention):
        apart = None
        q, k, v = _project_fused(weights, config, x, mesh)
    else:
        apart = kv_weights(weights)
        # Whole, since caches cut it by heads: XLA would have each shard make its own part of x, and
        # gather the parts for q, k and v.
        x = constrain(x, mesh, None, None)
        q, k, v = _project_apart(weights, config, x, mesh)
    if weights.q_norm is not None:
        q = rms_norm(q, weights.q_norm.scale, config.norm_eps)
    if weights.k_norm is not None:
        k = rms_norm(k, weights.k_norm.scale, config.norm_eps)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    return AttentionInput(q, k, v, x, apart, kind)


def _project_fused(
    weights: FusedAttention, config: ModelConfig, x: jax.Array, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v [T, heads, head_dim]; k and v with as many heads as the pool."""
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    queries, kv = heads_a_shard(config, shards)
    y = linear(x, weights.qkv, mesh).reshape(x.shape[0], shards, queries + 2 * kv, config.head_dim)

    def heads(first: int, count: int, axis: str) -> jax.Array:
        part = y[:, :, first : first + count]
        part = part.reshape(x.shape[0], shards * count, config.head_dim)
        return constrain(part, mesh, None, axis, None)

    k, v = heads(queries, kv, "kv_heads"), heads(queries + kv, kv, "kv_heads")
    return heads(0, queries, "heads"), k, v


def _project_apart(
    weights: AttentionParams, config: ModelConfig, x: jax.Array, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `_project_fused`, by three matmuls."""
    shards = 1 if mesh is None else mesh.shape[TENSOR]

    def heads(part: Linear, count: int, axis: str) -> jax.Array:
        y = linear(x, part, mesh).reshape(x.shape[0], count, config.head_dim)
        return constrain(y, mesh, None, axis, None)

    def repeated(part: Linear) -> jax.Array:
        y = heads(part, config.num_kv_heads, "kv_heads")
        return jnp.repeat(y, pool_kv_heads(config, shards) // config.num_kv_heads, axis=1)

    q = heads(weights.q, config.num_heads, "heads")
    return q, repeated(weights.k), repeated(weights.v)


def kv_weights(weights: AttentionParams) -> KVWeights:
    """The part of a layer's attention that makes K and V; the arrays are those of `weights`."""
    norm = None if weights.k_norm is None else weights.k_norm.scale
    return KVWeights(weights.k.kernel, weights.v.kernel, weights.k.bias, weights.v.bias, norm)


def kv_projection(params: Params, config: ModelConfig, max_len: int) -> KVProjection:
    """How the layers of `params`, not fused, make K and V, for positions below max_len. Shares the
    arrays of `params`."""
    rotation = None
    if config.rope is not None:
        rotation = jnp.asarray(angle_table(config.rope, config.head_dim, max_len))
    weights = tuple(kv_weights(layer.attn) for layer in params.layers)
    return KVProjection(weights, config.norm_eps, rotation)
