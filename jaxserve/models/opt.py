"""OPT (Zhang et al. 2022): learned positions, ReLU, LayerNorm with bias, tied output embedding.

The 350m model differs: norms after each sub-layer instead of before, and narrower embeddings with
a projection on either side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.models import hf as fields
from jaxserve.models.base import (
    Attend,
    AttentionInput,
    Carry,
    Family,
    KVProjection,
    KVWeights,
    ModelConfig,
    Params,
    count_params,
    leaf_sources,
    leaf_specs,
)
from jaxserve.models.layers import (
    Linear,
    Norm,
    embed,
    layer_norm,
    linear,
    linear_leaves,
    norm_leaves,
    table_leaf,
    vocab_logits,
)
from jaxserve.models.sharding import constrain

POSITION_OFFSET = 2  # the table's first two rows were padding indices in the original code
NORM_EPS = 1e-5
PREFIX = "model."

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """OPT's shape; `embed_dim` is the width of the token embedding (d_model but for 350m)."""

    embed_dim: int
    pre_norm: bool
    final_norm: bool
    bias: bool
    norm_affine: bool
    tied: bool
    activation: str
    init_std: float

    def num_params(self) -> int:
        return count_params(param_specs(self))


@flax.struct.dataclass
class OPTLayers:
    """The layers' parameters, each leaf stacked [layers, ...]."""

    attn_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


@flax.struct.dataclass
class OPTParams:
    """All parameters: embed_tokens [V, embed_dim], embed_positions [max_position + 2, d_model]."""

    embed_tokens: Params
    embed_positions: Params
    project_in: Linear | None
    layers: OPTLayers
    final_norm: Norm | None
    project_out: Linear | None
    lm_head: Params | None


