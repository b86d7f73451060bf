"""The third stage of a start: which shapes steps have, and how much memory caches get."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.config import CacheConfig, EngineConfig
from jaxserve.engine.device.buckets import Buckets, make_buckets
from jaxserve.engine.startup.choices.kernel_choice import Kernels
from jaxserve.engine.startup.choices.model_options import lora_bytes
from jaxserve.engine.startup.choices.policy_choice import Scheduling
from jaxserve.engine.startup.choices.pool_size import (
    GIB,
    Demand,
    array_blocks,
    hidden_workspace,
    host_slots,
    moving_workspace,
    pool_blocks,
    pool_room,
)
from jaxserve.models.fused import param_bytes
from jaxserve.models.layer_groups import LayerGroups
from jaxserve.pallas_kernels import get_backend, skips_columns
from jaxserve.pallas_kernels.backends import platform_backend
from jaxserve.sched.cache.block_sizes import blocks_a_plane

log = logging.getLogger(__name__)

# Platforms whose steps with hidden rows are all made for as many as there may be: what a CPU would
# save in steps fitted to few of them is little beside compiling twice as many.
UNFITTED = frozenset({"cpu"})


@dataclass(frozen=True)
class Memory:
    """The shapes of steps, and the memory of caches.

    Attributes:
        buckets: the layouts to compile.
        num_blocks: blocks of the pool that are used.
        allocated_blocks: blocks of its array, see `array_blocks`.
        host_slots: slots of host memory for caches.
        modest: whether the pool's size was not configured, see `Demand`.
    """

    buckets: Buckets
    num_blocks: int
    allocated_blocks: int
    host_slots: int
    modest: bool


def size_memory(
    cache: CacheConfig,
    engine: EngineConfig,
    *,
    scheduling: Scheduling,
    kernels: Kernels,
    free: tuple[str, int] | None,
) -> Memory:
    """The buckets, the pool and the host's memory.

    Args:
        cache: how much memory may be taken.
        engine: which buckets are wanted.
        scheduling: who is served.
        kernels: what runs.
        free: name of the device with the least free memory, and how many bytes those are; None to
            measure it here.

    Raises:
        ConfigError: it does not fit, or a size makes no sense.
    """
    model, policy = kernels.model, scheduling.policy
    buckets = _buckets(engine, scheduling, kernels)
    moves, groups = policy.moves_cache, model.groups
    goes_there = cache.prefix_caching and not policy.two_sided and groups is None
    in_host = host_slots(
        cache.host_gib,
        moves or goes_there,
        model.config,
        kernels.cache_dtype,
        kernels.pool_heads // jax.process_count(),
        groups,
    )
    if in_host and cache.prefix_caching and groups is not None:
        log.info("cache.host_gib: of models with windows or states only checkpoints go there")
    demand = _demand(cache, scheduling, model.max_len, groups)
    room = pool_room(
        demand,
        model.config,
        kernels.cache_dtype,
        activations=model.activations,
        weights=_weights(kernels),
        pool_heads=kernels.pool_heads,
        shards=model.shards,
        other_work=_other_work(kernels, buckets, moves=moves or in_host > 0),
        device=free,
    )
    allocated = array_blocks(demand, room)
    return Memory(
        buckets=buckets,
        num_blocks=min(pool_blocks(demand, room), allocated),
        allocated_blocks=allocated,
        host_slots=in_host,
        modest=demand.modest,
    )


def _buckets(engine: EngineConfig, scheduling: Scheduling, kernels: Kernels) -> Buckets:
    model, limits, block_size = kernels.model, scheduling.limits, scheduling.block_size
    backend, width = get_backend(model.backend), blocks_a_plane(model.max_len, block_size)
    skips = model.mesh is None and skips_columns()
    return make_buckets(
        limits.max_rows,
        limits.max_batch_tokens,
        width=width,
        rows=engine.row_buckets,
        tokens=engine.token_buckets,
        hidden=model.hidden_read is not None,
        fitted=jax.default_backend() not in UNFITTED,
        decode_group=backend.decode_group,
        decode_chunk=backend.chunk_tokens(block_size, width),
        block_size=block_size,
        drafts=scheduling.policy.speculates,
        lora=() if model.lora is None else model.lora.widths(skips=skips),
        deterministic=kernels.deterministic,
        planes=2 if model.groups is None else model.groups.planes,
        states=0 if model.groups is None else model.groups.states,
    )


def _demand(
    cache: CacheConfig, scheduling: Scheduling, max_len: int, groups: LayerGroups | None
) -> Demand:
    return Demand(
        num_blocks=cache.num_blocks,
        block_size=scheduling.block_size,
        memory_bytes=int(cache.memory_gib * GIB),
        memory_fraction=cache.memory_fraction,
        max_rows=scheduling.limits.max_rows,
        max_model_len=max_len,
        max_batch_tokens=scheduling.limits.max_batch_tokens,
        modest=jax.default_backend() == "cpu" and not (cache.num_blocks or cache.memory_gib),
        groups=groups,
    )


def _weights(kernels: Kernels) -> int:
    """Bytes of them on each device, with the room for adapters."""
    model, dtype = kernels.model, kernels.dtype
    return param_bytes(model.config, dtype, model.mesh) + lora_bytes(
        model.family, model.config, model.lora, dtype, model.mesh
    )


def _widened(kernels: Kernels, tokens: int) -> int:
    """Bytes on each device of a quantised projection that steps of so many tokens write out."""
    shape, least = kernels.model.config, platform_backend().widened_rows
    if shape.quantization is None or least is None or tokens < least:
        return 0
    widest = shape.d_model * shape.d_ff // kernels.model.shards
    return widest * jnp.dtype(kernels.model.activations).itemsize


def _other_work(kernels: Kernels, buckets: Buckets, *, moves: bool) -> int:
    """Bytes on each device that hidden caches, moves of caches and quantised weights need beside
    the pool."""
    model, dtype = kernels.model, kernels.cache_dtype
    heads = kernels.pool_heads // model.shards
    moving = moving_workspace(moves, model.config, dtype, heads, model.groups)
    moving += _widened(kernels, max(buckets.tokens, default=0))
    if not buckets.hidden:
        return moving
    # Chunks of prompts project, however decodes are read: over a mesh one request after another.
    return moving + hidden_workspace(
        model.config,
        dtype,
        projected_tokens=buckets.projection_layout().tokens,
        gathered_tokens=model.max_len if model.shards > 1 else 0,
    )
