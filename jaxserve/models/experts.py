"""Mixtures of experts in place of a feed-forward layer: a router sends each token to some of many
small networks, and sums their outputs by its weights (Shazeer et al. 2017, section 2; Jiang et al.
2024, section 2.1).

No token is dropped, and experts have no fixed capacity: rows are sorted by expert, and each expert
multiplies its own rows (`grouped_matmul`). A token's output is summed over its experts in the order
of their weights, so that it does not depend on other tokens. Padding tokens go to no expert.

With several devices, each has a part of every expert's width, or, if that does not divide, some of
the experts. Their outputs are summed as for any feed-forward layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve import pallas_kernels
from jaxserve.models.base import Experts, HFTensor, Leaf, Params, ParamSpec
from jaxserve.models.layers import Linear, matmul
from jaxserve.models.mesh_axes import TENSOR
from jaxserve.models.quantized import Quantized, quantized_grouped_dot
from jaxserve.models.sharding import cut_axes
from jaxserve.pallas_kernels import add_weighted, grouped_matmul

Gated = Callable[[jax.Array, jax.Array], jax.Array]
GATE_AXES = ("experts", "embed", "expert_mlp")
DOWN_AXES = ("experts", "expert_mlp", "embed")
_TINY = 1e-20  # so that sigmoids that are all 0 have a quotient


@flax.struct.dataclass
class ExpertParams:
    """One layer's experts.

    Attributes:
        router: [d_model, experts].
        gate, up: [experts, d_model, width of one]; biases [experts, width of one], or None.
        down: [experts, width of one, d_model]; biases [experts, d_model], whole on each device, or
            None.
        shared_gate: [d_model, 1], a token's weight of the shared expert; None if there is no such
            expert, or its weight is 1.
        correction: float32 [experts], added to scores where experts are chosen, see
            `Experts.sigmoid`; None if nothing is.
    """

    router: Linear
    gate: Linear
    up: Linear
    down: Linear
    shared_gate: Linear | None = None
    correction: Params = None


def expert_leaves(
    experts: Experts,
    d_model: int,
    *,
    router: str,
    names: tuple[str, str, str],
    shared_gate: str | None,
    std: float,
) -> ExpertParams:
    """The leaves of one layer's experts.

    Args:
        experts: their shape.
        d_model: width of their inputs.
        router: its name in checkpoints, without ".weight".
        names: names of gate, up and down, likewise, with * in place of an expert's number.
        shared_gate: its name, likewise; None if there is none.
        std: see `ParamSpec`.
    """

    def stacked(name: str, shape: tuple[int, int], axes: tuple[str, str, str]) -> Linear:
        spec = ParamSpec((experts.num_experts, *shape), axes, std=std)
        source = HFTensor(f"{name}.weight", transpose=True, stacked=experts.num_experts)
        return Linear(kernel=Leaf(spec, source))

    def scores(name: str, outputs: int) -> Linear:
        """A projection with few outputs that decide a lot: never quantised."""
        spec = ParamSpec((d_model, outputs), ("embed", None), std=std)
        return Linear(kernel=Leaf(spec, HFTensor(f"{name}.weight", transpose=True), wide=True))

    gate, up, down = names
    correction = None
    if experts.sigmoid:
        spec = ParamSpec((experts.num_experts,), (None,), "zeros", dtype="float32")
        correction = Leaf(spec, HFTensor(f"{router}.e_score_correction_bias"))
    return ExpertParams(
        router=scores(router, experts.num_experts),
        gate=stacked(gate, (d_model, experts.d_ff), GATE_AXES),
        up=stacked(up, (d_model, experts.d_ff), GATE_AXES),
        down=stacked(down, (experts.d_ff, d_model), DOWN_AXES),
        shared_gate=scores(shared_gate, 1) if shared_gate else None,
        correction=correction,
    )


def gate_function(activation: str, experts: Experts | None) -> Gated:
    """How a model's feed-forward layers join gate and up, [T, width] each.

    Args:
        activation: activation of the gate if it is not clamped, see `pallas_kernels.gated`.
        experts: the layers' experts; None if they have none.
    """
    clamped = None
    if experts is not None and experts.limit is not None:
        clamped = experts.limit, experts.alpha
    return lambda gate, up: pallas_kernels.gated(gate, up, activation, clamped)


def mixture(
    h: jax.Array,
    weights: ExpertParams,
    experts: Experts,
    gated: Gated,
    shared: jax.Array | None,
    *,
    real: jax.Array | None,
    mesh: Mesh | None,
) -> jax.Array:
    """The output of a layer's experts.

    Args:
        h: [T, d_model], the layer's normalised input.
        weights: the layer's experts.
        experts: their shape.
        gated: joins the gate and the other half.
        shared: [T, d_model], output of the shared expert; None if there is none.
        real: bool [T], False for padding; None if there is none.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [T, d_model], in the dtype of h.
    """
    parts, chosen = route(h, weights, experts, mesh)
    if real is not None:
        chosen = jnp.where(real[:, None], chosen, experts.num_experts)
    y = _sharded(h, weights, chosen, parts, gated, mesh)
    if shared is not None:
        shared = shared.astype(y.dtype)
        if weights.shared_gate is None:
            y = y + shared
        else:
            y = add_weighted(y, shared, jax.nn.sigmoid(_scores(h, weights.shared_gate, mesh)))
    return y.astype(h.dtype)


def route(
    h: jax.Array, weights: ExpertParams, experts: Experts, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array]:
    """The experts that each token goes to, and their weights.

    Args:
        h: [T, d_model].
        weights: the layer's experts.
        experts: their shape.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        Weights float32 and experts int32 [T, experts_per_token], in the order in which experts are
        chosen.
    """

    def choose(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        if experts.sigmoid:
            chances = jax.nn.sigmoid(scores)
            wanted = _in_best_groups(chances + weights.correction.astype(jnp.float32), experts)
            _, chosen = jax.lax.top_k(wanted, experts.experts_per_token)
            parts = jnp.take_along_axis(chances, chosen, axis=-1)
        else:
            chances = _in_best_groups(jax.nn.softmax(scores, axis=-1), experts)
            parts, chosen = jax.lax.top_k(chances, experts.experts_per_token)
        if experts.normalised:
            total = parts.sum(axis=-1, keepdims=True)
            parts = parts / (total + _TINY if experts.sigmoid else total)
        return parts * experts.scale if experts.scale != 1 else parts, chosen

    return pallas_kernels.in_fixed_batches(choose, _scores(h, weights.router, mesh))


def _in_best_groups(chances: jax.Array, experts: Experts) -> jax.Array:
    """What experts are chosen by, [T, experts], so low in groups that a token does not go to that
    none of them is (DeepSeek-AI 2024, section 2.2.2)."""
    if experts.groups == 1:
        return chances
    by_group = chances.reshape(len(chances), experts.groups, -1)
    of_group, outside = by_group.max(axis=-1), 0.0
    if experts.sigmoid:
        of_group, outside = jax.lax.top_k(by_group, 2)[0].sum(axis=-1), -jnp.inf
    _, best = jax.lax.top_k(of_group, experts.groups_per_token)
    taken = (best[..., None] == jnp.arange(experts.groups)).any(axis=1)
    return jnp.where(taken[..., None], by_group, outside).reshape(chances.shape)


def _scores(h: jax.Array, weights: Linear, mesh: Mesh | None) -> jax.Array:
    """The products, float32 [T, outputs]: rounding to 16 bits would change the choice between two
    close experts."""
    y = matmul(h, weights.kernel, transposed=weights.transposed, dtype=jnp.float32, mesh=mesh)
    return y if weights.bias is None else y + weights.bias.astype(jnp.float32)


def _sharded(
    h: jax.Array,
    weights: ExpertParams,
    chosen: jax.Array,
    parts: jax.Array,
    gated: Gated,
    mesh: Mesh | None,
) -> jax.Array:
    """`_summed` over all devices: float32 [T, d_model]."""
    products = (weights.gate, weights.up, weights.down)
    if mesh is None:
        return _summed(h, chosen, parts, *products, gated=gated)
    axes = (GATE_AXES, GATE_AXES, DOWN_AXES)

    def cut(product: Linear, names: tuple[str, str, str]) -> Linear:
        shape = product.kernel.shape
        if product.transposed:
            shape = (shape[0], shape[2], shape[1])
        experts, inputs, outputs = cut_axes(mesh, shape, names)
        kernel = (outputs, inputs) if product.transposed else (inputs, outputs)
        bias = None if product.bias is None else PartitionSpec(experts, outputs)
        if product is weights.down and bias is not None:
            bias = PartitionSpec()  # replicated, see `one_device`
        return dataclasses.replace(product, kernel=PartitionSpec(experts, *kernel), bias=bias)

    specs = tuple(cut(one, names) for one, names in zip(products, axes, strict=True))
    by_expert = specs[0].kernel[0] is not None

    def one_device(
        h: jax.Array,
        chosen: jax.Array,
        parts: jax.Array,
        gate: Linear,
        up: Linear,
        down: Linear,
    ) -> jax.Array:
        shard, bias = jax.lax.axis_index(TENSOR), down.bias
        if by_expert:
            count = gate.kernel.shape[0]
            chosen = chosen - count * shard
            chosen = jnp.where((chosen >= 0) & (chosen < count), chosen, count)
            if bias is not None:
                bias = jax.lax.dynamic_slice_in_dim(bias, count * shard, count)
        elif bias is not None:
            bias = jnp.where(shard == 0, bias, 0)  # only one shard adds it
        own = gate, up, dataclasses.replace(down, bias=bias)
        return jax.lax.psum(_summed(h, chosen, parts, *own, gated=gated), TENSOR)

    whole = PartitionSpec()
    return jax.shard_map(
        one_device,
        mesh=mesh,
        in_specs=(whole, whole, whole, *specs),
        out_specs=whole,
        check_vma=False,
    )(h, chosen, parts, *products)


def _summed(
    h: jax.Array,
    chosen: jax.Array,
    parts: jax.Array,
    gate: Linear,
    up: Linear,
    down: Linear,
    *,
    gated: Gated,
) -> jax.Array:
    """The output of one device's experts for all tokens: float32 [T, d_model].

    Args:
        h: [T, d_model].
        chosen: int32 [T, K], each token's experts; the number of experts stands for one on another
            device.
        parts: float32 [T, K], weights of these experts.
        gate, up, down: see `ExpertParams`.
        gated: see `mixture`.
    """
    tokens, per_token = chosen.shape
    count = jax.tree.leaves(gate.kernel)[0].shape[0]
    order, place, sizes = _by_expert(chosen.reshape(-1), count)
    whose = chosen.reshape(-1)[order]

    def product(x: jax.Array, weights: Linear, dtype: jnp.dtype) -> jax.Array:
        dot = quantized_grouped_dot if isinstance(weights.kernel, Quantized) else grouped_matmul
        wide = dtype if weights.bias is None else jnp.dtype(jnp.float32)
        y = dot(x, weights.kernel, sizes, transposed=weights.transposed, dtype=wide)
        if weights.bias is None:
            return y
        return (y + weights.bias.at[whose].get(mode="fill", fill_value=0)).astype(dtype)

    x = h[order // per_token]
    x = gated(product(x, gate, h.dtype), product(x, up, h.dtype))
    y = product(x, down, jnp.dtype(jnp.float32))
    return add_weighted(None, y, parts, place.reshape(tokens, per_token))


def _by_expert(chosen: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts rows by expert.

    Args:
        chosen: int32 [rows], the expert of each row; `count` for none.
        count: number of experts.

    Returns:
        int32 [rows], the rows in sorted order; int32 [rows], the place of each row in that order;
        int32 [count], number of rows of each expert.
    """
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    numbers = jnp.arange(len(chosen), dtype=jnp.int32)
    place = jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True)
    sizes = (chosen[:, None] == jnp.arange(count)).sum(axis=0, dtype=jnp.int32)
    return order, place, sizes
