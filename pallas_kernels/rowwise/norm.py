"""Norms, and logarithms of sums of exponentials. If the platform has kernels for them, a row's bits
do not depend on the number of rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import platform_backend


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def layer_norm(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, eps: float
) -> jax.Array:
    """Layer normalisation over the last axis (Ba et al. 2016, section 3), in float32.

    Args:
        x: [T, D].
        scale, bias: [D], or None.
        eps: added to the variance.

    Returns:
        [T, D], in the dtype of x.
    """
    choose = platform_backend().norm
    kernel = choose and choose(x, scale, bias)
    if kernel is None:
        return _layer_norm(x, scale, bias, eps)
    return kernel(x, scale, bias, eps=eps, offset=0.0, centred=True)


def _layer_norm(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, eps: float
) -> jax.Array:
    """In XLA's operations."""
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + eps)
    if scale is not None:
        y = y * scale.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0, axes: int = 1
) -> jax.Array:
    """Root-mean-square normalisation over the last axes (Zhang & Sennrich 2019, section 3), in
    float32.

    Args:
        x: the array to normalise.
        scale: scale with the shape of those axes.
        eps: added to the mean square.
        offset: added to the scale.
        axes: number of last axes.

    Returns:
        The same shape, in the dtype of x.
    """
    choose = platform_backend().norm
    kernel = choose and choose(x, scale)
    if kernel is None:
        return _rms_norm(x, scale, eps, offset, axes)
    rows = x.reshape(-1, scale.size)
    y = kernel(rows, scale.reshape(-1), None, eps=eps, offset=offset, centred=False)
    return y.reshape(x.shape)


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float, axes: int) -> jax.Array:
    """In XLA's operations."""
    x32 = x.astype(jnp.float32)
    over = tuple(range(-axes, 0))
    y = x32 * jax.lax.rsqrt((x32 * x32).mean(axis=over, keepdims=True) + eps)
    return (y * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


# Derivatives, for training: kernels have none of their own.


@layer_norm.defjvp
def _of_layer_norm(eps: float, primals: Any, changes: Any) -> tuple[jax.Array, jax.Array]:
    _, change = jax.jvp(functools.partial(_layer_norm, eps=eps), primals, changes)
    return layer_norm(*primals, eps), change


@rms_norm.defjvp
def _of_rms_norm(
    eps: float, offset: float, axes: int, primals: Any, changes: Any
) -> tuple[jax.Array, jax.Array]:
    plain = functools.partial(_rms_norm, eps=eps, offset=offset, axes=axes)
    return rms_norm(*primals, eps, offset, axes), jax.jvp(plain, primals, changes)[1]


def log_sum_exp(x: jax.Array) -> jax.Array:
    """The logarithm of each row's sum of exponentials: float32 [R, V] -> [R, 1]."""
    kernel = platform_backend().log_sum_exp
    plain = functools.partial(jax.nn.logsumexp, axis=-1, keepdims=True)
    if kernel is None:
        return plain(x)
    # A step may be compiled for a device that is not present.
    return jax.lax.platform_dependent(x, cpu=lambda x: kernel(x)[:, None], default=plain)
