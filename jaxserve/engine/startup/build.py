"""Builds a warm engine from a configuration. Errors in the configuration are raised before anything
is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxserve import __version__
from jaxserve.config import JSON, Config, ConfigError
from jaxserve.engine.adapters import AdapterSlots
from jaxserve.engine.device.executor import Executor
from jaxserve.engine.device.leader_executor import LeaderExecutor
from jaxserve.engine.drafts.drafting import DRAFTERS
from jaxserve.engine.engine import Engine
from jaxserve.engine.errors import AdapterError
from jaxserve.engine.recorder import MIB, Recorder, check_path
from jaxserve.engine.startup import compilation_cache, cost_model_cache
from jaxserve.engine.startup.blueprint import Blueprint, build_executor
from jaxserve.engine.startup.config_errors import config_errors, first_line
from jaxserve.engine.startup.engine_choices import Choices, choose, for_model
from jaxserve.engine.startup.finite_check import warn_of_overflow
from jaxserve.engine.startup.host_group import BUILD, lead_group, share_fate
from jaxserve.engine.startup.initial_cost_model import InitialCostModel, find_initial_cost_model
from jaxserve.engine.startup.model_options import tokenizer_path
from jaxserve.engine.startup.step_profile import Progress
from jaxserve.engine.stats import EngineInfo
from jaxserve.engine.text.detokenizer import Tokenizer, load_tokenizer
from jaxserve.engine.text.grammar_process import GrammarLimits
from jaxserve.hosts.group import Group, Starter
from jaxserve.hosts.messages import Message
from jaxserve.hosts.rank import Rank
from jaxserve.progress import Show, Shown, shown
from jaxserve.sched.cache.cache_kinds import PROJECTED
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.recording import Header
from jaxserve.sched.registry import full_name, make_retention
from jaxserve.sched.scheduler import Scheduler
from jaxserve.weights.lora import LoadedAdapter, load_adapter


def build_engine(
    config: Config,
    *,
    progress: bool = True,
    rank: Rank | None = None,
    starter: Starter | None = None,
    block_secret: bytes | None = None,
) -> Engine:
    """Loads the model, sizes the pool and compiles every step. The engine is ready for `start`.

    Args:
        config: the configuration.
        progress: whether to show a bar meanwhile, or lines if stderr is no terminal or the log is
            JSON.
        rank: the leader's, if several hosts serve the model together. The others run
            `jaxserve.engine.startup.follower_executor`. None for one host.
        starter: starts the other hosts; None if they are started separately.
        block_secret: that several engines share whose prefix caches are compared; None for its own.

    Raises:
        ConfigError: with one clear line.
    """
    kept = config.engine.compilation_cache_dir
    with config_errors(), compilation_cache.gone_if_refused(kept):
        check_path(config.engine.record)
        if rank is None:
            if config.mesh.hosts != 1:
                raise ConfigError("mesh.hosts: only a server serves a model over several hosts")
            return _build(config, progress, secret=block_secret)
        group, memory = lead_group(config, rank, starter)
        try:
            return _build(config, progress, group, memory, block_secret)
        except BaseException as error:
            group.close(first_line(error))
            raise


def _check_device() -> None:
    """ConfigError if JAX finds no device, for example because JAX_PLATFORMS names one that is
    missing."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin is missing
        asked = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise ConfigError(f"{asked}: there is no such device: {first_line(error)}") from error


