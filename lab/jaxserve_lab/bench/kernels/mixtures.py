"""Mixtures of experts: checks their products on this device, and times a layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.base import Experts, ModelConfig, Params
from jaxserve.models.experts import ExpertParams, gate_function, mixture
from jaxserve.models.registry import get_family
from jaxserve.pallas_kernels import grouped_matmul
from jaxserve.sched.cost.cost_model import experts_read
from jaxserve.weights import load_params
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.device_timing import Loop, Timing, measure
from jaxserve_lab.bench.kernels.kernel_cases import KernelCase
from jaxserve_lab.bench.kernels.kernel_checks import LIMITS, Check, at_once, relative_error
from jaxserve_lab.bench.kernels.kernels import Ceilings, Measured, measured

# Rows of each of 8 groups, as skewed as with routers; some rows have no group.
SPREADS = ((1, 0, 0, 2, 0, 0, 0, 1), (0, 17, 3, 0, 40, 1, 5, 30), (0, 300, 1, 0, 129, 64, 0, 500))
SHAPE = (256, 192)  # inputs and outputs of the checks
BEHIND = 3  # rows without a group
LAYERS = 2  # their weights take turns, so that none is in a cache


def check_mixtures(dtypes: Sequence[str] = ("bfloat16", "float16")) -> Iterator[Check]:
    """Checks grouped products of every dtype and spread of the rows against float64."""

    def one(case: tuple[str, tuple[int, ...]]) -> list[Check]:
        dtype, spread = case
        x = inputs.host_vectors((sum(spread) + BEHIND, SHAPE[0]), jnp.dtype(dtype), 1)
        weights = inputs.host_vectors((len(spread), *SHAPE), jnp.dtype(dtype), 2)
        got = jax.jit(grouped_matmul)(x, weights, jnp.asarray(spread, jnp.int32))
        wide, want = np.asarray(x).astype(np.float64), np.zeros(got.shape)
        stops = np.cumsum(spread)
        for first, stop, own in zip(stops - spread, stops, np.asarray(weights), strict=True):
            want[first:stop] = wide[first:stop] @ own.astype(np.float64)
        shape = f"{sum(spread)} rows, {np.count_nonzero(spread)} of {len(spread)} groups"
        error = relative_error(got, want)
        return [Check("product by group", shape, dtype, error, LIMITS[dtype])]

    return at_once(one, [(dtype, spread) for dtype in dtypes for spread in SPREADS])


def time_mixtures(
    model: str,
    tokens: Sequence[int],
    dtype: str,
    ceilings: Ceilings,
    tell: Callable[[Measured], None],
) -> None:
    """Times a layer's mixture: the router, the order of rows, three products, the sum.

    Args:
        model: A preset with experts.
        tokens: Tokens of a step, one number per measurement.
        dtype: Dtype of x and of the weights.
        ceilings: The device's best rates.
        tell: Called with each measurement.

    Raises:
        ValueError: The model has no experts.
    """
    config = dataclasses.replace(inputs.model_config(model), num_layers=LAYERS)
    if config.experts is None:
        raise ValueError(f"model {model!r} has no experts")
    params = load_params(
        None, get_family(config.family), config, dtype=jnp.dtype(dtype), load_format="random"
    )
    layers = mixtures_of(params)
    del params
    for count in tokens:
        case = _case(layers, config.experts, count, config.d_model, dtype)
        timing = measure(case.make(None))
        per_layer = Timing(timing.seconds / LAYERS, timing.clock, timing.host_seconds / LAYERS)
        tell(measured(model, case, dtype, "", per_layer, ceilings))


def mixtures_of(params: Params) -> list[ExpertParams]:
    """The experts of all layers with experts."""
    nodes = jax.tree.leaves(params.layers, is_leaf=lambda node: isinstance(node, ExpertParams))
    return [node for node in nodes if isinstance(node, ExpertParams)]


def unread_bytes(params: Params, config: ModelConfig, tokens: int) -> int:
    """Expected bytes of experts' weights that a step with that many tokens does not read."""
    if config.experts is None:
        return 0
    return int(_expert_bytes(mixtures_of(params)) * (1 - _share(config.experts, tokens)))


def _share(experts: Experts, tokens: int) -> float:
    read = experts_read(experts.num_experts, experts.experts_per_token, tokens)
    return float(read) / experts.num_experts


def _expert_bytes(layers: Sequence[ExpertParams]) -> int:
    parts = [(layer.gate, layer.up, layer.down) for layer in layers]
    return sum(leaf.nbytes for leaf in jax.tree.leaves(parts))


def _case(
    layers: Sequence[ExpertParams], experts: Experts, tokens: int, width: int, dtype: str
) -> KernelCase:
    gated = gate_function("silu", experts)
    run = functools.partial(
        mixture, experts=experts, gated=gated, shared=None, real=None, mesh=None
    )

    def step(i: jax.Array, x: jax.Array, layers: Sequence[ExpertParams]) -> jax.Array:
        for layer in layers:
            x = run(x, layer)
            wide = x.astype(jnp.float32)  # otherwise it would grow from layer to layer
            mean = jnp.square(wide).mean(axis=-1, keepdims=True)
            x = (wide * jax.lax.rsqrt(mean + 1e-30)).astype(dtype)
        return x

    def make(_: object) -> Loop:
        return Loop(step, inputs.vectors((tokens, width), jnp.dtype(dtype), 1), layers)

    rows = tokens * experts.experts_per_token
    weights = int(_expert_bytes(layers) / len(layers) * _share(experts, tokens))
    moved = weights + 2 * tokens * width * jnp.dtype(dtype).itemsize
    shape = (
        f"{tokens} x {width} x {experts.d_ff}, {experts.experts_per_token} of {experts.num_experts}"
    )
    return KernelCase("mixture", shape, moved, 6 * rows * width * experts.d_ff, make)
