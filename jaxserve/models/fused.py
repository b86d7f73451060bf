"""A layer's q, k and v as one projection, so that a step multiplies x once and not three times. In
checkpoints the three are separate (`AttentionParams`), and also in steps with hidden caches, which
read the weights of K and V alone: slicing the fused weights would copy them. All other steps take
them fused (`FusedAttention`). The columns are ordered by shard, so that each device of a mesh holds
the columns of its own heads: the shard's query heads, then its heads of K, then its heads of V,
head_dim columns each. A KV head that several shards read is repeated for each of them (see
`sharding.pool_kv_heads`). Of latent projections (`LatentAttention`) steps have `kv_b` cut by heads,
and of a gated delta net (`DeltaParts`) projections whose columns are ordered by key head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.attention import AttentionParams, FusedAttention, asked_heads
from jaxserve.models.base import Family, ModelConfig, Params, ParamSpec
from jaxserve.models.delta import DeltaParts, joined, joined_specs
from jaxserve.models.latent import LatentAttention, by_head, by_head_specs
from jaxserve.models.registry import get_family
from jaxserve.models.sharding import heads_a_shard, padded_shape, param_sharding


def side_by_side(parts: Sequence[jax.Array], config: ModelConfig, shards: int) -> jax.Array:
    """Joins the columns of q, k and v, parts [..., heads * head_dim], to one array [...,
    columns]."""
    queries, kv = heads_a_shard(config, shards)
    queries = asked_heads(config, queries)
    stored = (asked_heads(config, config.num_heads), config.num_kv_heads, config.num_kv_heads)
    lead = parts[0].shape[:-1]

    def by_shard(part: jax.Array, heads: int, wanted: int) -> jax.Array:
        apart = part.reshape(*lead, heads, config.head_dim)
        apart = jnp.repeat(apart, shards * wanted // heads, axis=-2)
        return apart.reshape(*lead, shards, wanted * config.head_dim)

    wanted = (queries, kv, kv)
    fused = jnp.concatenate(
        [by_shard(*part) for part in zip(parts, stored, wanted, strict=True)], axis=-1
    )
    return fused.reshape(*lead, -1)


def fuse(params: Params, config: ModelConfig, shards: int = 1) -> Params:
    """A checkpoint's parameters as steps have them: with q, k and v fused, or `kv_b` cut by heads.
    These are copied; all other arrays are shared with `params`."""
    return _with_layers(
        params,
        lambda attn: _fused(attn, lambda parts: side_by_side(parts, config, shards)),
        {LatentAttention: by_head, DeltaParts: joined},
        config,
    )


def fused_specs(family: Family, config: ModelConfig, shards: int) -> Params:
    """The specs of fused parameters: a tree of `ParamSpec` with their structure."""
    queries, kv = heads_a_shard(config, shards)
    columns = (asked_heads(config, queries) + 2 * kv) * config.head_dim

    def spec(parts: Sequence[ParamSpec]) -> ParamSpec:
        shape = (*parts[0].shape[:-1], shards * columns)
        return dataclasses.replace(parts[0], shape=shape, granule=columns)

    return _with_layers(
        family.param_specs(config),
        lambda attn: _fused(attn, spec),
        {LatentAttention: by_head_specs, DeltaParts: joined_specs},
        config,
    )


def _with_layers(
    params: Params, change: Any, others: dict[type, Callable[..., Any]], config: ModelConfig
) -> Params:
    """The parameters with each layer's attention changed. others: functions of it and the config
    for those that are not attention with q, k and v, by their types."""

    def changed(attn: Any) -> Any:
        other = others.get(type(attn))
        return change(attn) if other is None else other(attn, config)

    layers = tuple(layer.replace(attn=changed(layer.attn)) for layer in params.layers)
    return params.replace(layers=layers)


def _fused(attn: AttentionParams, join: Any) -> FusedAttention:
    """The attention's parameters with q, k and v joined. join: joins the three leaves to one."""
    qkv = jax.tree.map(lambda *parts: join(parts), attn.q, attn.k, attn.v)
    return FusedAttention(
        qkv=qkv, o=attn.o, q_norm=attn.q_norm, k_norm=attn.k_norm, sinks=attn.sinks
    )


def param_bytes(config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None) -> int:
    """Bytes of parameters on each device (without a mesh: on the one device), with q, k and v
    fused, and quantised ones as steps have them. Unfused parameters take the same, unless KV heads
    are repeated, and such models have no hidden caches. dtype: dtype of parameters without a dtype
    of their own."""
    shards = 1 if mesh is None else mesh.size
    specs = jax.tree.leaves(fused_specs(get_family(config.family), config, shards))
    return sum(
        math.prod(param_sharding(mesh, spec).shard_shape(padded_shape(mesh, spec)))
        * jnp.dtype(spec.dtype or dtype).itemsize
        for spec in specs
    )
