"""Everything decided from the configuration before anything is loaded or compiled."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import (
    AUTO,
    NO_DEFAULTS,
    CacheConfig,
    Config,
    ConfigError,
    SchedulerConfig,
    ServedModelConfig,
)
from jaxserve.engine.device.buckets import ALWAYS, ASKED, NEVER, Buckets, make_buckets
from jaxserve.engine.device.sampling_state import MAX_EOS
from jaxserve.engine.device.step_model import (
    GPUS,
    StepModel,
    activations_in,
    cached_in,
    why_not_deterministic,
)
from jaxserve.engine.startup.model_options import (
    cached_whole,
    choose_dtype,
    choose_max_len,
    choose_read,
    experts_of,
    given_rho,
    kept_behind_windows,
    load_shape,
    lora_bytes,
    lora_slots,
)
from jaxserve.engine.startup.pool_size import (
    GIB,
    Demand,
    array_blocks,
    choose_block_size,
    hidden_workspace,
    host_slots,
    most_held,
    moving_workspace,
    pool_blocks,
    pool_room,
)
from jaxserve.models import sharding
from jaxserve.models.base import ModelConfig
from jaxserve.models.fused import param_bytes
from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    KernelShape,
    dtype_named,
    get_backend,
    select_backend,
    skips_columns,
)
from jaxserve.sched.cache.block_sizes import blocks_a_plane
from jaxserve.sched.cache.cache_kinds import ABSORBED, PROJECTED
from jaxserve.sched.cost.profiles import System, UnknownSystem, load
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import USUAL_POOLING, PoolingParams
from jaxserve.sched.scheduler import request_bytes
from jaxserve.weights import load_sampling_defaults
from jaxserve.weights.sentence_transformers import load_pooling

log = logging.getLogger(__name__)

# Platforms whose steps with hidden rows are all made for as many as there may be: what a CPU would
# save in steps fitted to few of them is little beside compiling twice as many.
UNFITTED = frozenset({"cpu"})
TABLES_GIB = 1  # of host memory, for what is kept of the requests


@dataclass(frozen=True)
class Choices:
    """Everything decided before anything is loaded or compiled.

    Attributes:
        model: the model as this platform runs it.
        dtype: of the weights.
        cache_dtype: dtype of the pool.
        policy: the scheduling policy.
        limits: of a batch.
        buckets: the layouts to compile.
        num_blocks: blocks of the pool that are used.
        allocated_blocks: blocks of its array, see `array_blocks`.
        block_size: tokens of a block.
        pool_heads: KV heads of the whole pool.
        given_rho: rho from the configuration (see `View`); None to measure it.
        host_slots: slots of host memory for caches.
        profile: the measured system that the configuration names; None if it names none.
        modest: whether the pool's size was not configured, see `Demand`.
        pooling: how the checkpoint says that vectors are made.
        sampling_defaults: as in `EngineInfo`.
        not_deterministic: likewise.
    """

    model: StepModel
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    policy: Policy
    limits: Limits
    buckets: Buckets
    num_blocks: int
    allocated_blocks: int
    block_size: int
    pool_heads: int
    given_rho: float | None
    host_slots: int
    profile: System | None
    modest: bool = False
    pooling: PoolingParams = USUAL_POOLING
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    not_deterministic: str = ""

    @property
    def moves_cache(self) -> bool:
        """Whether cached tokens are moved, by the policy or to be found again."""
        return self.policy.moves_cache or self.host_slots > 0


def choose(config: Config, memory: tuple[str, int] | None = None) -> Choices:
    """Decides everything.

    Args:
        config: the configuration.
        memory: name of the device with the least free memory, and how many bytes those are; None to
            measure it here.

    Raises:
        ConfigError, ValueError, OSError: with one clear line.
    """
    if config.lora.slots and jax.process_count() > 1:
        raise ConfigError("lora: adapters are not served over several hosts (mesh.hosts)")
    if config.cache.hidden_read != AUTO or config.cache.rho != AUTO:
        return _choose(config, memory, hidden=True)
    try:
        chosen = _choose(config, memory, hidden=True)
        read = chosen.model.hidden_read
        reason = None if read is None else _why_kv_alone(config, chosen, read)
        if reason is None:
            return chosen
    except ConfigError as error:  # there may be memory without
        reason = str(error)
    chosen = _choose(config, memory, hidden=False)
    log.info("no hidden caches, all are KV: %s", reason)
    return chosen


def for_model(config: Config) -> Config:
    """The configuration as the model needs it. One whose tokens see those behind them needs prompts
    that are computed in one step, and finds no prefixes: with more behind it, none is the same."""
    model = load_shape(config.model)[1]
    if model.causal:
        return config
    fields: dict[str, Any] = {"cache__prefix_caching": False}
    if config.scheduler.policy == SchedulerConfig().policy:
        fields["scheduler__policy"] = "vllm"
    elif make_policy(config.scheduler.policy, **config.scheduler.params).chunked:
        raise ConfigError(
            f"scheduler.policy={config.scheduler.policy} computes prompts in parts, and this "
            "model's tokens see those behind them (is_causal in its config.json); take vllm"
        )
    if not config.engine.max_model_len:
        longest = min(model.max_position, config.scheduler.max_batch_tokens)
        fields["engine__max_model_len"] = longest
    log.info(
        "tokens of this model see those behind them: it makes vectors only, of whole prompts, with "
        "scheduler.policy=%s and without prefix caching",
        fields.get("scheduler__policy", config.scheduler.policy),
    )
    return config.with_fields(**fields)


def _why_kv_alone(config: Config, chosen: Choices, read: str) -> str | None:
    """Why there should be no hidden caches, although there could be, read like this, and nobody
    asked for them; None if there is no reason."""
    if chosen.num_blocks >= most_held(
        chosen.limits.max_rows, chosen.model.max_len, chosen.block_size
    ):  # they only save memory, and their steps take long to compile
        return "the pool holds all requests that run, whole"
    # Dtypes decide what is written, and must not depend on how much memory is free. And where
    # these are wider with hidden caches, nothing is saved.
    weights = choose_dtype(config.model.dtype, load_shape(config.model)[2])
    platform, backend = jax.default_backend(), chosen.model.backend
    cached = chosen.cache_dtype
    if cached != (chosen.model.activations or chosen.dtype):
        # Texts must not depend on who gets which kind.
        return (
            f"in {cached.name} hidden vectors would be rounded otherwise than K and V; "
            "cache.hidden_read has them all the same"
        )
    cached = _cached(config.cache.dtype, cached_in(platform, weights, backend, hidden=False))
    if chosen.dtype != weights or chosen.cache_dtype != cached:
        return f"weights, K and V can be {weights.name} then"
    reason = _why_unknown(chosen.profile, read)
    return reason and f"scheduler.profile: {reason}"


def _choose(config: Config, memory: tuple[str, int] | None, *, hidden: bool) -> Choices:
    """See `choose`. hidden: whether there may be hidden caches."""
    family, model, hf = load_shape(config.model)
    _check_ends(model)
    tensor = config.mesh.tensor
    sharding.check_tensor(model, tensor)
    mesh = sharding.make_mesh(tensor) if tensor > 1 else None
    max_model_len = choose_max_len(config.engine.max_model_len, model)
    model = model.for_length(max_model_len)
    for costs in (kept_behind_windows(model, max_model_len), cached_whole(model)):
        if costs is not None:
            log.info("%s", costs)
    policy = _policy(config.scheduler)
    limits = _limits(config.scheduler, policy, max_model_len)
    demand = _demand(config.cache, limits, max_model_len)
    _check_tables(config.scheduler.max_queue, demand)
    pool_heads = sharding.pool_kv_heads(model, tensor)
    slots = lora_slots(config.lora, family, model)
    read = None
    if hidden:
        read = choose_read(config.cache.hidden_read, config.scheduler.policy, policy, model)
    given = given_rho(config.cache.rho, read)
    dtype = choose_dtype(
        config.model.dtype, hf, hidden=read is not None, quantization=model.quantization
    )
    activations = activations_in(jax.default_backend(), dtype)
    backend, read = _backend(
        config.engine.attention_backend,
        tensor,
        model,
        _cached(config.cache.dtype, activations),
        read,
        demand.block_size,
        pool_heads,
    )
    if read and config.cache.hidden_read == AUTO and get_backend(backend).batch_invariant:
        read = PROJECTED  # absorbed reading has other sums than that of K and V
    suits = cached_in(jax.default_backend(), dtype, backend, hidden=read is not None)
    cached = _cached(config.cache.dtype, suits)
    _check_cache(jax.default_backend(), backend, cached, activations)
    kernels, width = get_backend(backend), blocks_a_plane(max_model_len, demand.block_size)
    why_not = why_not_deterministic(backend, model, tensor, read)
    if config.engine.deterministic and why_not:
        raise ConfigError(f"engine.deterministic: {why_not}")
    # Where kernels are batch-invariant everything is deterministic as it is.
    wanted = ALWAYS if config.engine.deterministic else ASKED
    buckets = make_buckets(
        limits.max_rows,
        limits.max_batch_tokens,
        width=width,
        rows=config.engine.row_buckets,
        tokens=config.engine.token_buckets,
        hidden=read is not None,
        fitted=jax.default_backend() not in UNFITTED,
        decode_group=kernels.decode_group,
        decode_chunk=kernels.chunk_tokens(demand.block_size, width),
        block_size=demand.block_size,
        drafts=policy.speculates,
        lora=() if slots is None else slots.widths(skips=mesh is None and skips_columns()),
        deterministic=NEVER if why_not or kernels.batch_invariant else wanted,
    )
    moves, gib = policy.moves_cache, config.cache.host_gib
    goes_there = moves or (config.cache.prefix_caching and not policy.two_sided)
    in_host = host_slots(gib, goes_there, model, cached, pool_heads // jax.process_count())
    moving = moving_workspace(moves or in_host > 0, model, cached, pool_heads // tensor)
    room = pool_room(
        demand,
        model,
        cached,
        activations=activations,
        weights=param_bytes(model, dtype, mesh) + lora_bytes(family, model, slots, dtype, mesh),
        pool_heads=pool_heads,
        shards=tensor,
        other_work=_hidden_work(model, cached, buckets, demand, tensor) + moving,
        device=memory,
    )
    allocated = array_blocks(demand, room)
    num_blocks = min(pool_blocks(demand, room), allocated)
    profile = _profile(config.scheduler, model)
    if read is not None and given is None and config.cache.hidden_read != AUTO:
        reason = _why_unknown(profile, read)
        if reason is not None:
            raise ConfigError(
                f"scheduler.profile: {config.scheduler.profile}: {reason}; give cache.rho, or "
                f"measure it with a policy that plans them and cache.hidden_read={read}"
            )
    return Choices(
        StepModel(family, model, backend, mesh, read, max_model_len, activations, slots),
        dtype,
        cached,
        policy,
        limits,
        buckets,
        num_blocks,
        allocated,
        demand.block_size,
        pool_heads,
        given,
        in_host,
        profile,
        demand.modest,
        load_pooling(config.model.path),
        _sampling_defaults(config.model),
        why_not,
    )


def _cached(wanted: str, suits: jnp.dtype) -> jnp.dtype:
    """The dtype of the pool, as `cache.dtype` has it; of auto what suits."""
    return suits if wanted == AUTO else dtype_named(wanted)


def _check_cache(platform: str, backend: str, cached: jnp.dtype, activations: jnp.dtype) -> None:
    """ConfigError for a dtype of the pool that could be served, but badly."""
    wanted = f"cache.dtype: {cached.name}"
    if platform in GPUS and cached.itemsize == 1 and activations.itemsize > 2:
        raise ConfigError(f"{wanted} needs model.dtype=bfloat16 or float16 on GPUs")
    if platform == "cpu" and backend == "xla" and cached not in (jnp.float32, jnp.int8):
        raise ConfigError(
            f"{wanted}: on CPUs, plain XLA would convert the whole pool in each step; take float32 "
            "or int8, or install numba (pip install numba)"
        )


def _sampling_defaults(served: ServedModelConfig) -> dict[str, Any]:
    read = served.path and served.generation_config != NO_DEFAULTS
    return load_sampling_defaults(served.path) if read else {}


def _check_ends(model: ModelConfig) -> None:
    count = len(model.eos_token_ids)
    if count > MAX_EOS:
        raise ConfigError(
            f"the checkpoint has {count} end-of-sequence ids; at most {MAX_EOS} can be served"
        )


def _backend(
    wanted: str,
    shards: int,
    model: ModelConfig,
    dtype: jnp.dtype,
    read: str | None,
    block_size: int,
    pool_heads: int,
) -> tuple[str, str | None]:
    """The attention kernels, and how they read hidden caches. Warns once if the platform's own
    kernels do not fit the model. If only hidden caches are the problem, they are turned off, since
    the fallback would slow down everything."""
    heads = model.num_heads // shards, pool_heads // shards
    shape = KernelShape(*heads, model.head_dim, block_size, dtype, model.sinks)
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


def _policy(config: SchedulerConfig) -> Policy:
    name = config.policy
    try:
        policy = make_policy(name, **config.params)
    except ValueError as error:
        raise ConfigError(f"scheduler.policy: {error}") from error
    if policy.hypothetical:
        raise ConfigError(
            f"scheduler.policy: {name} knows how long outputs will get, which no server does; it "
            "is for simulations only"
        )
    return policy


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


def _limits(given: SchedulerConfig, policy: Policy, max_model_len: int) -> Limits:
    try:
        # Whole prompts know no P (InferMax Table 1).
        prefill = given.max_prefill_tokens if policy.chunked else given.max_batch_tokens
        limits = Limits(given.max_batch_tokens, prefill, given.max_rows)
    except ValueError as error:
        raise ConfigError(f"scheduler.{error}") from error
    if not policy.chunked and limits.max_batch_tokens < max_model_len:
        raise ConfigError(
            f"scheduler.policy={given.policy} computes a prompt in one step, so "
            f"scheduler.max_batch_tokens ({limits.max_batch_tokens}) must be at least the longest "
            f"request ({max_model_len} tokens); raise it, or lower engine.max_model_len"
        )
    return limits


def _demand(cache: CacheConfig, limits: Limits, max_model_len: int) -> Demand:
    return Demand(
        num_blocks=cache.num_blocks,
        block_size=choose_block_size(cache.block_size),
        memory_bytes=int(cache.memory_gib * GIB),
        memory_fraction=cache.memory_fraction,
        max_rows=limits.max_rows,
        max_model_len=max_model_len,
        max_batch_tokens=limits.max_batch_tokens,
        modest=jax.default_backend() == "cpu" and not (cache.num_blocks or cache.memory_gib),
    )


def _check_tables(max_queue: int, demand: Demand) -> None:
    """ConfigError if the host tables of so many requests would take too much memory."""
    size = request_bytes(demand.max_model_len, demand.block_size)
    most = TABLES_GIB * GIB // size
    if max_queue + demand.max_rows > most:
        raise ConfigError(
            f"scheduler.max_queue and scheduler.max_rows together must be at most {most}, as the "
            f"{size} bytes kept of each request take {TABLES_GIB} GiB then; got "
            f"{max_queue} + {demand.max_rows}"
        )


def _hidden_work(
    model: ModelConfig, dtype: jnp.dtype, buckets: Buckets, demand: Demand, shards: int
) -> int:
    if not buckets.hidden:
        return 0
    # Chunks of prompts project, however decodes are read: over a mesh one request after another.
    gathered = demand.max_model_len if shards > 1 else 0
    projected = buckets.projection_layout().tokens
    return hidden_workspace(model, dtype, projected_tokens=projected, gathered_tokens=gathered)
