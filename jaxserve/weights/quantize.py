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

# Ratios of scales to try, relative to the scale that clips no number of the group.
_RATIOS = {
    "int8": (1.0, 0.95, 0.9, 0.8),
    "int4": tuple(1.06 - 0.03 * step for step in range(14)),
    "fp8": (1.0,),
}
_REFITS = {"int4": 2}  # how often a scale is refitted to its rounded numbers


def quantize(weights: jax.Array, scheme: Scheme, *, transposed: bool = False) -> Quantized:
    """The weight [in, out] (transposed: a table [out, in]), quantised. Groups of zeros get scale
    1."""
    axis = 1 if transposed else 0
    shape, groups = list(weights.shape), scheme.groups(weights.shape[axis])
    by_group = list(shape)
    by_group[axis : axis + 1] = [groups, shape[axis] // groups]
    w = weights.astype(jnp.float32).reshape(by_group)
    axis += 1
    dtype = jnp.dtype(scheme.dtype)
    largest = LARGEST[scheme.kind]
    # [-8, 7] is all of int4. int8 does not use -128, as other libraries' kernels expect.
    least = -largest - 1 if scheme.kind == "int4" else -largest

    Tried = tuple[jax.Array, Quantized]

    def tried(scale: jax.Array, zero: jax.Array | None, ratio: jax.Array | float = 1.0) -> Tried:
        """The weight quantised by this scale, and the remaining error. zero: the zero point; None
        chooses it."""
        scale = scale.astype(scheme.scale)
        scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)  # keeps NaN, to be found
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
    if scheme.zero:  # the range must contain 0
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        whole, zero = (high - low) / (largest - least), None
    else:
        whole, zero = jnp.maximum(high, -low) / largest, jnp.zeros_like(low)
    # Without zero points, it matters which end of the group becomes -8, since +8 does not exist.
    signs = (1, -1) if scheme.kind == "int4" and not scheme.zero else (1,)
    ratios = [sign * ratio for ratio in _RATIOS[scheme.kind] for sign in signs]
    fitted, _ = jax.lax.scan(
        lambda best, ratio: (better(best, tried(whole * ratio, zero, ratio)), None),
        tried(whole * ratios[0], zero, ratios[0]),
        jnp.array(ratios[1:], jnp.float32),
    )
    for _ in range(_REFITS.get(scheme.kind, 0)):
        # The best scale for the numbers, then the best numbers for that scale.
        q = fitted[1].q.astype(jnp.float32) - fitted[1].zero
        scale = (w * q).sum(axis, keepdims=True) / jnp.square(q).sum(axis, keepdims=True)
        fitted = better(fitted, tried(scale, fitted[1].zero))
    best = fitted[1]
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
    """A loaded parameter, quantised on its devices if it should be.

    Args:
        weights: the loaded parameter; deleted if another is returned.
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
    """`quantize` with these shardings, compiled once for all weights of one shape."""
    quantizer = functools.partial(quantize, scheme=scheme, transposed=transposed)
    return jax.jit(
        lambda weights: jax.vmap(quantizer)(weights) if weights.ndim == 3 else quantizer(weights),
        out_shardings=jax.tree.unflatten(tree, shardings),
    )