def config_from_hf(hf: Mapping[str, Any]) -> OPTConfig:
    """The config of a Hugging Face config.json; ValueError names an unsupported field."""
    fields.refuse_quantized(hf)
    d_model = fields.positive_int(hf, "hidden_size")
    num_heads = fields.positive_int(hf, "num_attention_heads")
    if d_model % num_heads:
        raise ValueError(
            f"config.json: hidden_size {d_model} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    head_dim = d_model // num_heads
    pre_norm = fields.flag(hf, "do_layer_norm_before", True)
    return OPTConfig(
        family="opt",
        vocab_size=fields.positive_int(hf, "vocab_size"),
        num_layers=fields.positive_int(hf, "num_hidden_layers"),
        d_model=d_model,
        d_ff=fields.positive_int(hf, "ffn_dim"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position=fields.positive_int(hf, "max_position_embeddings", 2048),
        attn_scale=head_dim**-0.5,
        eos_token_ids=fields.token_ids(hf, "eos_token_id"),
        bos_token_id=fields.bos_token_id(hf),
        embed_dim=fields.positive_int(hf, "word_embed_proj_dim", d_model),
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.flag(hf, "_remove_final_layer_norm", False),
        bias=fields.flag(hf, "enable_bias", True),
        norm_affine=fields.flag(hf, "layer_norm_elementwise_affine", True),
        tied=fields.flag(hf, "tie_word_embeddings", True),
        activation=fields.one_of(hf, "activation_function", tuple(ACTIVATIONS)),
        init_std=fields.number(hf, "init_std", 0.02),
    )


def param_specs(config: OPTConfig) -> OPTParams:
    """The tree of `ParamSpec`."""
    return leaf_specs(_leaves(config))


def hf_layout(config: OPTConfig) -> OPTParams:
    """The tree of `HFTensor`."""
    return leaf_sources(_leaves(config))


def forward(
    params: OPTParams,
    config: OPTConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    carry: Carry,
    *,
    mesh: Mesh | None = None,
) -> tuple[Carry, jax.Array]:
    """Runs the layers; see `jaxserve.models.base.Forward`."""
    x = embed(params.embed_tokens, tokens)
    if params.project_in is not None:
        x = linear(x, params.project_in)
    x = constrain(x + embed(params.embed_positions, positions + POSITION_OFFSET), mesh, None, None)

    def step(
        state: tuple[jax.Array, Carry], scanned: tuple[OPTLayers, jax.Array]
    ) -> tuple[tuple[jax.Array, Carry], None]:
        x, carry = state
        layer, index = scanned
        return _layer(layer, config, x, attend, carry, index, mesh), None

    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x, carry), _ = jax.lax.scan(step, (x, carry), (params.layers, indices))
    if params.final_norm is not None:
        x = layer_norm(x, params.final_norm, NORM_EPS)
    return carry, x


def logits(
    params: OPTParams, config: OPTConfig, hidden: jax.Array, *, mesh: Mesh | None = None
) -> jax.Array:
    """float32 [R, vocab_size] of hidden [R, d_model]."""
    if params.project_out is not None:
        hidden = linear(hidden, params.project_out)
    table = params.embed_tokens if params.lm_head is None else params.lm_head
    return vocab_logits(hidden, table, config.vocab_size, mesh)


def kv_projection(params: OPTParams, config: OPTConfig, max_len: int) -> KVProjection:
    """See `jaxserve.models.base.KVProjection`; positions are learned, so nothing is rotated."""
    return KVProjection(_kv_weights(params.layers), NORM_EPS, None)


def _kv_weights(layers: OPTLayers) -> KVWeights:
    return KVWeights(layers.k.kernel, layers.v.kernel, layers.k.bias, layers.v.bias, None)


def _layer(
    layer: OPTLayers,
    config: OPTConfig,
    x: jax.Array,
    attend: Attend,
    carry: Carry,
    index: jax.Array,
    mesh: Mesh | None,
) -> tuple[jax.Array, Carry]:
    def norm(x: jax.Array, weights: Norm, *, before: bool) -> jax.Array:
        # Pre-norm models normalise a sub-layer's input, post-norm ones its sum with the residual.
        return layer_norm(x, weights, NORM_EPS) if before == config.pre_norm else x

    def heads(x: jax.Array, weights: Linear) -> jax.Array:
        y = linear(x, weights).reshape(x.shape[0], config.num_heads, config.head_dim)
        return constrain(y, mesh, None, "heads", None)

    h = norm(x, layer.attn_norm, before=True)
    q, k, v = (heads(h, weights) for weights in (layer.q, layer.k, layer.v))
    inputs = AttentionInput(q, k, v, h, _kv_weights(layer))
    carry, mixed = attend(carry, index, inputs)
    mixed = mixed.astype(x.dtype).reshape(x.shape[0], config.num_heads * config.head_dim)
    x = constrain(x + linear(mixed, layer.o), mesh, None, None)
    x = norm(x, layer.attn_norm, before=False)

    h = norm(x, layer.mlp_norm, before=True)
    h = ACTIVATIONS[config.activation](constrain(linear(h, layer.up), mesh, None, "mlp"))
    x = constrain(x + linear(h, layer.down), mesh, None, None)
    return norm(x, layer.mlp_norm, before=False), carry


def _leaves(config: OPTConfig) -> OPTParams:
    d, e, std = config.d_model, config.embed_dim, config.init_std
    projected = e != d
    decoder = f"{PREFIX}decoder"
    final_norm = norm_leaves(
        f"{decoder}.final_layer_norm", d, scale=config.norm_affine, bias=config.norm_affine
    )
    return OPTParams(
        embed_tokens=table_leaf(f"{decoder}.embed_tokens", config.vocab_size, e, "vocab", std),
        embed_positions=table_leaf(
            f"{decoder}.embed_positions", config.max_position + POSITION_OFFSET, d, "positions", std
        ),
        project_in=linear_leaves(
            f"{decoder}.project_in", (e, d), ("embed", "embed"), bias=False, std=std
        )
        if projected
        else None,
        layers=_layer_leaves(config, f"{decoder}.layers.{{}}"),
        final_norm=final_norm if config.final_norm else None,
        project_out=linear_leaves(
            f"{decoder}.project_out", (d, e), ("embed", "embed"), bias=False, std=std
        )
        if projected
        else None,
        lm_head=None if config.tied else table_leaf("lm_head", config.vocab_size, e, "vocab", std),
    )


def _layer_leaves(config: OPTConfig, name: str) -> OPTLayers:
    d, n = config.d_model, config.num_layers

    def projection(
        part: str, shape: tuple[int, int], axes: tuple[str, str], granule: int = 1
    ) -> Linear:
        return linear_leaves(
            f"{name}.{part}",
            shape,
            axes,
            bias=config.bias,
            std=config.init_std,
            num_layers=n,
            granule=granule,
        )

    def norm(part: str) -> Norm:
        affine = config.norm_affine
        return norm_leaves(f"{name}.{part}", d, scale=affine, bias=affine, num_layers=n)

    into, out_of, h = ("embed", "heads"), ("heads", "embed"), config.head_dim
    return OPTLayers(
        attn_norm=norm("self_attn_layer_norm"),
        q=projection("self_attn.q_proj", (d, d), into, h),
        k=projection("self_attn.k_proj", (d, d), into, h),
        v=projection("self_attn.v_proj", (d, d), into, h),
        o=projection("self_attn.out_proj", (d, d), out_of, h),
        mlp_norm=norm("final_layer_norm"),
        up=projection("fc1", (d, config.d_ff), ("embed", "mlp")),
        down=projection("fc2", (config.d_ff, d), ("mlp", "embed")),
    )


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    prefix=PREFIX,
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    hf_layout=hf_layout,
    forward=forward,
    logits=logits,
    kv_projection=kv_projection,
)
