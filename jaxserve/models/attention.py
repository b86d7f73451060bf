"""One layer's attention, shared by all families: its projections into heads, per-head norms,
rotation, and the output projection. The attention function itself is passed in."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.base import (
    AttentionInput,
    HFTensor,
    KVProjection,
    KVWeights,
    LayerKind,
    Leaf,
    ModelConfig,
    Params,
    ParamSpec,
)
from jaxserve.models.latent import LatentAttention, latent_input, latent_output
from jaxserve.models.layers import (
    Linear,
    Norm,
    linear,
    linear_leaves,
    lora_parts,
    norm_leaves,
    with_low_rank,
)
from jaxserve.models.lora import Lora
from jaxserve.models.mesh_axes import TENSOR
from jaxserve.models.rope import angle_table
from jaxserve.models.sharding import constrain, heads_a_shard, pool_kv_heads
from jaxserve.pallas_kernels import as_cached, gated, rms_norm, rotate

Rotation = tuple[jax.Array, jax.Array]


@flax.struct.dataclass
class AttentionParams:
    """One layer's attention parameters, as in checkpoints. Steps with hidden caches need them in
    this form, since they read the weights of K and V separately.

    Attributes:
        q: [d_model, num_heads * head_dim]; of a gated model each head is followed by its gate.
        k, v: [d_model, num_kv_heads * head_dim].
        o: [num_heads * head_dim, d_model].
        q_norm, k_norm: scales of the RMS norms, [head_dim] if over each head (Qwen3), [heads *
            head_dim] if over all heads (`ModelConfig.whole_norms`), or None.
        sinks: [num_heads], see `AttentionInput`, or None.
        cached_as: dtype of the pool. x is rounded to it before K and V are computed, so that a
            hidden cache gives the same K and V; None for no rounding.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: Params = None
    cached_as: str | None = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class FusedAttention:
    """One layer's attention parameters with q, k and v as one projection, for all other steps.

    Attributes:
        qkv: [d_model, columns], in the order of `jaxserve.models.fused`.
        o, q_norm, k_norm, sinks: as in `AttentionParams`.
        lora: adapters of the step's rows for q, k and v, each with as many heads as in checkpoints,
            see `jaxserve.models.lora`; None for no adapters.
    """

    qkv: Linear
    o: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    lora: Lora | None = None
    sinks: Params = None


def attention_leaves(
    config: ModelConfig,
    name: str,
    *,
    out: str,
    bias: bool,
    out_bias: bool,
    head_norms: bool = False,
    joined: str | None = None,
) -> AttentionParams:
    """The leaves of one attention, see `Family.leaves`.

    Args:
        config: the model's.
        name: its prefix in checkpoints.
        out: name of its output projection.
        bias: whether q, k and v have biases.
        out_bias: whether the output projection has one.
        head_norms: whether q and k have norms.
        joined: name of the tensor that has q, k and v as rows; None if they are separate tensors.
    """
    head_dim = config.head_dim

    def norm(part: str, heads: int) -> Norm | None:
        width = (heads if config.whole_norms else 1) * head_dim
        whole = norm_leaves(f"{name}.{part}", width, offset=config.norm_offset)
        return whole if head_norms else None

    def projection(part: str, heads: int, axis: str, first: int) -> Linear:
        rows = first * head_dim, (config.num_heads + 2 * config.num_kv_heads) * head_dim
        return linear_leaves(
            f"{name}.{joined or part}",
            (config.d_model, heads * head_dim),
            ("embed", axis),
            bias=bias,
            std=config.init_std,
            granule=head_dim,
            rows=rows if joined else None,
        )

    queries, kv = config.num_heads, config.num_kv_heads

    return AttentionParams(
        q=projection("q_proj", asked_heads(config, queries), "heads", 0),
        k=projection("k_proj", kv, "kv_heads", queries),
        v=projection("v_proj", kv, "kv_heads", queries + kv),
        o=linear_leaves(
            f"{name}.{out}",
            (config.num_heads * head_dim, config.d_model),
            ("heads", "embed"),
            bias=out_bias,
            std=config.init_std,
            granule=head_dim,
        ),
        q_norm=norm("q_norm", config.num_heads),
        k_norm=norm("k_norm", config.num_kv_heads),
        sinks=_sinks_leaf(config, name) if config.sinks else None,
    )


def asked_heads(config: ModelConfig, queries: int) -> int:
    """Heads that the projection to so many queries has, gates included."""
    return 2 * queries if config.gated else queries


def _sinks_leaf(config: ModelConfig, name: str) -> Leaf:
    spec = ParamSpec((config.num_heads,), ("heads",), std=config.init_std)
    return Leaf(spec, HFTensor(f"{name}.sinks"))


