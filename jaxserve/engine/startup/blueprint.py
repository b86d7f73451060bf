"""Everything needed to build an executor. Decided once, by the leader if there are several hosts,
and then built on each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.config import ConfigError, ServedModelConfig
from jaxserve.engine.device.buckets import Buckets
from jaxserve.engine.device.compilations import StepCompiler
from jaxserve.engine.device.executor import Executor, JaxExecutor
from jaxserve.engine.device.step_model import StepModel
from jaxserve.engine.startup.choices.engine_choices import Choices
from jaxserve.engine.startup.choices.model_options import load_shape
from jaxserve.engine.startup.fingerprint import checksum, system_fingerprint
from jaxserve.models import sharding
from jaxserve.models.attention import rounding_as_cached
from jaxserve.models.base import ModelConfig
from jaxserve.models.layer_groups import layer_groups, pool_layers
from jaxserve.models.lora import Adapters, LoraSlots, adapter_specs, make_adapters
from jaxserve.pallas_kernels import get_backend, make_pool
from jaxserve.progress import Show
from jaxserve.sched.cache.cache_kinds import PROJECTED
from jaxserve.weights import advise_huge_pages, fuse_loaded, load_params, transpose_loaded

_POOL_AXES = ("layers", "blocks", "kv_heads", "slots", "head_dim")


@dataclass(frozen=True)
class Blueprint:
    """What an executor is built from, beside the model's files. Plain data that travels between
    hosts.

    Attributes:
        shape: the model's config, each field as text, so that hosts can check that theirs is the
            same.
        backend: name of the attention kernels.
        hidden_read: as in `StepModel`.
        max_len: as in `StepModel`.
        dtype: of the weights.
        activations: dtype of activations.
        cache_dtype: dtype of the pool.
        buckets: the layouts to compile.
        allocated_blocks: blocks of the pool's array, see `array_blocks`.
        block_size: tokens of a block.
        moves_cache: whether cached tokens are moved, see `Choices`.
        masked_sampling: whether to compile sampling with grammars' masks.
        lora: room for adapters; None for none.
        grouped: whether groups of layers have block lists of their own.
    """

    shape: Mapping[str, str]
    backend: str
    hidden_read: str | None
    max_len: int
    dtype: str
    activations: str
    cache_dtype: str
    buckets: Buckets
    allocated_blocks: int
    block_size: int
    moves_cache: bool
    masked_sampling: bool
    lora: LoraSlots | None = None
    grouped: bool = False

    @classmethod
    def from_choices(cls, chosen: Choices, *, masked_sampling: bool) -> Blueprint:
        """The blueprint of a configuration's choices. masked_sampling: whether the tokenizer
        supports grammars."""
        kernels, memory, model = chosen.kernels, chosen.memory, chosen.kernels.model
        return cls(
            shape=_shape(model.config),
            backend=model.backend,
            hidden_read=model.hidden_read,
            max_len=model.max_len,
            dtype=kernels.dtype.name,
            activations=jnp.dtype(model.activations or kernels.dtype).name,
            cache_dtype=kernels.cache_dtype.name,
            buckets=memory.buckets,
            allocated_blocks=memory.allocated_blocks,
            block_size=chosen.scheduling.block_size,
            moves_cache=chosen.moves_cache,
            masked_sampling=masked_sampling,
            lora=model.lora,
            grouped=model.groups is not None,
        )

    def plain(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Blueprint:
        """The blueprint that `plain` was called on. JSON may have made lists of its tuples."""
        given: Mapping[str, Any] = fields["buckets"]
        buckets: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
        return cls(**{**fields, "buckets": Buckets(**buckets)})


class Programs(NamedTuple):
    """The last stage of a start: what computes.

    Attributes:
        executor: runs the steps, warm.
        pool_bytes: size of the pool over all devices.
        fingerprint: the system's, see `system_fingerprint`; "" for an executor without a model.
        compiler: compiles the steps that the executor lacks; None if it has them all.
    """

    executor: Executor
    pool_bytes: int = 0
    fingerprint: str = ""
    compiler: StepCompiler | None = None


def build_programs(
    served: ServedModelConfig,
    tensor: int,
    blueprint: Blueprint,
    *,
    progress: Show,
    bar: Callable[[Iterable[Any]], Iterable[Any]],
    barrier: Callable[[], None] = lambda: None,
    all_steps: bool = True,
) -> Programs:
    """Loads the model, makes the pool and compiles the steps.

    Args:
        tensor: as `mesh.tensor` has it.
        bar: wraps what there is to compile.
        barrier: waits for the other hosts before the first thing that all do at once, and after
            what takes some longer than others.
        all_steps: as in `JaxExecutor.warmup`.

    Raises:
        ConfigError: this host's model has another shape; or as `load_params`.
    """
    step_model = _step_model(served, tensor, blueprint)
    family, model, mesh = step_model.family, step_model.config, step_model.mesh
    params = load_params(
        served.path,
        family,
        model,
        dtype=jnp.dtype(blueprint.dtype),
        mesh=mesh,
        load_format=served.load_format,
        seed=served.seed,
        progress=progress,
    )
    fingerprint = system_fingerprint(blueprint, tensor, checksum(params))
    barrier()
    if step_model.fused:
        params = fuse_loaded(params, family, model, mesh)
    elif step_model.hidden_read == PROJECTED and get_backend(step_model.backend).batch_invariant:
        params = rounding_as_cached(params, blueprint.cache_dtype)
    if mesh is None:
        params = transpose_loaded(params, blueprint.dtype)
    advise_huge_pages(jax.tree.leaves(params))
    pool = make_pool(
        pool_layers(model, step_model.groups),
        blueprint.allocated_blocks,
        sharding.pool_kv_heads(model, tensor),
        blueprint.block_size,
        model.cached_dim(blueprint.cache_dtype),
        jnp.dtype(blueprint.cache_dtype),
        sharding.named(mesh, _POOL_AXES) if mesh else None,
    )
    executor = JaxExecutor(
        step_model,
        params,
        pool,
        blueprint.buckets,
        moves_cache=blueprint.moves_cache,
        masked_sampling=blueprint.masked_sampling,
        adapters=_adapters(step_model, blueprint),
    )
    executor.warmup(bar, barrier, all_steps=all_steps)
    compiler = StepCompiler(executor) if executor.stages else None
    return Programs(executor, pool.nbytes, fingerprint, compiler)


def _step_model(served: ServedModelConfig, tensor: int, blueprint: Blueprint) -> StepModel:
    family, model, _ = load_shape(served)
    model = model.for_length(blueprint.max_len)
    own = _shape(model)
    for name, value in blueprint.shape.items():
        if own.get(name) != value:
            raise ConfigError(
                f"model.path: {name} is {own.get(name)} here, the leader's is {value}"
            )
    groups = layer_groups(model) if blueprint.grouped else None
    if groups is not None:
        heads = sharding.pool_kv_heads(model, tensor)
        groups = groups.for_pool(model, heads, blueprint.block_size, blueprint.cache_dtype)
    return StepModel(
        family,
        model,
        blueprint.backend,
        sharding.make_mesh(tensor) if tensor > 1 else None,
        blueprint.hidden_read,
        blueprint.max_len,
        jnp.dtype(blueprint.activations),
        blueprint.lora,
        groups,
    )


def _adapters(model: StepModel, blueprint: Blueprint) -> Adapters | None:
    """Empty slots on the devices; None without any."""
    if model.lora is None:
        return None
    specs = adapter_specs(model.family, model.config, model.lora, fused=model.fused)
    return make_adapters(specs, jnp.dtype(blueprint.dtype), model.mesh)


def _shape(model: ModelConfig) -> dict[str, str]:
    return {field.name: repr(getattr(model, field.name)) for field in dataclasses.fields(model)}
