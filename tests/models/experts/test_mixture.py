"""A layer's experts: who goes where, as token by token; whoever else is there, padding too."""

from __future__ import annotations

import dataclasses
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
    route,
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
        shared_gate=drawn(WIDTH, 1),
    )


@pytest.fixture(scope="module")
def h() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, WIDTH)) / 4, jnp.float32)


def run(h, weights, shared=None, real=None, experts=EXPERTS):
    gated = gate_function("silu", experts)
    made = functools.partial(mixture, experts=experts, gated=gated, real=real, mesh=None)
    return jax.jit(lambda h, weights, shared: made(h, weights, shared=shared))(h, weights, shared)


def one_by_one(h, weights, shared=None):
    """In float64, a token and an expert after the other."""
    wide = jax.tree.map(lambda one: np.asarray(one, np.float64), weights)
    found = []
    for place, x in enumerate(np.asarray(h, np.float64)):
        scores = x @ wide.router.kernel
        chances = np.exp(scores) / np.exp(scores).sum()
        y = np.zeros(WIDTH)
        for expert in np.argsort(-chances)[: EXPERTS.experts_per_token]:
            gate = x @ wide.gate.kernel[expert]
            inner = gate / (1 + np.exp(-gate)) * (x @ wide.up.kernel[expert])
            y += chances[expert] * (inner @ wide.down.kernel[expert])
        if shared is not None:
            y += shared[place] / (1 + np.exp(-(x @ wide.shared_gate.kernel)))
        found.append(y)
    return np.stack(found)


def test_clamped_experts_with_biases(h, weights):
    """Padding, which goes to no expert, gets no bias either."""
    rng = np.random.default_rng(2)

    def with_bias(one, *shape):
        return dataclasses.replace(one, bias=jnp.asarray(rng.normal(size=shape), jnp.float32))

    count, width = EXPERTS.num_experts, EXPERTS.d_ff
    biased = dataclasses.replace(
        weights,
        router=with_bias(weights.router, count),
        gate=with_bias(weights.gate, count, width),
        up=with_bias(weights.up, count, width),
        down=with_bias(weights.down, count, WIDTH),
    )
    experts = dataclasses.replace(EXPERTS, normalised=True, limit=1.5, alpha=1.25)
    wide = jax.tree.map(lambda one: np.asarray(one, np.float64), biased)
    want = np.zeros((TOKENS, WIDTH))
    for place, x in enumerate(np.asarray(h, np.float64)):
        scores = x @ wide.router.kernel + wide.router.bias
        chosen = np.argsort(-scores)[: experts.experts_per_token]
        parts = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        for expert, part in zip(chosen, parts, strict=True):
            gate, up, down = (
                (one.kernel[expert], one.bias[expert]) for one in (wide.gate, wide.up, wide.down)
            )
            first = np.minimum(x @ gate[0] + gate[1], 1.5)
            second = np.clip(x @ up[0] + up[1], -1.5, 1.5)
            inner = first / (1 + np.exp(-1.25 * first)) * (second + 1)
            want[place] += part * (inner @ down[0] + down[1])
    real = jnp.arange(TOKENS) != 4
    want[4] = 0
    got = run(h, biased, real=real, experts=experts)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("turned", [False, True])
def test_as_token_by_token(h, weights, turned):
    want = one_by_one(h, weights)
    copied = jax.tree.map(jnp.copy, weights)
    got = run(h, transpose_loaded(copied, "float32") if turned else weights)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_the_expert_that_all_go_to_is_added_by_its_gate(h, weights):
    shared = np.asarray(h)[:, ::-1] * 3
    want = one_by_one(h, weights, shared)
    got = run(h, weights, jnp.asarray(shared))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_normalised_parts_sum_to_one(h, weights):
    parts, chosen = route(h, weights.router, EXPERTS, None)
    summing = dataclasses.replace(EXPERTS, normalised=True)
    scaled, same = route(h, weights.router, summing, None)
    np.testing.assert_array_equal(chosen, same)
    assert (np.diff(parts, axis=1) <= 0).all() and (parts.sum(axis=1) < 0.999).all()
    np.testing.assert_allclose(scaled.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(scaled / parts, (1 / parts.sum(1))[:, None] + 0 * parts, rtol=1e-5)


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
