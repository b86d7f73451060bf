"""Layers with a gated delta net in place of attention: their projections, the gated norm behind
them, and how checkpoints have them. The recurrence itself is passed in, as attention is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.models.base import HFTensor, Leaf, ModelConfig, Params, ParamSpec
from jaxserve.models.layers import Linear, Norm, linear, linear_leaves, norm_leaves
from jaxserve.models.sharding import constrain
from jaxserve.pallas_kernels import DeltaInput, DeltaNet, gated, rms_norm


@flax.struct.dataclass
class DeltaParts:
    """One layer's parameters, as in checkpoints.

    Attributes:
        qkvz: projections to Q, K, V and the output's gate: one with all of them for each key head,
            or one for each, all heads one after another.
        ba: likewise to the gates of a state: how much is written, and how much is forgotten.
        conv: float32 [channels of all Q, of all K and of all V, 1, taps].
        rate, shift: float32 [value_heads], see `DeltaInput`.
        norm: [value_dim].
        o: [value_heads * value_dim, d_model].
    """

    qkvz: tuple[Linear, ...]
    ba: tuple[Linear, ...]
    conv: Params
    rate: Params
    shift: Params
    norm: Norm
    o: Linear


@flax.struct.dataclass
class DeltaParams:
    """The same as steps have them.

    Attributes:
        qkvz: [d_model, key_heads * (channels + per_key * value_dim)], those of a key head and its
            value heads side by side.
        ba: [d_model, key_heads * 2 * per_key], likewise.
        conv: float32 [key_heads, channels, taps].
        rate, shift: float32 [key_heads, per_key].
        norm, o: as in `DeltaParts`.
    """

    qkvz: Linear
    ba: Linear
    conv: Params
    rate: Params
    shift: Params
    norm: Norm
    o: Linear


def delta_leaves(config: ModelConfig, name: str, *, apart: bool) -> DeltaParts:
    """The leaves of one layer, see `Family.leaves`.

    Args:
        config: the model's.
        name: prefix in checkpoints.
        apart: whether projections are stored one by one, not joined by key head.
    """
    net = _net(config)
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim

    def project(part: str, width: int, rows: tuple[int, int] | None = None) -> Linear:
        return linear_leaves(
            f"{name}.in_proj_{part}",
            (config.d_model, width),
            ("embed", "heads"),
            bias=False,
            std=config.init_std,
            granule=width // net.key_heads,
            rows=rows,
        )

    def gate(part: str, width: int) -> Linear:
        """Few outputs that decide a lot: never quantised."""
        shape, granule = (config.d_model, width), width // net.key_heads
        spec = ParamSpec(shape, ("embed", "heads"), std=config.init_std, granule=granule)
        source = HFTensor(f"{name}.in_proj_{part}.weight", transpose=True)
        return Linear(kernel=Leaf(spec, source, wide=True))

    def numbers(part: str, shape: tuple[int, ...], init: str = "normal") -> Leaf:
        axes = ("heads", *[None] * (len(shape) - 1))
        granule = shape[0] // net.key_heads
        spec = ParamSpec(shape, axes, init, config.init_std, granule, dtype="float32")
        return Leaf(spec, HFTensor(f"{name}.{part}"), wide=True)

    qkvz: tuple[Linear, ...] = (project("qkvz", 2 * (keys + values)),)
    if apart:
        joined = 2 * keys + values
        places = ((0, keys), (keys, keys), (2 * keys, values))
        qkvz = tuple(project("qkv", width, (first, joined)) for first, width in places)
        qkvz += (project("z", values),)
    heads = net.value_heads
    return DeltaParts(
        qkvz=qkvz,
        ba=(gate("b", heads), gate("a", heads)) if apart else (gate("ba", 2 * heads),),
        conv=numbers("conv1d.weight", (2 * keys + values, 1, net.taps)),
        rate=numbers("A_log", (heads,), "zeros"),
        shift=numbers("dt_bias", (heads,), "ones"),
        norm=norm_leaves(f"{name}.norm", net.value_dim),
        o=linear_leaves(
            f"{name}.out_proj",
            (values, config.d_model),
            ("heads", "embed"),
            bias=False,
            std=config.init_std,
            granule=values // net.key_heads,
        ),
    )


def joined(parts: DeltaParts, config: ModelConfig) -> DeltaParams:
    """A checkpoint's parameters of a layer as steps have them."""
    net = _net(config)

    def by_head(arrays: Sequence[Any]) -> Any:
        lead = arrays[0].shape[:-1]
        apart = [array.reshape(*lead, net.key_heads, -1) for array in arrays]
        return jnp.concatenate(apart, axis=-1).reshape(*lead, -1)

    keys = net.key_heads * net.key_dim
    taps = jnp.split(parts.conv[:, 0], (keys, 2 * keys))
    conv = [part.reshape(net.key_heads, -1, net.taps) for part in taps]
    return _with(
        parts,
        by_head,
        jnp.concatenate(conv, axis=1),
        *(part.reshape(net.key_heads, -1) for part in (parts.rate, parts.shift)),
    )


