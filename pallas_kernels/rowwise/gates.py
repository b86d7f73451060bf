"""Gated activations: activation(gate) * up (Shazeer 2020)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import platform_backend

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "sigmoid": jax.nn.sigmoid,
}
Bounds = tuple[float, float]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def gated(gate: jax.Array, up: jax.Array, activation: str, clamped: Bounds | None) -> jax.Array:
    """activation(gate) * up, or gate * sigmoid(alpha * gate) * (up + 1), both clamped first (OpenAI
    2025, gpt-oss's model card, section 2.2, and its released code).

    Args:
        gate, up: [T, width].
        activation: one of `ACTIVATIONS`, if nothing is clamped.
        clamped: limit and alpha: the gate is at most limit, and up is between -limit and limit.
            None for an activation.

    Returns:
        [T, width].
    """
    choose = platform_backend().gated
    kernel = choose and choose(gate, up)
    if kernel is None:
        return _gated(gate, up, activation, clamped)
    return kernel(gate, up, activation, clamped)


def _gated(gate: jax.Array, up: jax.Array, activation: str, clamped: Bounds | None) -> jax.Array:
    """`gated` in XLA operations."""
    if clamped is None:
        return ACTIVATIONS[activation](gate) * up
    limit, alpha = clamped
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


@gated.defjvp
def _derived(
    activation: str, clamped: Bounds | None, primals: Any, changes: Any
) -> tuple[jax.Array, jax.Array]:
    """The derivative, for training: kernels have none of their own."""
    plain = functools.partial(_gated, activation=activation, clamped=clamped)
    return gated(*primals, activation, clamped), jax.jvp(plain, primals, changes)[1]
