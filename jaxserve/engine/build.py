"""From a configuration to a warm engine. Everything that can be wrong is said before compiling."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxserve import __version__
from jaxserve.engine import rho
from jaxserve.engine.choices import Choices, choose
from jaxserve.engine.detokenize import load_tokenizer
from jaxserve.engine.engine import Engine, EngineOptions
from jaxserve.engine.errors import ConfigError
from jaxserve.engine.executor import JaxExecutor
from jaxserve.engine.hidden import PROJECTED
from jaxserve.engine.model_options import (
    tokenizer_path,
)
from jaxserve.engine.stats import EngineInfo
from jaxserve.engine.step_timer import StepTimer
from jaxserve.models import sharding
from jaxserve.pallas_kernels import make_pool
from jaxserve.sched.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.online_cost import OnlineCostModel
from jaxserve.sched.registry import full_name
from jaxserve.sched.scheduler import Scheduler
from jaxserve.weights import load_params

_NOMINAL = LinearCostModel(Coefficients(1e-4, 1e-2, 0, 0, 0, 0, 0, 0, 0), 1)


def build_engine(config: ConfigDict, *, progress: bool = True) -> Engine:
    """Loads the model, sizes the pool, compiles every step. The engine is ready for `start`.

    config: see `configs/base.py`. progress: show a bar while compiling. Raises ConfigError with
    one clear line.
    """
    try:
        return _build(config, progress)
    except (ValueError, OSError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _build(config: ConfigDict, progress: bool) -> Engine:
    use_compilation_cache(config.engine.compilation_cache_dir)
    chosen = choose(config)
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
        cost_model=OnlineCostModel(_NOMINAL),
        padding=executor.buckets.padding,
        host_slots=chosen.host_slots,
        rho=_rho(config, chosen, executor),
        projects=chosen.model.hidden_read == PROJECTED,
    )
    info = _info(config, chosen, scheduler, pool.nbytes)
    options = EngineOptions(config.engine.overlap, config.engine.forbid_compile)
    return Engine(
        executor, scheduler, tokenizer, info, eos_ids=model.eos_token_ids, options=options
    )


def use_compilation_cache(directory: str) -> None:
    """Keeps compiled steps on disk, so that the next start is fast. "" leaves JAX's own setting
    (JAX_COMPILATION_CACHE_DIR) as it is."""
    if not directory:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _rho(config: ConfigDict, chosen: Choices, executor: JaxExecutor) -> float | None:
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


def _bar(progress: bool) -> Callable[[Iterable[Any]], Iterable[Any]]:
    return lambda work: tqdm(work, desc="compiling", unit="step", disable=not progress)


def _info(config: ConfigDict, chosen: Choices, scheduler: Scheduler, pool_bytes: int) -> EngineInfo:
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
