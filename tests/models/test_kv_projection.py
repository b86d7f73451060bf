"""K and V made from a layer's x are those that the layer made itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.attention import kv_projection
from jaxserve.models.base import AttentionInput, KVProjection, LayerIndex, StepInputs
from jaxserve.models.forward import forward
from jaxserve.pallas_kernels import rms_norm, rotate

from .fixtures import load_reference

TOKENS, LONGEST = 9, 32


def project(
    how: KVProjection, layer: int, x: jax.Array, positions: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """k, v [T, kv_heads, head_dim] of x [T, d_model]."""
    weights = how.weights[layer]
    k, v = x @ weights.wk, x @ weights.wv
    k = k if weights.bk is None else k + weights.bk
    v = v if weights.bv is None else v + weights.bv
    k, v = (a.reshape(len(x), -1, head_dim) for a in (k, v))
    if weights.k_norm is not None:
        k = rms_norm(k, weights.k_norm, how.norm_eps)
    if how.rotation is not None:
        k = rotate(k, *how.rotation[:, positions, None])
    return k, v


@pytest.mark.parametrize("name", ["opt", "opt_post_norm", "qwen3"])
def test_projection_gives_the_layers_k_and_v(name: str) -> None:
    case = load_reference(name)
    config, family = case.config, case.family
    positions = jnp.arange(3, 3 + TOKENS, dtype=jnp.int32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, TOKENS))
    seen: list[AttentionInput] = []

    def attend(carry: None, layer: LayerIndex, inputs: AttentionInput) -> tuple[None, jax.Array]:
        seen.append(inputs)
        return carry, inputs.q

    with jax.disable_jit():  # layers run one by one, so that every layer's inputs can be kept
        inputs = StepInputs(tokens, positions, jnp.zeros_like(positions))
        forward(family, case.stored, config, inputs, attend, None)
    how = kv_projection(case.stored, config, LONGEST)
    assert len(seen) == config.num_layers
    for layer, inputs in enumerate(seen):
        jax.tree.map(np.testing.assert_array_equal, inputs.weights, how.weights[layer])
        k, v = project(how, layer, inputs.x, positions, config.head_dim)
        np.testing.assert_allclose(k, inputs.k, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(v, inputs.v, rtol=2e-5, atol=2e-6)
