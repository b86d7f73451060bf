"""Quantises weights on their devices: round to nearest, by the scale that leaves each group the
least squared error."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.models.base import Leaf
from jaxserve.models.quantized import LARGEST, Quantization, Quantized, Scheme, pack_pairs
from jaxserve.models.sharding import param_sharding

# Scales that are tried, over the one that loses no number of the group.
_RATIOS = {
    "int8": (1.0, 0.95, 0.9, 0.8),
    "int4": tuple(1.06 - 0.03 * step for step in range(14)),
    "fp8": (1.0,),
}
_REFITS = {"int4": 2}  # times that a scale is fitted to the numbers that it has made


def quantize(weights: jax.Array, scheme: Scheme, *, transposed: bool = False) -> Quantized:
    """The weight [in, out] (transposed: a table [out, in]) in few bits. Groups of zeros get scale
    1."""
    axis = 1 if transposed else 0
    shape, groups = list(weights.shape), scheme.groups(weights.shape[axis])
    by_group = list(shape)
    by_group[axis : axis + 1] = [groups, shape[axis] // groups]
    w = weights.astype(jnp.float32).reshape(by_group)
    axis += 1
    dtype = jnp.dtype(scheme.dtype)
    largest = LARGEST[scheme.kind]
    # [-8, 7] is all of int4; -128 stays free, as others' kernels expect of int8.
    least = -largest - 1 if scheme.kind == "int4" else -largest

    Tried = tuple[jax.Array, Quantized]

    def tried(scale: jax.Array, zero: jax.Array | None, ratio: jax.Array | float = 1.0) -> Tried:
        """The weight by this scale, and the error it is left with. zero: None to choose it."""
        scale = scale.astype(scheme.scale)
        scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)  # NaN stays, to be found
        wide = scale.astype(jnp.float32)
        if zero is None:
            zero = jnp.clip(jnp.round(least - low * ratio / wide), least, largest)
        q = w / wide + zero
        q = jnp.clip(q if scheme.kind == "fp8" else jnp.round(q), least, largest).astype(dtype)
        error = jnp.square((q.astype(jnp.float32) - zero) * wide - w).sum(axis, keepdims=True)
        return error, Quantized(q, scale, zero)

    def better(best: Tried, now: Tried) -> Tried:
        wins = now[0] < best[0]
        return jax.tree.map(lambda new, old: jnp.where(wins, new, old), now, best)

    low, high = w.min(axis, keepdims=True), w.max(axis, keepdims=True)
    if scheme.zero:  # 0 must be a number of the range
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        whole, zero = (high - low) / (largest - least), None
    else:
        whole, zero = jnp.maximum(high, -low) / largest, jnp.zeros_like(low)
    # Without zero points it matters which end of the group is -8, which has no opposite.
    signs = (1, -1) if scheme.kind == "int4" and not scheme.zero else (1,)
    ratios = [sign * ratio for ratio in _RATIOS[scheme.kind] for sign in signs]
    found, _ = jax.lax.scan(
        lambda best, ratio: (better(best, tried(whole * ratio, zero, ratio)), None),
        tried(whole * ratios[0], zero, ratios[0]),
        jnp.array(ratios[1:], jnp.float32),
    )
    for _ in range(_REFITS.get(scheme.kind, 0)):
        # The scale that suits the numbers best, and the numbers that suit it.
        q = found[1].q.astype(jnp.float32) - found[1].zero
        scale = (w * q).sum(axis, keepdims=True) / jnp.square(q).sum(axis, keepdims=True)
        found = better(found, tried(scale, found[1].zero))
    best = found[1]
    of_group = list(best.scale.shape)
    del of_group[axis]
    q = best.q.reshape(shape)
    return Quantized(
        q=q if scheme.bits == 8 else pack_pairs(q, axis - 1),
        scale=best.scale.reshape(of_group),
        zero=best.zero.reshape(of_group).astype(jnp.int8) if scheme.zero else None,
        bits=scheme.bits,
    )


def quantize_leaf(
    weights: jax.Array, leaf: Leaf, quantization: Quantization | None, mesh: Mesh | None
) -> jax.Array | Quantized:
    """A loaded parameter as the quantisation wants it, on its devices.

    Args:
        weights: as loaded; deleted where something else is returned.
        leaf: the parameter's.
        quantization: the model's.
        mesh: the devices that the parameter is sharded over; None for one.
    """
    scheme, specs = leaf.scheme(quantization), leaf.stored(quantization)
    if scheme is None:
        return weights
    assert isinstance(specs, Quantized)
    plain = dataclasses.replace(specs, axes=(None, None))
    shardings = jax.tree.map(lambda spec: param_sharding(mesh, spec), plain)
    leaves, tree = jax.tree.flatten(shardings)
    small = _quantizing(scheme, leaf.is_table, tuple(leaves), tree)(weights)
    jax.block_until_ready(small)
    weights.delete()
    return dataclasses.replace(small, axes=specs.axes)


@functools.cache
def _quantizing(
    scheme: Scheme, transposed: bool, shardings: tuple[jax.sharding.Sharding, ...], tree: object
) -> Callable[[jax.Array], Quantized]:
    """`quantize` onto shardings: compiled once for all layers' weights of one shape."""
    one = functools.partial(quantize, scheme=scheme, transposed=transposed)
    return jax.jit(
        lambda weights: jax.vmap(one)(weights) if weights.ndim == 3 else one(weights),
        out_shardings=jax.tree.unflatten(tree, shardings),
    )
