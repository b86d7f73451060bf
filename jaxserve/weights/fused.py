"""A loaded checkpoint with q, k and v fused, see `jaxserve.models.fused`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxserve.models.attention import FusedAttention
from jaxserve.models.base import Family, ModelConfig, Params, ParamSpec
from jaxserve.models.fused import fused_specs, side_by_side
from jaxserve.models.sharding import TENSOR, param_sharding


def fuse_loaded(
    params: Params, family: Family, config: ModelConfig, mesh: Mesh | None = None
) -> Params:
    """The parameters with q, k and v of each layer as one array on the devices; those of `params`
    are deleted, one layer's after the other's, so that there is never more than one of them
    twice."""
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    layers = []
    for layer, spec in zip(params.layers, fused_specs(family, config, shards).layers, strict=True):
        attn = layer.attn

        def join(spec: ParamSpec, *parts: jax.Array) -> jax.Array:
            fused = _joining(config, shards, param_sharding(mesh, spec))(parts)
            for part in parts:
                part.delete()
            return fused

        qkv = jax.tree.map(join, spec.attn.qkv, attn.q, attn.k, attn.v)
        fused = FusedAttention(qkv=qkv, o=attn.o, q_norm=attn.q_norm, k_norm=attn.k_norm)
        layers.append(layer.replace(attn=fused))
    return params.replace(layers=tuple(layers))


@functools.cache
def _joining(
    config: ModelConfig, shards: int, sharding: jax.sharding.Sharding
) -> Callable[[tuple[jax.Array, ...]], jax.Array]:
    """`side_by_side` onto a sharding: compiled once for all layers."""
    return jax.jit(
        functools.partial(side_by_side, config=config, shards=shards), out_shardings=sharding
    )
