"""Everything decided from the configuration before anything is loaded or compiled, in stages: the
model, who is served, how the model runs, and how much memory there is."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxserve.config import (
    AUTO,
    NO_DEFAULTS,
    Config,
    ConfigError,
    SchedulerConfig,
    ServedModelConfig,
)
from jaxserve.engine.device.step_model import cached_in
from jaxserve.engine.startup.choices.kernel_choice import (
    Kernels,
    choose_cache_dtype,
    choose_kernels,
)
from jaxserve.engine.startup.choices.memory_choice import Memory, size_memory
from jaxserve.engine.startup.choices.model_options import (
    ServedModel,
    choose_dtype,
    choose_model,
    experts_of,
    for_model,
    load_shape,
)
from jaxserve.engine.startup.choices.policy_choice import Scheduling, choose_policy
from jaxserve.engine.startup.choices.pool_size import most_held
from jaxserve.models.base import ModelConfig
from jaxserve.sched.cache.cache_kinds import ABSORBED, PROJECTED
from jaxserve.sched.cost.profiles import System, UnknownSystem, load
from jaxserve.sched.registry import make_retention
from jaxserve.sched.request import USUAL_POOLING, PoolingParams
from jaxserve.weights import load_sampling_defaults
from jaxserve.weights.sentence_transformers import load_pooling

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choices:
    """Everything decided before anything is loaded or compiled.

    Attributes:
        config: the configuration, changed where the model needs it.
        scheduling: who is served, in which batches.
        kernels: in which dtypes and with which kernels the model runs.
        memory: the shapes of steps, and the memory of caches.
        profile: the measured system that the configuration names; None if it names none.
        pooling: how the checkpoint says that vectors are made.
        sampling_defaults: as in `EngineInfo`.
    """

    config: Config
    scheduling: Scheduling
    kernels: Kernels
    memory: Memory
    profile: System | None
    pooling: PoolingParams = USUAL_POOLING
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def moves_cache(self) -> bool:
        """Whether cached tokens are moved, by the policy or to be found again."""
        return self.scheduling.policy.moves_cache or self.memory.host_slots > 0


def choose(config: Config, free: tuple[str, int] | None = None) -> Choices:
    """Decides everything. Hidden caches that nobody asked for are there only where they are of use.

    Args:
        config: the configuration.
        free: name of the device with the least free memory, and how many bytes those are; None to
            measure it here.

    Raises:
        ConfigError, ValueError, OSError: with one clear line.
    """
    if config.lora.slots and jax.process_count() > 1:
        raise ConfigError("lora: adapters are not served over several hosts (mesh.hosts)")
    shape = load_shape(config.model)
    config = for_model(config, shape[1])
    model = choose_model(shape, config.engine.max_model_len, config.mesh.tensor)
    scheduling = choose_policy(
        config.scheduler, config.cache.block_size, model.max_len, model.config
    )
    if scheduling.policy.keeps_programs and not make_retention(config.cache.retention).by_program:
        log.warning(
            "scheduler.policy=%s keeps no caches while tools run: that takes cache.retention=ttl",
            scheduling.name,
        )
    choose_rest = functools.partial(_choose_rest, config, model, scheduling, free)
    if config.cache.hidden_read != AUTO or config.cache.rho != AUTO:
        return choose_rest(hidden=True)
    try:
        chosen = choose_rest(hidden=True)
        reason = _why_kv_alone(config.model.dtype, config.cache.dtype, model, chosen)
        if reason is None:
            return chosen
    except ConfigError as error:  # there may be memory without
        reason = str(error)
    chosen = choose_rest(hidden=False)
    log.info("no hidden caches, all are KV: %s", reason)
    return chosen


def _choose_rest(
    config: Config,
    model: ServedModel,
    scheduling: Scheduling,
    free: tuple[str, int] | None,
    *,
    hidden: bool,
) -> Choices:
    """What depends on hidden caches. hidden: whether there may be any."""
    kernels = choose_kernels(
        config.model,
        config.cache,
        config.engine,
        config.lora,
        model=model,
        scheduling=scheduling,
        hidden=hidden,
    )
    memory = size_memory(
        config.cache, config.engine, scheduling=scheduling, kernels=kernels, free=free
    )
    profile = _profile(config.scheduler, model.config)
    read = kernels.model.hidden_read
    if read is not None and kernels.given_rho is None and config.cache.hidden_read != AUTO:
        reason = _why_unknown(profile, read)
        if reason is not None:
            raise ConfigError(
                f"scheduler.profile: {config.scheduler.profile}: {reason}; give cache.rho, or "
                f"measure it with a policy that plans them and cache.hidden_read={read}"
            )
    return Choices(
        config=config,
        scheduling=scheduling,
        kernels=kernels,
        memory=memory,
        profile=profile,
        pooling=load_pooling(config.model.path),
        sampling_defaults=_sampling_defaults(config.model),
    )


def _why_kv_alone(dtype: str, cache_dtype: str, served: ServedModel, chosen: Choices) -> str | None:
    """Why there should be no hidden caches, although there could be and nobody asked for them.

    Args:
        dtype: `model.dtype`.
        cache_dtype: `cache.dtype`.
        served: the model.
        chosen: everything, with hidden caches where there may be any.

    Returns:
        The reason; None if there is none, or there are no such caches anyway.
    """
    kernels, model, scheduling = chosen.kernels, chosen.kernels.model, chosen.scheduling
    if model.hidden_read is None:
        return None
    if chosen.memory.num_blocks >= most_held(
        scheduling.limits.max_rows, model.max_len, scheduling.block_size
    ):  # they only save memory, and their steps take long to compile
        return "the pool holds all requests that run, whole"
    # Dtypes decide what is written, and must not depend on how much memory is free. And where
    # these are wider with hidden caches, nothing is saved.
    weights = choose_dtype(dtype, served.hf)
    cached = kernels.cache_dtype
    if cached != (model.activations or kernels.dtype):
        # Texts must not depend on who gets which kind.
        return (
            f"in {cached.name} hidden vectors would be rounded otherwise than K and V; "
            "cache.hidden_read has them all the same"
        )
    suits = cached_in(jax.default_backend(), weights, model.backend, hidden=False)
    if kernels.dtype != weights or cached != choose_cache_dtype(cache_dtype, suits):
        return f"weights, K and V can be {weights.name} then"
    reason = _why_unknown(chosen.profile, model.hidden_read)
    return reason and f"scheduler.profile: {reason}"


def _sampling_defaults(served: ServedModelConfig) -> dict[str, Any]:
    read = served.path and served.generation_config != NO_DEFAULTS
    return load_sampling_defaults(served.path) if read else {}


def _profile(config: SchedulerConfig, model: ModelConfig) -> System | None:
    """The measured system, None if none is configured."""
    path = config.profile
    if not path:
        return None
    try:
        profile = load(os.path.expanduser(path))
    except UnknownSystem as error:
        raise ConfigError(f"scheduler.profile: {error}") from error
    layers = profile.cost_model.num_layers
    if layers != model.num_layers:
        raise ConfigError(
            f"scheduler.profile: {path}: it is of a model with {layers} layers, this one has "
            f"{model.num_layers}"
        )
    known, own = profile.cost_model.experts, experts_of(model)
    if known != own:
        raise ConfigError(
            f"scheduler.profile: {path}: it is of a model with {known[0]} experts, {known[1]} a "
            f"token, this one has {own[0]}, {own[1]} a token"
        )
    return profile


def _why_unknown(profile: System | None, read: str) -> str | None:
    """Why the profile, if there is one, does not say what hidden caches cost that are read like
    this; None if it does."""
    if profile is None:
        return None
    if profile.rho is None:
        return "it was measured without hidden caches"
    measured = PROJECTED if profile.projects else ABSORBED
    if measured == read:
        return None
    return f"it was measured with hidden caches {measured}, here they are {read}"
