"""From a configuration to a warm engine. Everything that can be wrong is said before compiling."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxserve import __version__
from jaxserve.engine import rho
from jaxserve.engine.buckets import Buckets, make_buckets
from jaxserve.engine.detokenize import load_tokenizer
from jaxserve.engine.engine import Engine, EngineOptions
from jaxserve.engine.errors import ConfigError
from jaxserve.engine.executor import JaxExecutor
from jaxserve.engine.hidden_options import choose_read, given_rho
from jaxserve.engine.model_options import (
    choose_dtype,
    choose_max_len,
    load_shape,
    tokenizer_path,
)
from jaxserve.engine.sampling_state import MAX_EOS
from jaxserve.engine.sizing import (
    GIB,
    Demand,
    hidden_workspace,
    host_slots,
    moving_workspace,
    pool_blocks,
)
from jaxserve.engine.stats import EngineInfo
from jaxserve.engine.step_model import StepModel, unrolls
from jaxserve.engine.step_timer import StepTimer
from jaxserve.models import sharding
from jaxserve.models.base import ModelConfig
from jaxserve.pallas_kernels import HIDDEN, KV, make_pool, select_backend
from jaxserve.sched.blocks import blocks_a_plane
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.registry import full_name, make_policy
from jaxserve.sched.scheduler import Scheduler
from jaxserve.weights import load_params, param_bytes

log = logging.getLogger(__name__)


def build_engine(config: ConfigDict, *, progress: bool = True) -> Engine:
    """Loads the model, sizes the pool, compiles every step. The engine is ready for `start`.

    config: see `configs/base.py`. progress: show a bar while compiling. Raises ConfigError with
    one clear line.
    """
    try:
        return _build(config, progress)
    except (ValueError, OSError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


@dataclass(frozen=True)
class _Choices:
    """All that is decided before anything is loaded or compiled."""

    model: StepModel
    dtype: jnp.dtype
    policy: Policy
    limits: Limits
    buckets: Buckets
    num_blocks: int
    block_size: int
    pool_heads: int
    given_rho: float | None
    host_slots: int


def _build(config: ConfigDict, progress: bool) -> Engine:
    use_compilation_cache(config.engine.compilation_cache_dir)
    chosen = _choose(config)
    model, mesh = chosen.model.config, chosen.model.mesh
    tokenizer = load_tokenizer(tokenizer_path(config))
    params = load_params(
        config.model.path,
        chosen.model.family,
        model,
        dtype=chosen.dtype,
        mesh=mesh,
        load_format=config.model.load_format,
        seed=config.model.seed,
        progress=progress,
    )
    pool_axes = ("layers", "blocks", "kv_heads", "slots", "head_dim")
    pool = make_pool(
        model.num_layers,
        chosen.num_blocks,
        chosen.pool_heads,
        chosen.block_size,
        model.head_dim,
        chosen.dtype,
        sharding.named(mesh, pool_axes) if mesh else None,
    )
    executor = JaxExecutor(
        chosen.model, params, pool, chosen.buckets, moves_cache=chosen.policy.moves_cache
    )
    executor.warmup(_bar(progress))
    scheduler = Scheduler(
        chosen.policy,
        chosen.limits,
        num_blocks=chosen.num_blocks,
        block_size=chosen.block_size,
        max_model_len=chosen.model.max_len,
        capacity=config.scheduler.max_queue + chosen.limits.max_rows,
        host_slots=chosen.host_slots,
        rho=_rho(config, chosen, executor),
    )
    info = _info(config, chosen, scheduler, pool.nbytes)
    options = EngineOptions(config.engine.overlap, config.engine.forbid_compile)
    return Engine(
        executor, scheduler, tokenizer, info, eos_ids=model.eos_token_ids, options=options
    )


def _choose(config: ConfigDict) -> _Choices:
    family, model, hf = load_shape(config)
    if len(model.eos_token_ids) > MAX_EOS:
        raise ConfigError(
            f"the checkpoint has {len(model.eos_token_ids)} end-of-sequence ids; at most {MAX_EOS} "
            "can be served"
        )
    tensor = config.mesh.tensor
    sharding.check_tensor(model, tensor)
    mesh = sharding.make_mesh(tensor) if tensor > 1 else None
    dtype = choose_dtype(config.model.dtype, hf)
    max_model_len = choose_max_len(config.engine.max_model_len, model)
    policy = _policy(config)
    limits = _limits(config, policy, max_model_len)
    demand = _demand(config, limits, max_model_len)
    pool_heads = sharding.pool_kv_heads(model, tensor)
    read = choose_read(config.cache.hidden_read, config.scheduler.policy, policy, model)
    given = given_rho(config.cache.rho, read)
    backend, read = _backend(config, model, dtype, read, pool_heads=pool_heads, shards=tensor)
    buckets = make_buckets(
        limits.max_rows,
        limits.max_batch_tokens,
        width=blocks_a_plane(max_model_len, demand.block_size),
        rows=tuple(config.engine.row_buckets),
        tokens=tuple(config.engine.token_buckets),
        hidden=read is not None,
    )
    moving = moving_workspace(policy, model, dtype, pool_heads // tensor)
    num_blocks = pool_blocks(
        demand,
        model,
        dtype,
        weights=param_bytes(model, dtype, mesh),
        pool_heads=pool_heads,
        shards=tensor,
        other_work=_hidden_work(model, dtype, buckets, demand, tensor) + moving,
    )
    repeat = pool_heads // model.num_kv_heads
    unroll = unrolls(jax.default_backend())
    step_model = StepModel(family, model, backend, mesh, repeat, unroll, read, max_model_len)
    block_size = demand.block_size
    slots = host_slots(config.cache.host_gib, policy, model, dtype, pool_heads)
    return _Choices(
        step_model, dtype, policy, limits, buckets, num_blocks, block_size, pool_heads, given, slots
    )


def use_compilation_cache(directory: str) -> None:
    """Keeps compiled steps on disk, so that the next start is fast. "" leaves JAX's own setting
    (JAX_COMPILATION_CACHE_DIR) as it is."""
    if not directory:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _backend(
    config: ConfigDict,
    model: ModelConfig,
    dtype: jnp.dtype,
    read: str | None,
    *,
    pool_heads: int,
    shards: int,
) -> tuple[str, str | None]:
    """The kernels to serve with, and how they read hidden caches. Says so once if the platform's
    own ones do not fit the model; if it is hidden caches alone that they cannot read, there are
    none, for the others would slow down all."""

    def select(*kinds: int) -> tuple[str, str | None]:
        return select_backend(
            config.engine.attention_backend,
            kinds=kinds,
            num_heads=model.num_heads // shards,
            kv_heads=pool_heads // shards,
            head_dim=model.head_dim,
            block_size=config.cache.block_size,
            dtype=dtype,
        )

    try:
        name, reason = select(KV)
        if read is not None and reason is None:
            _, no_hidden = select(KV, HIDDEN)
            if no_hidden is not None:
                log.warning("no hidden caches, all are KV: %s", no_hidden)
                read = None
    except ValueError as error:
        raise ConfigError(f"engine.attention_backend: {error}") from error
    if reason is not None:
        log.warning("attention runs in plain XLA operations, slowly: %s", reason)
    return name, read


def _rho(config: ConfigDict, chosen: _Choices, executor: JaxExecutor) -> float | None:
    """See `View.rho`: as given, or measured on the warm executor; None without hidden caches."""
    model, limits = chosen.model, chosen.limits
    if model.hidden_read is None:
        return None
    if chosen.given_rho is not None:
        return chosen.given_rho
    device = jax.devices()[0]
    key = {
        "model": dataclasses.asdict(model.config),
        "device": device.device_kind,
        "processors": os.cpu_count() if device.platform == "cpu" else None,
        "tensor": config.mesh.tensor,
        "backend": model.backend,
        "hidden_read": model.hidden_read,
        "dtype": chosen.dtype.name,
        "block_size": chosen.block_size,
        "max_model_len": model.max_len,
        "rows": chosen.buckets.rows,
        "versions": [__version__, jax.__version__],
    }

    def measure() -> float:
        wanted = rho.shapes(chosen.buckets.rows, limits.max_rows, model.max_len - 1)
        return rho.measure(StepTimer(executor, chosen.num_blocks).seconds, wanted)

    return rho.remembered(config.engine.compilation_cache_dir, key, measure)


def _policy(config: ConfigDict) -> Policy:
    name = config.scheduler.policy
    try:
        policy = make_policy(name, **config.scheduler.params)
    except ValueError as error:
        raise ConfigError(f"scheduler.policy: {error}") from error
    if policy.hypothetical:
        raise ConfigError(
            f"scheduler.policy: {name} knows how long outputs will get, which no server does; it "
            "is for simulations only"
        )
    return policy


def _limits(config: ConfigDict, policy: Policy, max_model_len: int) -> Limits:
    given = config.scheduler
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
    if given.max_queue < 0:
        raise ConfigError(f"scheduler.max_queue must be at least 0, got {given.max_queue}")
    return limits


def _demand(config: ConfigDict, limits: Limits, max_model_len: int) -> Demand:
    cache = config.cache
    if cache.block_size < 1:
        raise ConfigError(f"cache.block_size must be at least 1, got {cache.block_size}")
    if cache.num_blocks < 0 or cache.num_blocks == 1:
        raise ConfigError(
            "cache.num_blocks must be at least 2, one for K and one for V (0 for as many as fit), "
            f"got {cache.num_blocks}"
        )
    if not 0 <= cache.memory_gib < math.inf:
        raise ConfigError(f"cache.memory_gib must be at least 0, got {cache.memory_gib}")
    if not 0 < cache.memory_fraction <= 1:
        raise ConfigError(f"cache.memory_fraction must be in (0, 1], got {cache.memory_fraction}")
    return Demand(
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        memory_bytes=int(cache.memory_gib * GIB),
        memory_fraction=cache.memory_fraction,
        max_rows=limits.max_rows,
        max_model_len=max_model_len,
        max_batch_tokens=limits.max_batch_tokens,
    )


def _hidden_work(
    model: ModelConfig, dtype: jnp.dtype, buckets: Buckets, demand: Demand, shards: int
) -> int:
    if not buckets.hidden:
        return 0
    # Chunks of prompts project, however decodes are read.
    gathered = demand.max_rows * demand.max_model_len if shards > 1 else 0
    widened = buckets.widening().tokens
    return hidden_workspace(model, dtype, widened_tokens=widened, gathered_tokens=gathered)


def _bar(progress: bool) -> Callable[[Iterable[Any]], Iterable[Any]]:
    return lambda work: tqdm(work, desc="compiling", unit="step", disable=not progress)


def _info(
    config: ConfigDict, chosen: _Choices, scheduler: Scheduler, pool_bytes: int
) -> EngineInfo:
    path = str(config.model.path).rstrip("/")
    step_model = chosen.model
    family, model, mesh = step_model.family, step_model.config, step_model.mesh
    return EngineInfo(
        model=config.model.name or os.path.basename(path) or config.model.preset,
        family=family.name,
        num_params=family.num_params(model),
        num_layers=model.num_layers,
        dtype=chosen.dtype.name,
        vocab_size=model.vocab_size,
        max_model_len=step_model.max_len,
        policy=full_name(config.scheduler.policy, config.scheduler.params),
        num_blocks=scheduler.pool.num_blocks,
        block_size=scheduler.pool.block_size,
        pool_tokens=scheduler.pool.pool_tokens,
        pool_bytes=pool_bytes,
        device=jax.devices()[0].device_kind,
        mesh_tensor=mesh.size if mesh else 1,
        attention_backend=step_model.backend,
        hidden_read=step_model.hidden_read,
        rho=scheduler.view.rho,
    )