def _build(
    config: Config,
    progress: bool,
    group: Group | None = None,
    memory: tuple[str, int] | None = None,
    secret: bytes | None = None,
) -> Engine:
    """memory: as in `choose`. secret: `block_secret`."""
    _check_device()
    config = for_model(config)
    chosen = choose(config, memory)
    tokenizer = load_tokenizer(tokenizer_path(config.model), chosen.model.config.vocab_size)
    _check_adapters(config, chosen)
    cache_dir = compilation_cache.use(config.engine.compilation_cache_dir)
    config = config.with_fields(engine__compilation_cache_dir=cache_dir)
    chosen = cost_model_cache.with_pool_as_before(cache_dir, config.mesh.tensor, chosen)
    blueprint = Blueprint.from_choices(chosen, masked_sampling=tokenizer.definition() is not None)
    if group is not None:
        group.broadcast(Message(BUILD, blueprint.plain()))
    show = Show.where_wanted(progress, lines=config.telemetry.log_format == JSON)
    bar = _compiling(show, kernels=chosen.model.backend == "numba")
    barrier = _alone if group is None else group.barrier
    local, pool_bytes, fingerprint = build_executor(
        config.model, config.mesh.tensor, blueprint, progress=show, bar=bar, barrier=barrier
    )
    executor: Executor = local
    if group is not None:
        group.barrier()
        group.hurry()
        executor = LeaderExecutor(local, group)
    most = min(chosen.limits.max_prefill_tokens, chosen.model.max_len)
    warn_of_overflow(executor, chosen.model.config, chosen.num_blocks, most, chosen.dtype.name)
    made = functools.partial(assemble, config, chosen, executor, tokenizer, block_secret=secret)
    engine = made(pool_bytes=pool_bytes, progress=show, fingerprint=fingerprint)
    if group is not None:
        share_fate(engine, group)
    compilation_cache.note(cache_dir)
    return engine


def _alone() -> None:
    """The barrier of a single host."""


def assemble(
    config: Config,
    chosen: Choices,
    executor: Executor,
    tokenizer: Tokenizer,
    *,
    pool_bytes: int,
    progress: Show,
    fingerprint: str = "",
    clock: Callable[[], float] = time.monotonic,
    block_secret: bytes | None = None,
) -> Engine:
    """The engine over a warm executor, see `build_engine`.

    Args:
        config: the configuration.
        chosen: what was decided from it.
        executor: runs the steps.
        tokenizer: the model's.
        pool_bytes: size of the pool over all devices.
        progress: shows the timing of the first cost model.
        fingerprint: as `build_executor` returns it; "" for an executor without a model.
        clock: seconds, for the engine and its recorder.
        block_secret: as in `build_engine`.
    """
    initial = find_initial_cost_model(config, chosen, executor, _bar("timing", progress))
    cost_model = OnlineCostModel(initial.model)
    scheduler = Scheduler(
        chosen.policy,
        chosen.limits,
        num_blocks=chosen.num_blocks,
        block_size=chosen.block_size,
        max_model_len=chosen.model.max_len,
        capacity=config.scheduler.max_queue + chosen.limits.max_rows,
        cost_model=cost_model,
        padding=executor.buckets.padding,
        host_slots=chosen.host_slots,
        prefix_caching=config.cache.prefix_caching,
        retention=make_retention(config.cache.retention),
        seed=config.scheduler.seed,
        rho=initial.rho,
        projects=chosen.model.hidden_read == PROJECTED,
    )
    info = _info(config, chosen, scheduler, initial, pool_bytes, fingerprint)
    engine = Engine(
        executor,
        scheduler,
        tokenizer,
        info,
        cost_model=cost_model,
        eos_ids=chosen.model.config.eos_token_ids,
        overlap=config.engine.overlap,
        forbid_compile=config.engine.forbid_compile,
        share_between_keys=config.cache.share_between_keys,
        block_secret=block_secret,
        adapters=_adapter_slots(chosen, info.model),
        grammar_limits=GrammarLimits(
            config.engine.grammar_compile_s,
            config.engine.grammar_mib,
            config.engine.grammar_mask_ms,
        ),
        clock=clock,
    )
    _load_adapters(config, engine.load_adapter)
    if config.engine.record:
        header = _header(config, chosen, info, initial)
        limit = config.engine.record_mib * MIB
        engine.add_observer(Recorder(config.engine.record, header, limit, clock))
    return engine


