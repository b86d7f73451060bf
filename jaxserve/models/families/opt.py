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
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models import hf as fields
from jaxserve.models.attention import AttentionParams, FusedAttention, attention_leaves
from jaxserve.models.base import Attention, Carry, Family, ModelConfig, Params, StepInputs
from jaxserve.models.layers import (
    Linear,
    Norm,
    embed_rows,
    linear,
    linear_leaves,
    norm_leaves,
    table_leaf,
)
from jaxserve.models.sharding import constrain
from jaxserve.pallas_kernels import layer_norm

POSITION_OFFSET = 2  # the table's first two rows were padding indices in the original code
NORM_EPS = 1e-5
PREFIX = "model."

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """The shape of an OPT model.

    Attributes:
        embed_dim: width of the token embedding; d_model except for 350m.
        pre_norm: norms come before each sub-layer; else after.
        final_norm: there is a norm after the last layer.
        bias: projections have biases.
        norm_affine: norms have scales and biases.
        activation: the feed-forward layer's activation, a key of `ACTIVATIONS`.
    """

    embed_dim: int
    pre_norm: bool
    final_norm: bool
    bias: bool
    norm_affine: bool
    activation: str


@flax.struct.dataclass
class OPTLayer:
    """One layer's parameters.

    Attributes:
        attn_norm: [d_model], before or after attention.
        attn: the attention's parameters.
        mlp_norm: [d_model], before or after the feed-forward layer.
        up: [d_model, d_ff].
        down: [d_ff, d_model].
    """

    attn_norm: Norm
    attn: AttentionParams | FusedAttention
    mlp_norm: Norm
    up: Linear
    down: Linear


@flax.struct.dataclass
class OPTParams:
    """All parameters.

    Attributes:
        embed_tokens: [V, embed_dim].
        embed_positions: [max_position + 2, d_model].
        project_in, project_out: between embed_dim and d_model; None if these are equal.
        layers: one entry per layer, in order.
        final_norm: None for post-norm models.
        lm_head: [V, embed_dim]; None if tied to embed_tokens.
    """

    embed_tokens: Params
    embed_positions: Params
    project_in: Linear | None
    layers: tuple[OPTLayer, ...]
    final_norm: Norm | None
    project_out: Linear | None
    lm_head: Params | None


def config_from_hf(hf: Mapping[str, Any]) -> OPTConfig:
    """The config of a Hugging Face config.json. Raises ValueError, which names an unsupported
    field."""
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
        norm_eps=NORM_EPS,
        tied=fields.flag(hf, "tie_word_embeddings", True),
        init_std=fields.number(hf, "init_std", 0.02),
        embed_dim=fields.positive_int(hf, "word_embed_proj_dim", d_model),
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.flag(hf, "_remove_final_layer_norm", False),
        bias=fields.flag(hf, "enable_bias", True),
        norm_affine=fields.flag(hf, "layer_norm_elementwise_affine", True),
        causal=fields.flag(hf, "is_causal", True),
        activation=fields.one_of(hf, "activation_function", tuple(ACTIVATIONS)),
    )


def leaves(config: ModelConfig) -> OPTParams:
    """The parameters' specs and places in a checkpoint, see `jaxserve.models.base.Family`."""
    assert isinstance(config, OPTConfig)
    d, e, std = config.d_model, config.embed_dim, config.init_std
    decoder = f"{PREFIX}decoder"

    def between(part: str, shape: tuple[int, int]) -> Linear | None:
        name, axes = f"{decoder}.{part}", ("embed", "embed")
        return None if e == d else linear_leaves(name, shape, axes, bias=False, std=std)

    final_norm = _norm_leaves(config, f"{decoder}.final_layer_norm")
    return OPTParams(
        embed_tokens=table_leaf(f"{decoder}.embed_tokens", config.vocab_size, e, "vocab", std),
        embed_positions=table_leaf(
            f"{decoder}.embed_positions", config.max_position + POSITION_OFFSET, d, "positions", std
        ),
        project_in=between("project_in", (e, d)),
        layers=tuple(
            _layer_leaves(config, f"{decoder}.layers.{i}") for i in range(config.num_layers)
        ),
        final_norm=final_norm if config.final_norm else None,
        project_out=between("project_out", (d, e)),
        lm_head=None if config.tied else table_leaf("lm_head", config.vocab_size, e, "vocab", std),
    )


