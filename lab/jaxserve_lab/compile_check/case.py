"""A model on a group of devices, as the engine would lay it out there."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jaxserve
from jaxserve.engine.device.buckets import Buckets, make_buckets
from jaxserve.engine.startup.choices.pool_size import Demand, pool_blocks, pool_room
from jaxserve.models import sharding
from jaxserve.models.base import Family, ModelConfig, ParamSpec, with_quantization, with_wide_head
from jaxserve.models.fused import param_bytes
from jaxserve.models.layer_groups import LayerGroups, layer_groups, pool_layers
from jaxserve.models.lora import LoraSlots, adapter_bytes, adapter_specs
from jaxserve.models.presets import preset, preset_names
from jaxserve.models.quantized import BLOCKS, Quantization
from jaxserve.models.registry import family_for
from jaxserve.pallas_kernels import block_bytes, default_block_size, dtype_named
from jaxserve.pallas_kernels.backends import KernelShape, get_backend, unsupported
from jaxserve.pallas_kernels.batch import HIDDEN, KV
from jaxserve.sched.cache.cache_kinds import why_no_hidden_caches
from jaxserve_lab.compile_check.targets import Target

TINY = "tiny"
MEMORY_FRACTION = 0.9  # the engine's default
BACKENDS = {"cuda": "triton", "tpu": "tpu"}


@dataclass(frozen=True)
class Sizes:
    """The engine's configuration, from which its largest buckets follow.

    Attributes:
        block_size: Tokens of a block; 0 in a `Wish` for the engine's default on the target.
        max_rows: Requests of a batch.
        max_batch_tokens: Tokens of a batch.
        dtype: Dtype of weights, and of the pool unless `cache` names one.
        quantization: Quantization of the weights, see `quantized_model`.
        cache: Dtype of the pool, as in `cache.dtype`.
        lora: Room for adapters; None for none.
    """

    block_size: int
    max_rows: int
    max_batch_tokens: int
    dtype: str
    quantization: str = ""
    cache: str = "auto"
    lora: LoraSlots | None = None

    @property
    def cache_dtype(self) -> jnp.dtype:
        """The dtype of the pool."""
        return dtype_named(self.dtype if self.cache == "auto" else self.cache)


@dataclass(frozen=True)
class CompileCase:
    """One model as the engine would lay it out on a mesh of a target's devices.

    Attributes:
        model: Its name, as for `model_shape`.
        target: The kind of device.
        family, config: The model's architecture and shape.
        sizes: With the actual block size.
        mesh: The devices, along one axis, "tensor".
        blocks: Blocks of the pool.
        weights_bytes: Bytes of weights on each device, adapters included.
        backend: The attention backend.
        note: Why that is not the platform's own backend; None if it is.
        no_hidden: Why the backend does not support hidden blocks; None if it does.
    """

    model: str
    target: Target
    family: Family
    config: ModelConfig
    sizes: Sizes
    mesh: Mesh
    blocks: int
    weights_bytes: int
    backend: str
    note: str | None
    no_hidden: str | None

    @property
    def shards(self) -> int:
        """Number of devices over which the model is sharded."""
        return self.mesh.size

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights and activations."""
        return jnp.dtype(self.sizes.dtype)

    @property
    def cache_dtype(self) -> jnp.dtype:
        """The dtype of the pool."""
        return self.sizes.cache_dtype

    @property
    def pool_heads(self) -> int:
        """KV heads in the whole pool, over all devices; see `sharding.pool_kv_heads`."""
        return sharding.pool_kv_heads(self.config, self.shards)

    @property
    def groups(self) -> LayerGroups | None:
        """Which layers share block lists; None if all do."""
        return groups_of(self.config, self.sizes, self.pool_heads)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool on each device, as the target lays it out."""
        config = self.config
        heads = self.pool_heads // self.shards
        size = self.sizes.block_size
        dtype = self.cache_dtype
        shape = (pool_layers(config, self.groups), heads, size, config.cached_dim(dtype))
        return self.blocks * block_bytes(*shape, dtype, self.target.platform)

    @property
    def offers_hidden(self) -> bool:
        """Whether the model can have hidden caches."""
        config = self.config
        shape = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
        plain = config.quantization is None and config.plain_keys
        return plain and why_no_hidden_caches(*shape) is None

    @functools.cached_property
    def buckets(self) -> Buckets:
        """The engine's default buckets for these sizes, with tables for the longest request."""
        width = -(-self.config.max_position // self.sizes.block_size)
        planes = 2 if self.groups is None else self.groups.planes
        states = 0 if self.groups is None else self.groups.states
        rows, tokens = self.sizes.max_rows, self.sizes.max_batch_tokens
        return make_buckets(rows, tokens, width=width, planes=planes, states=states)


def groups_of(config: ModelConfig, sizes: Sizes, heads: int) -> LayerGroups | None:
    """The groups that the engine would choose for requests of full length. heads: KV heads of the
    pool."""
    short = [window for window in config.windows if window and window < config.max_position]
    groups = layer_groups(config) if short or config.delta is not None else None
    pool = heads, sizes.block_size, sizes.cache_dtype
    return None if groups is None else groups.for_pool(config, *pool)


def model_shape(name: str) -> tuple[Family, ModelConfig]:
    """The architecture and shape of a preset, of "tiny", the model in the box, or of a folder with
    a config.json. ValueError lists the names, or says what is wrong with the file."""
    box = Path(jaxserve.__file__).parent / "assets" / "tiny-stories"
    path = (box if name == TINY else Path(name)) / "config.json"
    if name not in preset_names() and not path.is_file():
        known = ", ".join([TINY, *preset_names()])
        raise ValueError(
            f"--model: {name!r} is not known (known: {known}, folders with a config.json)"
        )
    try:
        hf = preset(name) if name in preset_names() else json.loads(path.read_text("utf-8"))
        if not isinstance(hf, dict):
            raise ValueError("config.json: must be an object")
        family = family_for(hf)
        return family, family.config_from_hf(hf)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--model: {name}: {error}") from error


def quantized_model(name: str, how: str) -> tuple[Family, ModelConfig]:
    """`model_shape` with weights quantised as by `model.quantization`, or as in a GGUF file of type
    q4_0, q4_1, q4_k or q8_0. Raises ValueError as there, or if that is not possible."""
    family, config = model_shape(name)
    scheme = BLOCKS.get(how.upper())
    if scheme is None:
        return family, with_quantization(family, config, how)
    kept = Quantization(scheme, scheme, dequantizable=True)
    config = with_wide_head(family, dataclasses.replace(config, quantization=kept))
    family.param_specs(config)
    return family, config


def make_case(model: str, target: Target, mesh: Mesh, sizes: Sizes, backend: str) -> CompileCase:
    """Sizes the model's pool as the engine would, given the target's memory.

    Args:
        model: As for `model_shape`.
        target: The kind of device.
        mesh: The devices over which to shard the model.
        sizes: The engine's configuration.
        backend: A backend's name, or "auto" for the platform's own, with XLA's if that does not
            support the shape.

    Raises:
        ConfigError: The weights leave no room for a pool.
        ValueError: The model is unknown, cannot be quantised or sharded this way, or the named
            backend does not support it.
    """
    block_size = sizes.block_size or default_block_size(target.platform)
    sizes = dataclasses.replace(sizes, block_size=block_size)
    family, config = quantized_model(model, sizes.quantization)
    shards = mesh.size
    sharding.check_tensor(config, shards)
    heads = sharding.pool_kv_heads(config, shards)
    dtype = jnp.dtype(sizes.dtype)
    cut = mesh if shards > 1 else None
    weights = param_bytes(config, dtype, cut)
    if sizes.lora is not None:
        specs = adapter_specs(family, config, sizes.lora, fused=True)
        weights += adapter_bytes(specs, dtype, cut)
    demand = Demand(
        num_blocks=0,
        block_size=sizes.block_size,
        memory_bytes=0,
        memory_fraction=MEMORY_FRACTION,
        max_rows=sizes.max_rows,
        max_model_len=config.max_position,
        max_batch_tokens=sizes.max_batch_tokens,
        groups=groups_of(config, sizes, heads),
    )
    room = pool_room(
        demand,
        config,
        sizes.cache_dtype,
        activations=dtype,
        weights=weights,
        pool_heads=heads,
        shards=shards,
        device=(target.device, target.memory_bytes),
        platform=target.platform,
    )
    wanted = BACKENDS[target.platform] if backend == "auto" else backend
    reason = _unsupported(wanted, KV, config, heads, shards, sizes)
    if reason is not None and backend != "auto":
        raise ValueError(f"--backend: {backend} cannot serve {model}: {reason}")
    chosen = wanted if reason is None else "xla"
    return CompileCase(
        model=model,
        target=target,
        family=family,
        config=config,
        sizes=sizes,
        mesh=mesh,
        blocks=pool_blocks(demand, room),
        weights_bytes=weights,
        backend=chosen,
        note=reason,
        no_hidden=_unsupported(chosen, HIDDEN, config, heads, shards, sizes),
    )


def param_sharding(mesh: Mesh, param: ParamSpec) -> jax.sharding.NamedSharding:
    """Places a parameter as the engine does, but also on a mesh of one device, since there is no
    default device here."""
    if mesh.size == 1:
        return sharding.named(mesh, ())
    placed = sharding.param_sharding(mesh, param)
    assert isinstance(placed, jax.sharding.NamedSharding)
    return placed


def _unsupported(
    backend: str, kind: int, config: ModelConfig, heads: int, shards: int, sizes: Sizes
) -> str | None:
    """Why the backend's kernels do not support the shape on one device; None if they do."""
    shape = KernelShape(
        config.num_heads // shards,
        heads // shards,
        config.cached_dim(sizes.cache_dtype),
        sizes.block_size,
        sizes.cache_dtype,
        config.sinks,
        config.halves,
    )
    return unsupported(get_backend(backend), kind, shape)
