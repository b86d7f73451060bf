"""Loads a model's parameters from any format."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxserve.checkpoint_files import find_gguf
from jaxserve.config import LOAD_FORMATS
from jaxserve.models.attention import AttentionParams, FusedAttention
from jaxserve.models.base import Family, ModelConfig, Params, ParamSpec
from jaxserve.models.delta import DeltaParts, joined
from jaxserve.models.fused import fused_specs, side_by_side
from jaxserve.models.latent import ByHead, LatentAttention, by_head
from jaxserve.models.layers import Linear
from jaxserve.models.mesh_axes import TENSOR
from jaxserve.models.quantized import Quantized
from jaxserve.models.sharding import check_tensor, param_sharding
from jaxserve.pallas_kernels import by_columns
from jaxserve.progress import Show
from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.huggingface import load_safetensors
from jaxserve.weights.orbax_io import is_orbax, load_orbax
from jaxserve.weights.quantize import quantize_leaf
from jaxserve.weights.quantized_config import is_quantized
from jaxserve.weights.random_init import random_params

_SMALL = 1 << 20  # elements: compiling a program for their shape takes longer than to check them


def load_params(
    path: str | Path | None,
    family: Family,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: Show = Show.NOTHING,
) -> Params:
    """The family's parameter tree on the target devices, structured as in checkpoints.

    Args:
        path: checkpoint directory, or a GGUF file; not needed (may be None or "") with load_format
            "random".
        dtype: dtype of parameters that are not quantised.
        mesh: parameters are cut over its "tensor" axis; None: whole, on the first device.
        load_format: "auto" takes the format that is there, Orbax before safetensors.
        seed: seed of random parameters.
        progress: whether and how to show progress.

    Raises:
        CheckpointError: If a path, file or tensor is missing, a shape is wrong, the format is
            unknown, or a value is NaN or infinite.
        ValueError: If the model cannot be cut over the mesh.
    """
    if mesh is not None:
        check_tensor(config, mesh.size)
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(
            f"model.load_format {load_format!r} is not known (known: {', '.join(LOAD_FORMATS)})"
        )
    target = jnp.dtype(dtype)
    if load_format == "random":
        return random_params(family, config, dtype=target, mesh=mesh, seed=seed)
    if not path:
        raise CheckpointError(f"model.path is needed with model.load_format {load_format!r}")
    folder = Path(path).expanduser()
    gguf = find_gguf(folder)
    if not folder.is_dir() and gguf is None:
        raise CheckpointError(f"no such checkpoint directory: {folder}")
    if load_format != "auto" and (load_format == "gguf") != (gguf is not None):
        what = "not a GGUF file" if gguf is None else f"GGUF ({gguf})"
        raise CheckpointError(f"model.load_format is {load_format}, but {folder} is {what}")
    if load_format == "orbax" or (load_format == "auto" and is_orbax(folder)):
        params = _load_orbax(folder, family, config, target, mesh)
    else:
        params = load_safetensors(
            folder, family, config, dtype=target, mesh=mesh, progress=progress
        )
    _check_finite(folder, params, target)
    return params


def _load_orbax(
    folder: Path, family: Family, config: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None
) -> Params:
    """Loads it as it is stored, then quantises it if needed."""
    if not config.quantization or is_quantized(folder):
        return load_orbax(folder, family, config, dtype=dtype, mesh=mesh)
    wide = dataclasses.replace(config, quantization=None)
    params = load_orbax(folder, family, wide, dtype=dtype, mesh=mesh)
    leaves = family.leaves(config)
    return jax.tree.map(
        lambda leaf, part: quantize_leaf(part, leaf, config.quantization, mesh), leaves, params
    )


def _check_finite(folder: Path, params: Params, dtype: jnp.dtype) -> None:
    """Raises CheckpointError if a parameter is NaN or infinite, since a single NaN makes every
    token nonsense. Large arrays are checked on the devices, one after the other."""
    paths = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    checked = [_finite(leaf) for _, leaf in paths]
    for (path, _), finite in zip(paths, checked, strict=True):
        if not _all_own(finite):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            problem = f"parameter {name!r} is NaN or infinite in {dtype.name}"
            raise CheckpointError(f"{folder}: {problem}")


def _finite(array: jax.Array) -> jax.Array | np.ndarray:
    """Whether each shard is finite, bool [shards]; or all of it, bool [1]."""
    if array.size <= _SMALL and array.is_fully_addressable:
        return np.isfinite(np.asarray(array, np.float32)).all().reshape(1)
    return _finite_shards(array.sharding)(array)


@functools.cache
def _finite_shards(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """Whether each shard is finite, bool [shards]. By shard, so that no host waits for another
    host's files."""

    def check(shard: jax.Array) -> jax.Array:
        wide = shard.astype(jnp.float32) if shard.dtype.itemsize == 1 else shard
        return jnp.isfinite(wide).all()[None]

    if not isinstance(sharding, NamedSharding):
        return jax.jit(check)
    return jax.jit(
        jax.shard_map(
            check,
            mesh=sharding.mesh,
            in_specs=sharding.spec,
            out_specs=PartitionSpec(TENSOR),
        )
    )