def joined_specs(parts: DeltaParts, config: ModelConfig) -> DeltaParams:
    """The specs of a layer's parameters as steps have them. parts: those of checkpoints."""
    net = _net(config)

    def by_head(specs: Sequence[ParamSpec]) -> ParamSpec:
        first, width = specs[0], sum(spec.shape[-1] for spec in specs)
        return ParamSpec(
            (*first.shape[:-1], width),
            first.axes,
            first.init,
            first.std,
            width // net.key_heads,
            first.dtype,
        )

    def shaped(*shape: int) -> ParamSpec:
        return ParamSpec(shape, ("heads", *[None] * (len(shape) - 1)), dtype="float32")

    each = shaped(net.key_heads, net.per_key)
    return _with(parts, by_head, shaped(net.key_heads, net.channels, net.taps), each, each)


def _with(parts: DeltaParts, join: Any, conv: Any, rate: Any, shift: Any) -> DeltaParams:
    def one(several: tuple[Linear, ...]) -> Linear:
        whole: Linear = jax.tree.map(lambda *leaves: join(leaves), *several)
        return whole if len(several) > 1 else several[0]

    return DeltaParams(one(parts.qkvz), one(parts.ba), conv, rate, shift, parts.norm, parts.o)


def delta_input(
    weights: DeltaParams, config: ModelConfig, x: jax.Array, group: int, mesh: Mesh | None
) -> tuple[DeltaInput, jax.Array]:
    """What a layer hands to the recurrence, and the gate of its output, [T, value_heads *
    value_dim].

    Args:
        weights: the layer's parameters.
        config: the model's.
        x: [T, d_model], normalised.
        group: the layer's, see `models.layer_groups`.
        mesh: the devices that the parameters are sharded over; None for one.
    """
    net, x = _net(config), constrain(x, mesh, None, None)

    def by_head(projection: Linear) -> jax.Array:
        y = linear(x, projection, mesh).reshape(len(x), net.key_heads, -1)
        return constrain(y, mesh, None, "heads", None)

    mixed, gate = jnp.split(by_head(weights.qkvz), (net.channels,), axis=-1)
    conv, rate, shift = (
        part.astype(jnp.float32) for part in (weights.conv, weights.rate, weights.shift)
    )
    given = DeltaInput(mixed, by_head(weights.ba), conv, rate, shift, net, group)
    return given, gate.reshape(len(x), -1)


def delta_output(
    weights: DeltaParams, config: ModelConfig, out: jax.Array, gate: jax.Array
) -> jax.Array:
    """What the output projection reads: the result of the recurrence, normed over each head, times
    the gate's activation.

    Args:
        weights: the layer's parameters.
        config: the model's.
        out: float32 [T, value_heads, value_dim].
        gate: [T, value_heads * value_dim].

    Returns:
        [T, value_heads * value_dim].
    """
    normed = rms_norm(out, weights.norm.scale, config.norm_eps)
    return gated(gate, normed.reshape(gate.shape).astype(gate.dtype), "silu", None)


def _net(config: ModelConfig) -> DeltaNet:
    assert config.delta is not None
    return config.delta