def embed(
    params: OPTParams,
    config: ModelConfig,
    inputs: StepInputs,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None,
) -> jax.Array:
    """Token and position embeddings, see `jaxserve.models.base.Embed`.

    Args:
        params: the model's parameters.
        config: its shape.
        inputs: the tokens and their positions.
        dtype: dtype of the result.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [T, d_model].
    """
    x = embed_rows(params.embed_tokens, inputs.tokens, dtype)
    if params.project_in is not None:
        x = linear(x, params.project_in, mesh)
    places = embed_rows(params.embed_positions, inputs.positions + POSITION_OFFSET, dtype)
    return constrain(x + places, mesh, None, None)


def layer(
    weights: OPTLayer,
    config: ModelConfig,
    x: jax.Array,
    attention: Attention,
    *,
    real: jax.Array | None,
    mesh: Mesh | None,
) -> tuple[Carry, jax.Array]:
    """One layer, see `jaxserve.models.base.Layer`.

    Args:
        weights: the layer's parameters.
        config: the model's shape.
        x: [T, d_model].
        attention: called once, with the sub-layer's input.
        real: ignored, since all tokens cost the same.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        The carry, and the output [T, d_model].
    """
    assert isinstance(config, OPTConfig)

    def norm(x: jax.Array, norm: Norm, *, before: bool) -> jax.Array:
        # Pre-norm models normalise a sub-layer's input, post-norm ones its sum with the residual.
        if before != config.pre_norm:
            return x
        return layer_norm(x, norm.scale, norm.bias, config.norm_eps)

    carry, mixed = attention(norm(x, weights.attn_norm, before=True))
    x = constrain(x + mixed, mesh, None, None)
    x = norm(x, weights.attn_norm, before=False)

    h = norm(x, weights.mlp_norm, before=True)
    h = ACTIVATIONS[config.activation](constrain(linear(h, weights.up, mesh), mesh, None, "mlp"))
    x = constrain(x + linear(h, weights.down, mesh), mesh, None, None)
    return carry, norm(x, weights.mlp_norm, before=False)


def finish(params: OPTParams, config: ModelConfig, x: jax.Array, *, mesh: Mesh | None) -> jax.Array:
    """The final norm and the output projection, if there are any, see
    `jaxserve.models.base.Finish`.

    Args:
        params: the model's parameters.
        config: its shape.
        x: [R, d_model].
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [R, embed_dim].
    """
    if params.final_norm is not None:
        final = params.final_norm
        x = layer_norm(x, final.scale, final.bias, config.norm_eps)
    return x if params.project_out is None else linear(x, params.project_out, mesh)


def _layer_leaves(config: OPTConfig, name: str) -> OPTLayer:
    def projection(part: str, shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
        full = f"{name}.{part}"
        return linear_leaves(full, shape, axes, bias=config.bias, std=config.init_std)

    bias, d, d_ff = config.bias, config.d_model, config.d_ff
    return OPTLayer(
        attn_norm=_norm_leaves(config, f"{name}.self_attn_layer_norm"),
        attn=attention_leaves(
            config, f"{name}.self_attn", out="out_proj", bias=bias, out_bias=bias
        ),
        mlp_norm=_norm_leaves(config, f"{name}.final_layer_norm"),
        up=projection("fc1", (d, d_ff), ("embed", "mlp")),
        down=projection("fc2", (d_ff, d), ("mlp", "embed")),
    )


def _norm_leaves(config: OPTConfig, name: str) -> Norm:
    affine = config.norm_affine
    return norm_leaves(name, config.d_model, scale=affine, bias=affine)


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    prefix=PREFIX,
    config_from_hf=config_from_hf,
    leaves=leaves,
    embed=embed,
    layer=layer,
    finish=finish,
)