def _all_own(finite: jax.Array | np.ndarray) -> bool:
    """Whether all shards on this host are finite."""
    if isinstance(finite, np.ndarray):
        return bool(finite.all())
    return all(np.asarray(shard.data).all() for shard in finite.addressable_shards)


def fuse_loaded(
    params: Params, family: Family, config: ModelConfig, mesh: Mesh | None = None
) -> Params:
    """Fuses q, k and v of each layer into one array, or cuts `kv_b` by heads, or joins what a gated
    delta net has apart, on the devices. Deletes these from `params` layer by layer, so that at most
    one layer is in memory twice.

    Args:
        params: as loaded.
        family: the model's.
        config: its shape.
        mesh: the devices that the parameters are sharded over; None for one.
    """
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    layers = []
    for layer, spec in zip(params.layers, fused_specs(family, config, shards).layers, strict=True):
        attn = layer.attn
        if isinstance(attn, LatentAttention):
            placed = (param_sharding(mesh, part) for part in jax.tree.leaves(spec.attn.kv_b))
            apart = _cutting(config, tuple(placed))(attn)
            jax.tree.map(lambda part: part.delete(), attn.kv_b)
            layers.append(layer.replace(attn=dataclasses.replace(attn, kv_b=apart)))
            continue

        if isinstance(attn, DeltaParts):
            made = joined(attn, config)
            placed = jax.tree.map(functools.partial(param_sharding, mesh), spec.attn)
            layers.append(layer.replace(attn=jax.device_put(made, placed)))
            for parts in (attn.qkvz, attn.ba):
                jax.tree.map(lambda part: part.delete(), parts if len(parts) > 1 else ())
            continue

        def join(spec: ParamSpec, *parts: jax.Array) -> jax.Array:
            fused = _joining(config, shards, param_sharding(mesh, spec))(parts)
            for part in parts:
                part.delete()
            return fused

        qkv = jax.tree.map(join, spec.attn.qkv, attn.q, attn.k, attn.v)
        fused = FusedAttention(
            qkv=qkv, o=attn.o, q_norm=attn.q_norm, k_norm=attn.k_norm, sinks=attn.sinks
        )
        layers.append(layer.replace(attn=fused))
    return params.replace(layers=tuple(layers))


def transpose_loaded(params: Params, dtype: DTypeLike) -> Params:
    """Transposes the kernels of projections to [out, in] if a single device multiplies few rows
    faster with them, and deletes the originals from `params` one by one. If K and V are separate
    they stay as they are, since hidden caches read them. Inputs of quantised weights are rounded to
    bfloat16 if that is the model's `dtype`, as for its unquantised weights."""
    inputs = "bfloat16" if jnp.dtype(dtype) == jnp.bfloat16 else None

    def for_kernels(weights: Quantized) -> Quantized:
        """The weights with scales in the form that the kernels read in each step."""
        return dataclasses.replace(weights, scale=weights.scale.astype(jnp.float32), inputs=inputs)

    def turned(node: Any) -> Any:
        if isinstance(node, AttentionParams):
            return dataclasses.replace(node, q=turned(node.q), o=turned(node.o))
        if isinstance(node, Quantized):  # a table
            return for_kernels(node) if by_columns(node.q) else node
        if not isinstance(node, Linear) or node.transposed:
            return node
        stored = node.kernel.q if isinstance(node.kernel, Quantized) else node.kernel
        if not by_columns(stored):
            return node
        kernel = jax.tree.map(lambda part: jnp.swapaxes(part, -1, -2), node.kernel)
        jax.tree.map(lambda part: part.delete(), node.kernel)
        kernel = for_kernels(kernel) if isinstance(kernel, Quantized) else kernel
        return dataclasses.replace(node, kernel=kernel, transposed=True)

    kinds = AttentionParams | Linear | Quantized
    return jax.tree.map(turned, params, is_leaf=lambda n: isinstance(n, kinds))


@functools.cache
def _cutting(
    config: ModelConfig, shardings: tuple[jax.sharding.Sharding, ...]
) -> Callable[[LatentAttention], ByHead]:
    """`by_head`'s `kv_b` with these shardings, of K and of V, compiled once for all layers."""

    def cut(attn: LatentAttention) -> ByHead:
        apart = by_head(attn, config).kv_b
        assert isinstance(apart, ByHead)
        return apart

    of_k, of_v = map(Linear, shardings)
    return jax.jit(cut, out_shardings=ByHead(of_k, of_v))


@functools.cache
def _joining(
    config: ModelConfig, shards: int, sharding: jax.sharding.Sharding
) -> Callable[[tuple[jax.Array, ...]], jax.Array]:
    """`side_by_side` with this sharding, compiled once for all layers."""
    return jax.jit(
        functools.partial(side_by_side, config=config, shards=shards), out_shardings=sharding
    )
