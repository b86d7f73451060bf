"""Rotary positions (Su et al. 2021)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.backends import platform_backend


def angles(
    positions: jax.Array, frequencies: np.ndarray, amplitude: float
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position times the frequencies, times the amplitude.

    On CPUs without kernels this is a loop over two halves, which XLA does not fuse: otherwise XLA
    would compute the angles again wherever they are read, in every layer and for every head.

    Args:
        positions: int32 [T].
        frequencies: float32 [n].
        amplitude: a factor.

    Returns:
        float32 [T, 1, n] each.
    """
    kernel = platform_backend().angles
    if kernel is not None:
        cos, sin = kernel(positions, frequencies, amplitude)
        return cos[:, None], sin[:, None]

    def both(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        phase = positions.astype(jnp.float32)[:, None, None] * frequencies
        return jnp.cos(phase) * amplitude, jnp.sin(phase) * amplitude

    def apart(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        halves = jax.lax.map(both, positions.reshape(2, -1))
        return jax.tree.map(lambda half: half.reshape(-1, *half.shape[2:]), halves)

    if len(positions) % 2:
        return both(positions)
    return jax.lax.platform_dependent(positions, cpu=apart, default=both)


def angle_table(count: int, frequencies: np.ndarray, amplitude: float) -> jax.Array:
    """`angles` of positions [0, count) as one constant, also inside of jitted functions: float32
    [2, count, n]. If the platform has no kernel for them, they are computed by NumPy."""
    kernel = platform_backend().angles
    if kernel is None:
        phase = np.arange(count, dtype=np.float32)[:, None] * frequencies
        return jnp.asarray(np.stack([np.cos(phase), np.sin(phase)]) * np.float32(amplitude))
    with jax.ensure_compile_time_eval():
        return jnp.stack(kernel(jnp.arange(count, dtype=jnp.int32), frequencies, amplitude))


@jax.custom_jvp
def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs of elements: among the first 2 n, element i pairs with i + n, as in Llama.

    Args:
        x: [T, heads, head_dim].
        cos, sin: float32 [T, 1, n].

    Returns:
        [T, heads, head_dim], in the dtype of x.
    """
    choose = platform_backend().rotate
    kernel = choose and choose(x)
    return _rotate(x, cos, sin) if kernel is None else kernel(x, cos[:, 0], sin[:, 0])


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """In XLA's operations."""
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


@rotate.defjvp
def _derived(primals: Any, changes: Any) -> tuple[jax.Array, jax.Array]:
    """The derivative, for training: kernels have none of their own."""
    return rotate(*primals), jax.jvp(_rotate, primals, changes)[1]