def attention_input(
    weights: AttentionParams | FusedAttention | LatentAttention,
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
        rotation: angles of its rope, see `rope.angles`; None if positions are not rotated.
        mesh: the devices that the parameters are sharded over; None for one.
    """
    if isinstance(weights, LatentAttention):
        return latent_input(weights, config, x, kind, rotation, mesh)
    if isinstance(weights, FusedAttention):
        apart = None
        q, k, v = _project_fused(weights, config, x, mesh)
    else:
        apart = kv_weights(weights)
        # Replicated, since caches cut it by heads: otherwise XLA would have each shard compute its
        # own part of x, and gather the parts for q, k and v.
        x = constrain(x, mesh, None, None)
        q, k, v = _project_apart(weights, config, x, mesh)
    gate = None
    if config.gated:
        pairs = q.reshape(len(q), -1, 2, config.head_dim)
        q, gate = pairs[:, :, 0], pairs[:, :, 1]
    q, k = _head_norm(q, weights.q_norm, config), _head_norm(k, weights.k_norm, config)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    return AttentionInput(q, k, v, x, apart, kind, weights.sinks, gate=gate)


def attention_output(
    weights: AttentionParams | FusedAttention | LatentAttention,
    config: ModelConfig,
    mixed: jax.Array,
    gate: jax.Array | None,
    mesh: Mesh | None,
) -> jax.Array:
    """What the output projection reads, of attention's result.

    Args:
        weights: the layer's attention parameters.
        config: the model's.
        mixed: [T, num_heads, head_dim], or what `latent_output` takes.
        gate: of `AttentionInput`.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [T, num_heads, value_dim].
    """
    if isinstance(weights, LatentAttention):
        return latent_output(weights, config, mixed, mesh)
    if gate is None:
        return mixed
    flat = gate.reshape(len(gate), -1), mixed.astype(gate.dtype).reshape(len(gate), -1)
    return gated(*flat, "sigmoid", None).reshape(mixed.shape)


def _head_norm(x: jax.Array, norm: Norm | None, config: ModelConfig) -> jax.Array:
    """q or k [T, heads, head_dim], normalised by the model's norm."""
    if norm is None:
        return x
    if not config.whole_norms:
        return rms_norm(x, norm.scale, config.norm_eps, config.norm_offset)
    # Repeating each head equally often for several shards does not change the mean.
    scale = norm.scale.reshape(-1, config.head_dim)
    scale = jnp.repeat(scale, x.shape[1] // len(scale), axis=0)
    return rms_norm(x, scale, config.norm_eps, config.norm_offset, axes=2)


def _project_fused(
    weights: FusedAttention, config: ModelConfig, x: jax.Array, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v [T, heads, head_dim]; k and v with as many heads as the pool, q with gates."""
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    queries, kv = heads_a_shard(config, shards)
    queries = asked_heads(config, queries)
    y = linear(x, weights.qkv, mesh)
    if weights.lora is not None and mesh is None:
        y = with_low_rank(y, x, weights.lora, mesh)
    y = y.reshape(x.shape[0], shards, queries + 2 * kv, config.head_dim)

    def heads(first: int, count: int, axis: str) -> jax.Array:
        part = y[:, :, first : first + count]
        part = part.reshape(x.shape[0], shards * count, config.head_dim)
        return constrain(part, mesh, None, axis, None)

    k, v = heads(queries, kv, "kv_heads"), heads(queries + kv, kv, "kv_heads")
    q = heads(0, queries, "heads")
    if weights.lora is None or mesh is None:
        return q, k, v
    more = lora_parts(x, weights.lora, mesh)

    def added(part: jax.Array, low_rank: jax.Array, axis: str) -> jax.Array:
        low_rank = low_rank.reshape(len(low_rank), -1, config.head_dim)
        low_rank = jnp.repeat(low_rank, part.shape[1] // low_rank.shape[1], axis=1)
        return constrain(part + low_rank, mesh, None, axis, None)

    return added(q, more[0], "heads"), added(k, more[1], "kv_heads"), added(v, more[2], "kv_heads")


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

    q = heads(weights.q, asked_heads(config, config.num_heads), "heads")
    if weights.cached_as is not None:
        by_head = x.reshape(len(x), config.num_kv_heads, config.head_dim)
        x = as_cached(by_head, weights.cached_as).reshape(x.shape).astype(x.dtype)
    return q, repeated(weights.k), repeated(weights.v)


def rounding_as_cached(params: Params, dtype: DTypeLike) -> Params:
    """Unfused parameters for steps with hidden caches, with `AttentionParams.cached_as` for a pool
    of this dtype."""

    def rounding(layer: Any) -> Any:
        attn = dataclasses.replace(layer.attn, cached_as=jnp.dtype(dtype).name)
        return dataclasses.replace(layer, attn=attn)

    return dataclasses.replace(params, layers=tuple(map(rounding, params.layers)))


def kv_weights(weights: AttentionParams) -> KVWeights:
    """The part of a layer's attention that makes K and V; the arrays are those of `weights`."""
    norm = None if weights.k_norm is None else weights.k_norm.scale
    return KVWeights(weights.k.kernel, weights.v.kernel, weights.k.bias, weights.v.bias, norm)


def kv_projection(params: Params, config: ModelConfig, max_len: int) -> KVProjection:
    """How the layers of unfused `params` compute K and V, for positions below max_len. Shares the
    arrays of `params`."""
    rotation = None
    if config.rope is not None:
        rotation = angle_table(config.rope, config.head_dim, max_len)
    weights = tuple(kv_weights(layer.attn) for layer in params.layers)
    return KVProjection(weights, config.norm_eps, rotation)