def _check_adapters(config: Config, chosen: Choices) -> None:
    """Loads them to nowhere, before minutes are spent on compiling. Raises ConfigError."""
    slots = _adapter_slots(chosen, _model_name(config))
    if slots is not None:
        _load_adapters(config, lambda name, path: slots.load(name, path, None, lambda *_: None))


def _load_adapters(config: Config, load: Callable[[str, str], object]) -> None:
    for name, path in config.lora.adapters.items():
        try:
            load(name, path)
        except AdapterError as error:
            raise ConfigError(f"lora.adapters: {name}: {error}") from None


def _adapter_slots(chosen: Choices, base: str) -> AdapterSlots | None:
    """Room for adapters to the base model of this name; None for none."""
    model = chosen.model
    slots = model.lora
    if slots is None:
        return None

    def load(folder: Path, root: Path | None) -> LoadedAdapter:
        what = folder, model.family, model.config, slots
        return load_adapter(*what, fused=model.fused, dtype=chosen.dtype, root=root)

    return AdapterSlots(slots.count, slots.rank, load, base)


def _header(config: Config, chosen: Choices, info: EngineInfo, initial: InitialCostModel) -> Header:
    return Header(
        began=datetime.datetime.now(datetime.UTC).isoformat(),
        versions={"jaxserve": __version__, "jax": jax.__version__},
        model=info.model,
        dtype=info.dtype,
        device=info.device,
        policy=info.policy,
        seed=config.scheduler.seed,
        overlap=config.engine.overlap,
        **dataclasses.asdict(chosen.limits),
        max_queue=config.scheduler.max_queue,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        host_slots=chosen.host_slots,
        hidden_read=info.hidden_read,
        rho=info.rho,
        cost_model=initial.model,
        padding=chosen.buckets.padding,
        prefix_caching=config.cache.prefix_caching,
        retention=config.cache.retention,
        drafters=DRAFTERS if chosen.policy.speculates else (),
    )


def _model_name(config: Config) -> str:
    path = str(config.model.path).rstrip("/")
    return config.model.name or os.path.basename(path) or config.model.preset


def _dtype_name(chosen: Choices) -> str:
    quantization = chosen.model.config.quantization
    name = chosen.dtype.name
    return name if quantization is None else f"{name}, weights {quantization.scheme.kind}"


def _bar(name: str, show: Show) -> Progress:
    return lambda work: shown(show, name, "step", work=work)


def _compiling(show: Show, *, kernels: bool) -> Progress:
    """kernels: numba compiles some, for minutes, on which the first step waits."""

    def bar(work: Iterable[Any]) -> Iterator[Any]:
        steps = shown(show, "compiling", "step", work=work)
        with contextlib.ExitStack() as counting:
            if kernels:
                from jaxserve.numba_cache.compile_count import counted

                told = functools.partial(_tell_functions, steps)
                counting.enter_context(counted(told))
            yield from steps

    return bar


def _tell_functions(steps: Shown, count: int) -> None:
    steps.set_postfix_str(f"{count} kernel functions")


def _info(
    config: Config,
    chosen: Choices,
    scheduler: Scheduler,
    initial: InitialCostModel,
    pool_bytes: int,
    fingerprint: str,
) -> EngineInfo:
    step_model = chosen.model
    family, model, mesh = step_model.family, step_model.config, step_model.mesh
    return EngineInfo(
        model=_model_name(config),
        family=family.name,
        num_params=family.num_params(model),
        num_layers=model.num_layers,
        dtype=_dtype_name(chosen),
        cache_dtype=chosen.cache_dtype.name,
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
        cost_model=initial.source,
        hidden_read=step_model.hidden_read,
        rho=scheduler.view.rho,
        prefix_caching=scheduler.cache is not None,
        retention=config.cache.retention,
        speculates=chosen.policy.speculates,
        d_model=model.d_model,
        pooling=chosen.pooling,
        causal=model.causal,
        not_deterministic=chosen.not_deterministic,
        sampling_defaults=chosen.sampling_defaults,
        system_fingerprint=fingerprint,
    )
