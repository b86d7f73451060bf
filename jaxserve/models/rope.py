"""Rotary position embedding (Su et al. 2021, section 3.4) and the scalings of known checkpoints.

Scalings: linear position interpolation (Chen et al. 2023), the by-parts rule of Llama 3.1
(Grattafiori et al. 2024, and its released config), YaRN (Peng et al. 2023, sections 3.2 to 3.4),
LongRoPE (Ding et al. 2024, section 3.2), and "dynamic NTK", which stretches the base by the length
of the context (Peng et al. 2023, section 3.1 and appendix B.3; transformers' formula).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import pallas_kernels
from jaxserve.models import hf as fields

_MOST_FACTORS = 1024
_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_KNOWN: dict[str, set[str]] = {
    "default": set(),
    "dynamic": {"factor"},
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "long_factor",
        "short_factor",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """How positions turn into angles.

    Attributes:
        kind: "default", "dynamic", "linear", "llama3", "yarn" or "longrope".
        theta: base of the frequencies.
        factor: how many times the context was stretched; dynamic: how fast the base grows.
        original_max: context length before that, in tokens.
        low, high: llama3: the wavelengths original_max / low and / high bound the blend; yarn:
            beta_slow and beta_fast, in rotations over original_max.
        truncate: yarn: whole dimensions as the blend's bounds.
        amplitude: factor on cos and sin (yarn's attention temperature).
        partial: share of a head's elements that is rotated, starting with the first.
        factors: longrope: divisors of the frequencies.
        short_factors: likewise, if no context is longer than original_max.
        longest: dynamic: the longest context in tokens, which determines its base.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 0
    low: float = 1.0
    high: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    partial: float = 1.0
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    longest: int = 0


def rope_from_hf(hf: Mapping[str, Any], *, partial: bool = False) -> Rope:
    """Reads `rope_theta` and `rope_scaling` of a config.json, or the newer `rope_parameters`. If
    both are given, somebody has added the older one to the config, so it takes precedence.

    Args:
        hf: the config.
        partial: whether models of its kind may rotate a part of each head.

    Raises:
        ValueError: If a scaling is not supported; names its field.
    """
    field = _field(hf)
    scaling = fields.mapping(hf, field)
    theta = fields.number({**hf, **scaling}, "rope_theta", 10000.0)
    if theta <= 1:
        raise ValueError(f"config.json: rope_theta must be above 1, got {theta:g}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling):
        kind = "longrope"  # its name in Phi-3's first configs
    if not isinstance(kind, str) or kind not in _KNOWN:
        raise ValueError(
            f"config.json: {field}.rope_type {fields.shown(kind)} is not supported "
            f"(known: {', '.join(_KNOWN)})"
        )
    unknown = sorted(set(scaling) - _KNOWN[kind] - _COMMON)
    if unknown:
        name = unknown[0][:80]
        raise ValueError(f"config.json: {field}.{name} is not supported with {kind!r} rope")
    share = fields.number({**hf, **scaling}, "partial_rotary_factor", 1.0)
    if share != 1 and not partial:
        raise ValueError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return Rope(theta=theta, partial=share)
    if share != 1 and kind != "longrope":
        what = f"{field}.rope_type {kind!r} with a partial_rotary_factor"
        raise ValueError(f"config.json: {what} is not supported")
    if kind == "longrope":
        return _longrope(hf, scaling, field, Rope(kind=kind, theta=theta, partial=share))
    if kind == "linear":
        return Rope(kind=kind, theta=theta, factor=fields.number(scaling, "factor"))
    max_position = fields.positive_int(hf, "max_position_embeddings")
    if kind == "dynamic":
        factor = fields.number(scaling, "factor")
        rope = Rope(kind=kind, theta=theta, factor=factor, original_max=max_position)
        return for_length(rope, longest_context(rope, hf))
    original = _original_max(hf, scaling, max_position)
    factor = fields.number(scaling, "factor", max_position / original if kind == "yarn" else None)
    if kind == "llama3":
        low, high = (fields.number(scaling, f"{end}_freq_factor") for end in ("low", "high"))
        if low >= high:
            raise ValueError(
                f"config.json: {field}.low_freq_factor {low} must be below high_freq_factor {high}"
            )
        return Rope(
            kind=kind, theta=theta, factor=factor, original_max=original, low=low, high=high
        )
    return Rope(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max=original,
        low=fields.number(scaling, "beta_slow", 1.0),
        high=fields.number(scaling, "beta_fast", 32.0),
        truncate=fields.flag(scaling, "truncate", True),
        amplitude=_yarn_amplitude(scaling, factor),
    )


def _field(hf: Mapping[str, Any]) -> str:
    return "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"


def _original_max(hf: Mapping[str, Any], scaling: Mapping[str, Any], max_position: int) -> int:
    """The context that the model was first trained with: the config's own field comes before the
    scaling's."""
    name = "original_max_position_embeddings"
    return fields.positive_int(hf, name, fields.positive_int(scaling, name, max_position))


def _longrope(hf: Mapping[str, Any], scaling: Mapping[str, Any], field: str, rope: Rope) -> Rope:
    max_position = fields.positive_int(hf, "max_position_embeddings")
    original = _original_max(hf, scaling, max_position)
    factor = fields.number(scaling, "factor", max_position / original)
    amplitude = 1.0
    if factor > 1 and original > 1:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original))
    long, short = (_factors(scaling, f"{end}_factor", field) for end in ("long", "short"))
    return dataclasses.replace(
        rope,
        factor=factor,
        original_max=original,
        amplitude=fields.number(scaling, "attention_factor", amplitude),
        factors=long if max_position > original else short,
        short_factors=short,
    )


