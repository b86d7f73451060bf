"""The second stage of a start: in which dtypes and with which kernels the model runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.config import (
    AUTO,
    CacheConfig,
    ConfigError,
    EngineConfig,
    LoraConfig,
    ServedModelConfig,
)
from jaxserve.engine.device.buckets import ALWAYS, ASKED, NEVER
from jaxserve.engine.device.step_model import (
    GPUS,
    StepModel,
    activations_in,
    cached_in,
    why_not_deterministic,
)
from jaxserve.engine.startup.choices.kernel_trials import fastest
from jaxserve.engine.startup.choices.model_options import (
    ServedModel,
    choose_dtype,
    choose_read,
    given_rho,
    lora_slots,
)
from jaxserve.engine.startup.choices.policy_choice import Scheduling
from jaxserve.models import sharding
from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    KernelShape,
    dtype_named,
    get_backend,
    select_backend,
)
from jaxserve.sched.cache.cache_kinds import PROJECTED

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """How the model runs.

    Attributes:
        model: the model as this platform runs it.
        dtype: of the weights.
        cache_dtype: dtype of the pool.
        pool_heads: KV heads of the whole pool.
        given_rho: rho from the configuration (see `View`); None to measure it.
        deterministic: as in `Buckets`.
        not_deterministic: as in `EngineInfo`.
    """

    model: StepModel
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    pool_heads: int
    given_rho: float | None
    deterministic: int
    not_deterministic: str


def choose_kernels(
    served: ServedModelConfig,
    cache: CacheConfig,
    engine: EngineConfig,
    lora: LoraConfig,
    *,
    model: ServedModel,
    scheduling: Scheduling,
    hidden: bool,
) -> Kernels:
    """The dtypes and the kernels.

    Args:
        served: which dtype the weights should have.
        cache: which dtype the pool should have, and how hidden caches should be read.
        engine: which attention kernels are wanted, and whether steps must be deterministic.
        lora: room for adapters.
        model: what runs.
        scheduling: who is served.
        hidden: whether there may be hidden caches.

    Raises:
        ConfigError: with one clear line.
    """
    platform, shape = jax.default_backend(), model.config
    slots = lora_slots(lora, model.family, shape)
    read = None
    if hidden:
        read = choose_read(cache.hidden_read, scheduling.name, scheduling.policy, shape)
    given = given_rho(cache.rho, read)
    dtype = choose_dtype(
        served.dtype, model.hf, hidden=read is not None, quantization=shape.quantization
    )
    activations = activations_in(platform, dtype)
    pool_heads = sharding.pool_kv_heads(shape, model.shards)
    likely = choose_cache_dtype(cache.dtype, activations)
    wanted = KernelShape(
        shape.num_heads // model.shards,
        pool_heads // model.shards,
        shape.cached_dim(likely),
        scheduling.block_size,
        likely,
        shape.sinks,
        shape.halves,
    )
    backend, read = _backend(engine.attention_backend, wanted, read)
    if engine.attention_backend == AUTO:
        backend = fastest(backend, wanted, engine.compilation_cache_dir)
    if read and cache.hidden_read == AUTO and get_backend(backend).batch_invariant:
        read = PROJECTED  # absorbed reading has other sums than that of K and V
    suits = cached_in(platform, dtype, backend, hidden=read is not None)
    cached = choose_cache_dtype(cache.dtype, suits)
    _check_cache(platform, backend, cached, activations)
    groups = scheduling.groups
    if groups is not None:
        groups = groups.for_pool(shape, pool_heads, scheduling.block_size, cached)
    why_not = why_not_deterministic(backend, shape, model.shards, read)
    if engine.deterministic and why_not:
        raise ConfigError(f"engine.deterministic: {why_not}")
    # Where kernels are batch-invariant everything is deterministic as it is.
    apart = not (why_not or get_backend(backend).batch_invariant)
    asked = ALWAYS if engine.deterministic else ASKED
    return Kernels(
        model=StepModel(
            family=model.family,
            config=shape,
            backend=backend,
            mesh=model.mesh,
            hidden_read=read,
            max_len=model.max_len,
            activations=activations,
            lora=slots,
            groups=groups,
        ),
        dtype=dtype,
        cache_dtype=cached,
        pool_heads=pool_heads,
        given_rho=given,
        deterministic=asked if apart else NEVER,
        not_deterministic=why_not,
    )


def choose_cache_dtype(wanted: str, suits: jnp.dtype) -> jnp.dtype:
    """The dtype of the pool, as `cache.dtype` has it; of auto what suits."""
    return suits if wanted == AUTO else dtype_named(wanted)


def _backend(wanted: str, shape: KernelShape, read: str | None) -> tuple[str, str | None]:
    """The attention kernels, and how they read hidden caches. Warns once if the platform's own
    kernels do not fit the model. If only hidden caches are the problem, they are turned off, since
    the fallback would slow down everything."""
    try:
        name, reason = select_backend(wanted, (KV,), shape)
        if read is not None and reason is None:
            _, no_hidden = select_backend(wanted, (KV, HIDDEN), shape)
            if no_hidden is not None:
                log.warning("no hidden caches, all are KV: %s", no_hidden)
                read = None
    except ValueError as error:
        raise ConfigError(f"engine.attention_backend: {error}") from error
    if reason is not None:
        log.warning("attention runs in plain XLA operations, slowly: %s", reason)
    return name, read


def _check_cache(platform: str, backend: str, cached: jnp.dtype, activations: jnp.dtype) -> None:
    """ConfigError for a dtype of the pool that cannot be served, or badly."""
    wanted = f"cache.dtype: {cached.name}"
    if platform in GPUS and cached.itemsize == 1 and activations.itemsize > 2:
        raise ConfigError(f"{wanted} needs model.dtype=bfloat16 or float16 on GPUs")
    if platform == "cpu" and backend == "xla" and cached not in (jnp.float32, jnp.int8):
        raise ConfigError(
            f"{wanted}: on CPUs, plain XLA would convert the whole pool in each step; take float32 "
            "or int8, or install numba (pip install numba)"
        )
