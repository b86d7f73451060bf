"""Random parameters for a shape, made on the target devices."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.models.base import Family, ModelConfig, Params, ParamSpec
from jaxserve.models.sharding import padded_shape, param_sharding


def random_params(
    family: Family, config: ModelConfig, *, dtype: np.dtype, mesh: Mesh | None, seed: int
) -> Params:
    """Random parameters. A seed gives the same values on any mesh.

    Args:
        family: the model's.
        config: its shape.
        dtype: dtype of the parameters that are not quantised.
        mesh: the devices to shard over; None for one.
        seed: seed of the random numbers.
    """
    specs, treedef = jax.tree.flatten(family.param_specs(config))
    keys = jax.random.split(jax.random.key(seed), len(specs))
    leaves = [_leaf(spec, key, dtype, mesh) for spec, key in zip(specs, keys, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def _leaf(spec: ParamSpec, key: jax.Array, dtype: np.dtype, mesh: Mesh | None) -> jax.Array:
    shape, sharding = padded_shape(mesh, spec), param_sharding(mesh, spec)
    dtype = jnp.dtype(spec.dtype or dtype)
    if spec.init == "pairs":
        return _drawing_pairs(sharding)(key, shape)
    if spec.init != "normal":
        value = {"zeros": 0.0, "ones": 1.0, "constant": spec.std}[spec.init]
        return _constant(shape, sharding, dtype, value)
    return _drawing(sharding)(key, spec.shape, shape, spec.std, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _constant(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, dtype: np.dtype, value: float
) -> jax.Array:
    return jnp.full(shape, value, dtype, device=sharding)


@functools.cache
def _drawing(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    """`_draw` with this sharding, compiled once for all arrays of one shape."""
    return jax.jit(_draw, static_argnums=(1, 2, 3, 4), out_shardings=sharding)


def _draw(
    key: jax.Array,
    shape: tuple[int, ...],
    padded: tuple[int, ...],
    std: float,
    dtype: np.dtype,
) -> jax.Array:
    values = jax.random.normal(key, shape, jnp.float32) * std
    if jnp.issubdtype(dtype, jnp.integer):
        most = jnp.iinfo(dtype).max
        values = jnp.clip(jnp.round(values), -most, most)
    values = values.astype(dtype)
    return jnp.pad(values, [(0, after - size) for size, after in zip(shape, padded, strict=True)])


@functools.cache
def _drawing_pairs(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    """Draws two 4-bit numbers in each int8."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        low, high = jax.random.randint(key, (2, *shape), -7, 8, jnp.int8)
        return (low & 15) | (high << 4)

    return jax.jit(draw, static_argnums=1, out_shardings=sharding)