def _factors(scaling: Mapping[str, Any], name: str, field: str) -> tuple[float, ...]:
    factors = scaling.get(name)
    if not isinstance(factors, list) or len(factors) > _MOST_FACTORS:
        what = f"must be a list of numbers, got {fields.shown(factors)}"
        raise ValueError(f"config.json: {field}.{name} {what}")
    return tuple(fields.number({name: factor or 0}, name) for factor in factors)


def for_length(rope: Rope, longest: int) -> Rope:
    """The rotation for contexts of at most this many tokens: longrope has another for contexts
    within the original length, dynamic one for each length beyond it. All contexts share one
    rotation, since keys are cached rotated."""
    if rope.kind == "longrope" and longest <= rope.original_max:
        return dataclasses.replace(rope, factors=rope.short_factors)
    if rope.kind == "dynamic":
        return dataclasses.replace(rope, longest=max(longest, rope.original_max))
    return rope


def check_width(rope: Rope, head_dim: int) -> None:
    """Raises ValueError if the rotation does not fit heads of this width."""
    rotated = int(head_dim * rope.partial)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ValueError(
            f"config.json: partial_rotary_factor {rope.partial:g} of head_dim {head_dim} is not "
            "an even number of elements"
        )
    if rope.kind == "dynamic" and rotated < 4:
        raise ValueError(
            f"config.json: 'dynamic' rope needs a head_dim of 4 or more, got {head_dim}"
        )
    lengths = {len(rope.factors), len(rope.short_factors)}
    if rope.kind == "longrope" and lengths != {rotated // 2}:
        raise ValueError(
            f"config.json: long_factor and short_factor must have {rotated // 2} numbers each, got "
            f"{len(rope.factors)} and {len(rope.short_factors)}"
        )


def longest_context(rope: Rope, hf: Mapping[str, Any]) -> int:
    """The longest context of a config.json, in tokens. Raises ValueError if that is absurd.

    transformers warns beyond `max_position_embeddings`, whatever the scaling. It may be the context
    before or after stretching: with YaRN and dynamic scaling it is the former. With linear scaling
    it is taken as it is, unless `max_sequence_length` (Vicuna) is larger, since a context beyond
    the model's is worse than a shorter one.
    """
    stretched = fields.positive_int(hf, "max_position_embeddings")
    if rope.kind == "linear":
        stated = fields.positive_int(hf, "max_sequence_length", stretched)
        stretched = max(stretched, int(min(stated, stretched * rope.factor)))
    elif rope.kind in ("yarn", "dynamic"):
        stretched = max(stretched, int(rope.original_max * rope.factor))
    if not 1 <= stretched <= fields.MAX_POSITION:
        raise ValueError(
            f"config.json: factor {rope.factor:g} gives {stretched:g} positions; 1 to "
            f"{fields.MAX_POSITION} are possible"
        )
    return stretched


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per token of each pair of elements: float32 [rotated elements / 2]."""
    head_dim = int(head_dim * rope.partial)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    theta = rope.theta
    if rope.kind == "dynamic":
        beyond = 1 + rope.factor * (rope.longest / rope.original_max - 1)
        theta *= beyond ** (head_dim / (head_dim - 2))
    base = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if rope.kind in ("default", "dynamic"):
        return base
    if rope.kind == "longrope":
        return base / np.asarray(rope.factors, np.float32)
    stretched = base / np.float32(rope.factor)
    if rope.kind == "linear":
        return stretched
    keep = _llama3_keep(rope, base) if rope.kind == "llama3" else _yarn_keep(rope, head_dim)
    return (keep * base + (1.0 - keep) * stretched).astype(np.float32)


def angle_table(rope: Rope, head_dim: int, max_len: int) -> jax.Array:
    """cos and sin of all positions below max_len: float32 [2, max_len, head_dim // 2], a constant
    in the program that uses it."""
    frequencies = inverse_frequencies(rope, head_dim)
    return pallas_kernels.angle_table(max_len, frequencies, rope.amplitude)


def angles(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin for positions [T]: float32 [T, 1, head_dim // 2] each."""
    frequencies = inverse_frequencies(rope, head_dim)
    return pallas_kernels.angles(positions, frequencies, rope.amplitude)


def rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [T, heads, 2 n] by cos and sin [T, 1, n]: element 2 i pairs with 2 i + 1, as in
    DeepSeek. In the result, the first elements of all pairs come before the second ones: products
    of queries with keys don't depend on the order."""
    half = cos.shape[-1]
    pairs = x.reshape(*x.shape[:-1], half, 2)
    return pallas_kernels.rotate(jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1), cos, sin)


def _llama3_keep(rope: Rope, base: np.ndarray) -> np.ndarray:
    """Share of the original frequency: 1 for short wavelengths, 0 for long ones."""
    rotations = rope.original_max * base / (2 * math.pi)
    return np.clip((rotations - rope.low) / (rope.high - rope.low), 0.0, 1.0)


def _yarn_keep(rope: Rope, head_dim: int) -> np.ndarray:
    """Share of the original frequency, falling linearly between two dimensions."""

    def dimension(rotations: float) -> float:
        """The dimension whose angle makes this many rotations over the original context."""
        wavelength = rope.original_max / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(rope.high), dimension(rope.low)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = max(last - first, 0.001)
    return 1.0 - np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)


def _yarn_amplitude(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return fields.number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        over = _temperature(factor, fields.number(scaling, "mscale"))
        return over / _temperature(factor, fields.number(scaling, "mscale_all_dim"))
    return _temperature(factor, 1.0)


def score_factor(hf: Mapping[str, Any], rope: Rope) -> float:
    """Factor on the scores of a DeepSeek: `mscale_all_dim` scales all elements of a head, in both
    queries and keys. Raises ValueError if it is not a number. rope: the same config's rope."""
    scaling = fields.mapping(hf, _field(hf))
    if rope.kind != "yarn" or not scaling.get("mscale_all_dim"):
        return 1.0
    return _temperature(rope.factor, fields.number(scaling, "mscale_all_dim")) ** 2


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
