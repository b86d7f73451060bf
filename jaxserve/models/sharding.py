"""Tensor parallelism: logical axis names, and the rules that map them to the device mesh.

Parameters and activations name their axes ("heads", "mlp", "vocab", ...); `RULES` says which axes
are cut over the mesh axis "tensor" (Megatron-LM, Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.base import ModelConfig, ParamSpec
from jaxserve.models.mesh_axes import RULES, TENSOR

_TILE = 128  # columns that devices store and multiply together

_Array = TypeVar("_Array", bound=jax.Array)


def make_mesh(tensor: int) -> Mesh:
    """A mesh of `tensor` devices with the single axis "tensor": equally many devices of each host,
    the first ones, with a host's devices side by side.

    Raises:
        ValueError: If `tensor` is below 1, above the number of devices, or not a multiple of the
            hosts.
    """
    devices, hosts = jax.devices(), jax.process_count()
    if not 1 <= tensor <= len(devices):
        raise ValueError(
            f"mesh.tensor must be between 1 and the number of {devices[0].platform} devices "
            f"({len(devices)}), got {tensor}"
        )
    per_host = tensor // hosts
    chosen = [
        device
        for host in range(hosts)
        for device in [d for d in devices if d.process_index == host][:per_host]
    ]
    if len(chosen) != tensor:
        raise ValueError(
            f"mesh.tensor must be as many devices on each of {hosts} hosts, got {tensor} of "
            f"{len(devices)}"
        )
    return Mesh(np.asarray(chosen), (TENSOR,))


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The partition of an array whose axes have these logical names (None: not cut)."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def named(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """The sharding on `mesh` of an array whose axes have these logical names."""
    return NamedSharding(mesh, spec(axes))


def constrain(x: _Array, mesh: Mesh | None, *axes: str | None) -> _Array:
    """Tells the compiler how `x` is cut. Axes that do not divide stay whole. Does nothing without a
    mesh."""
    if mesh is None:
        return x
    fitting = _fitting(mesh, x.shape, axes)
    return jax.lax.with_sharding_constraint(x, named(mesh, fitting))


def padded_shape(mesh: Mesh | None, param: ParamSpec) -> tuple[int, ...]:
    """The parameter's shape with its vocabulary axis rounded up to a multiple of the shards."""
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    return tuple(
        -(-size // shards) * shards if axis == "vocab" else size
        for size, axis in zip(param.shape, param.axes, strict=True)
    )


def param_sharding(mesh: Mesh | None, param: ParamSpec) -> jax.sharding.Sharding:
    """Where a parameter lives: cut by its axes, or on the first device without a mesh.

    A "kv_heads" axis with fewer heads than shards stays whole (see `pool_kv_heads`).
    """
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    head_axes = ("heads", "kv_heads")
    units = tuple(
        size // param.granule if axis in head_axes else size
        for size, axis in zip(padded_shape(mesh, param), param.axes, strict=True)
    )
    return named(mesh, _fitting(mesh, units, param.axes))


def cut_axes(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> list[str | None]:
    """The mesh axes over which an array with this shape and these axis names is cut."""
    return [None if a is None else RULES[a] for a in _fitting(mesh, shape, axes)]


def pool_kv_heads(config: ModelConfig, tensor: int) -> int:
    """KV heads in the pool: `num_kv_heads`, each repeated until the shards divide them. The
    projections repeat them like that (`jaxserve.models.fused`).

    Raises:
        ValueError: If the query heads cannot be divided among the repeated KV heads.
    """
    repeats = tensor // int(np.gcd(config.num_kv_heads, tensor))
    heads = config.num_kv_heads * repeats
    if config.num_heads % heads:
        raise ValueError(
            f"mesh.tensor={tensor} does not fit the model: {config.num_kv_heads} KV heads repeated "
            f"to {heads} do not divide its {config.num_heads} attention heads"
        )
    return heads


def heads_a_shard(config: ModelConfig, shards: int) -> tuple[int, int]:
    """Query heads and KV heads that each shard computes, including repeated ones."""
    return config.num_heads // shards, pool_kv_heads(config, shards) // shards


def check_tensor(config: ModelConfig, tensor: int) -> None:
    """Raises ValueError if the model cannot be cut into `tensor` shards."""
    if tensor < 1:
        raise ValueError(f"mesh.tensor must be at least 1, got {tensor}")
    experts = config.experts
    cut = [("attention heads", config.num_heads)]
    if config.delta is not None:
        cut.append(("key heads of states", config.delta.key_heads))
    if experts is None or experts.dense_layers:
        cut.append(("feed-forward width", config.d_ff))
    if experts is not None:
        cut.append(("shared expert's width", experts.shared_d_ff))
    for name, size in cut:
        if size % tensor:
            raise ValueError(f"mesh.tensor={tensor} does not divide the model's {name} ({size})")
    if experts is not None and experts.d_ff % tensor and experts.num_experts % tensor:
        raise ValueError(
            f"mesh.tensor={tensor} divides neither the width of the model's experts "
            f"({experts.d_ff}) nor their number ({experts.num_experts})"
        )
    if experts is not None and config.quantization is not None and tensor > 1:
        raise ValueError(
            f"mesh.tensor={tensor}: a model with experts is quantised on one device only"
        )
    pool_kv_heads(config, tensor)
    group = 0 if config.quantization is None else config.quantization.scheme.group
    inputs = (
        ("attention output", config.num_heads * config.value_dim),
        ("feed-forward", config.d_ff),
    )
    for name, size in inputs:
        if group and size // tensor % group:
            raise ValueError(
                f"mesh.tensor={tensor} would cut the groups of {group} of the model's quantised "
                f"weights: the {name} has {size} inputs"
            )


def _fitting(
    mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]
) -> tuple[str | None, ...]:
    """The axes, with None for axes whose size the mesh does not divide. If the same devices would
    cut several axes, only the last is cut."""
    used: set[str] = set()
    experts = dict(zip(axes, shape, strict=True)).get("experts", 1)

    def divides(shards: int, size: int, axis: str | None) -> bool:
        # If experts were cut within a tile of their width, each step on a TPU would copy them, and
        # GPUs would have no kernel for them. So whole experts are distributed if their number
        # allows it.
        whole_tiles = axis == "expert_mlp" and size >= _TILE and experts % shards == 0
        return size % (shards * _TILE if whole_tiles else shards) == 0

    def fits(size: int, axis: str | None) -> bool:
        target = None if axis is None else RULES[axis]
        if target is None:
            return True
        fit = target not in used and divides(mesh.shape[target], size, axis)
        used.update({target} if fit else ())
        return fit

    last_first = [
        a if fits(s, a) else None for s, a in reversed(list(zip(shape, axes, strict=True)))
    ]
    return tuple(reversed(last_first))
