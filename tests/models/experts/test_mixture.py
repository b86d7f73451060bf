"""A layer's experts: who goes where, as token by token; whoever else is there, padding too."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxserve.models.base import Experts
from jaxserve.models.experts import (
    DOWN_AXES,
    GATE_AXES,
    ExpertParams,
    _by_expert,
    gate_function,
    mixture,
)
from jaxserve.models.layers import Linear
from jaxserve.models.sharding import cut_axes
from jaxserve.weights import transpose_loaded

WIDTH, TOKENS = 64, 9
EXPERTS = Experts(num_experts=8, experts_per_token=3, d_ff=48, normalised=False)


@pytest.fixture(scope="module")
def weights() -> ExpertParams:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Linear:
        return Linear(kernel=jnp.asarray(rng.normal(size=shape), jnp.float32))

    count, width = EXPERTS.num_experts, EXPERTS.d_ff
    return ExpertParams(
        router=drawn(WIDTH, count),
        gate=drawn(count, WIDTH, width),
        up=drawn(count, WIDTH, width),
        down=drawn(count, width, WIDTH),
    )


@pytest.fixture(scope="module")
def h() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, WIDTH)) / 4, jnp.float32)


def run(h, weights, real=None):
    gated = gate_function("silu", EXPERTS)
    made = functools.partial(mixture, experts=EXPERTS, gated=gated, mesh=None)
    return jax.jit(lambda h, weights: made(h, weights, shared=None, real=real))(h, weights)


def one_by_one(h, weights):
    """In float64, a token and an expert after the other."""
    wide = jax.tree.map(lambda one: np.asarray(one, np.float64), weights)
    found = []
    for x in np.asarray(h, np.float64):
        scores = x @ wide.router.kernel
        chances = np.exp(scores) / np.exp(scores).sum()
        y = np.zeros(WIDTH)
        for expert in np.argsort(-chances)[: EXPERTS.experts_per_token]:
            gate = x @ wide.gate.kernel[expert]
            inner = gate / (1 + np.exp(-gate)) * (x @ wide.up.kernel[expert])
            y += chances[expert] * (inner @ wide.down.kernel[expert])
        found.append(y)
    return np.stack(found)


def test_as_token_by_token(h, weights):
    """Where weights lie as kernels of CPUs read them; `test_reference_logits.py` has the others."""
    want = one_by_one(h, weights)
    got = run(h, transpose_loaded(jax.tree.map(jnp.copy, weights), "float32"))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_a_token_gets_the_same_whoever_is_beside_it(h, weights):
    turned = transpose_loaded(jax.tree.map(jnp.copy, weights), "float32")
    together = run(h, turned)
    for token in range(TOKENS):
        np.testing.assert_array_equal(run(h[token : token + 1], turned)[0], together[token])
        padded = jnp.full_like(h, 7.0).at[token].set(h[token])
        found = run(padded, turned, real=jnp.arange(TOKENS) == token)
        np.testing.assert_array_equal(found[token], together[token])
        others = np.delete(np.asarray(found), token, axis=0)
        np.testing.assert_array_equal(others, np.zeros_like(others))


def test_padding_is_a_row_of_no_expert():
    order, place, sizes = _by_expert(jnp.array([3, 0, 8, 3, 8, 0, 7]), 8)
    assert order.tolist() == [1, 5, 0, 3, 6, 2, 4]
    assert np.asarray(order)[np.asarray(place)].tolist() == list(range(7))
    assert sizes.tolist() == [2, 0, 0, 2, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("devices", "count", "width", "cut"),
    [
        (2, 128, 768, [None, None, "tensor"]),
        (4, 128, 768, ["tensor", None, None]),  # parts of 192 would be copied by each step
        (8, 60, 1408, [None, None, "tensor"]),  # whose number does not divide
        (2, 32, 2880, ["tensor", None, None]),
        (4, 8, 36, [None, None, "tensor"]),  # less than a tile
        (4, 8, 34, ["tensor", None, None]),
    ],
)
def test_experts_are_cut_by_width_unless_that_cuts_a_tile(
    devices: int, count: int, width: int, cut: list[str | None]
) -> None:
    mesh: Any = AbstractMesh((devices,), ("tensor",))
    assert cut_axes(mesh, (count, 64, width), GATE_AXES) == cut
    assert cut_axes(mesh, (count, width, 64), DOWN_AXES) == [cut[0], cut[2], None]
