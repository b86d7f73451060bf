"""Builds a warm engine from a configuration. Errors in the configuration are raised before anything
is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxserve.config import JSON, Config, ConfigError, ServedModelConfig
from jaxserve.engine.device.leader_executor import LeaderExecutor
from jaxserve.engine.engine import Engine
from jaxserve.engine.recorder import check_path
from jaxserve.engine.startup import compilation_cache
from jaxserve.engine.startup.adapters import check_adapters
from jaxserve.engine.startup.assemble import assemble
from jaxserve.engine.startup.blueprint import Blueprint, Programs, build_programs
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.startup.config_errors import config_errors, first_line
from jaxserve.engine.startup.finite_check import warn_of_overflow
from jaxserve.engine.startup.host_group import BUILD, lead_group, share_fate
from jaxserve.engine.startup.start_cache import StartCache, key_of
from jaxserve.engine.startup.step_profile import Progress
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.hosts.group import Group, Starter
from jaxserve.hosts.messages import Message
from jaxserve.hosts.rank import Rank
from jaxserve.progress import Show, Shown, shown


def build_engine(
    config: Config,
    *,
    progress: bool = True,
    rank: Rank | None = None,
    starter: Starter | None = None,
    block_secret: bytes | None = None,
    all_steps: bool = True,
) -> Engine:
    """Loads the model, sizes the pool and compiles the steps. The engine is ready for `start`.

    Args:
        config: the configuration.
        progress: whether to show a bar meanwhile, or lines if stderr is no terminal or the log is
            JSON.
        rank: the leader's, if several hosts serve the model together. The others run
            `jaxserve.engine.startup.follower_executor`. None for one host.
        starter: starts the other hosts; None if they are started separately.
        block_secret: that several engines share whose prefix caches are compared; None for its own.
        all_steps: whether every step is compiled now. Else the engine starts with few, and compiles
            the others while it serves, unless the model is on several devices.

    Raises:
        ConfigError: with one clear line.
    """
    kept = config.engine.compilation_cache_dir
    with config_errors(), compilation_cache.gone_if_refused(kept):
        check_path(config.engine.record)
        group = free = None
        if rank is not None:
            group, free = lead_group(config, rank, starter)
        elif config.mesh.hosts != 1:
            raise ConfigError("mesh.hosts: only a server serves a model over several hosts")
        try:
            return _build(config, progress, group, free, block_secret, all_steps=all_steps)
        except BaseException as error:
            if group is not None:
                group.close(first_line(error))
            raise


def _build(
    config: Config,
    progress: bool,
    group: Group | None,
    free: tuple[str, int] | None,
    secret: bytes | None,
    *,
    all_steps: bool,
) -> Engine:
    """free: as in `choose`. secret: `block_secret`."""
    _check_device()
    chosen = choose(config, free)
    config = chosen.config
    model = chosen.kernels.model
    needed = config.model.load_format != "random"
    tokenizer = load_tokenizer(config.model.path, model.config.vocab_size, needed=needed)
    check_adapters(config.lora.adapters, chosen.kernels, config.model.served_name)
    cache_dir = compilation_cache.use(config.engine.compilation_cache_dir)
    cache = StartCache(cache_dir, key_of(chosen))
    chosen = dataclasses.replace(chosen, memory=cache.with_pool_as_before(chosen.memory))
    blueprint = Blueprint.from_choices(chosen, masked_sampling=tokenizer.definition() is not None)
    show = Show.where_wanted(progress, lines=config.telemetry.log_format == JSON)
    programs = _build_programs(
        config.model, config.mesh.tensor, blueprint, group, show, all_steps=all_steps
    )
    warn_of_overflow(
        programs.executor,
        model.config,
        chosen.memory.num_blocks,
        min(chosen.scheduling.limits.max_prefill_tokens, model.max_len),
        chosen.kernels.dtype.name,
    )
    engine = assemble(
        config,
        chosen,
        programs,
        tokenizer,
        progress=show,
        cache=cache,
        block_secret=secret,
    )
    if group is not None:
        share_fate(engine, group)
    compilation_cache.note(cache_dir)
    if programs.compiler is not None:
        programs.compiler.then(functools.partial(compilation_cache.note, cache_dir))
    return engine


def _build_programs(
    served: ServedModelConfig,
    tensor: int,
    blueprint: Blueprint,
    group: Group | None,
    show: Show,
    *,
    all_steps: bool,
) -> Programs:
    """As `build_programs`, on all hosts."""
    build = functools.partial(
        build_programs,
        served,
        tensor,
        blueprint,
        progress=show,
        bar=_compiling(show, kernels=blueprint.backend == "numba"),
        all_steps=all_steps or group is not None,
    )
    if group is None:
        return build()
    group.broadcast(Message(BUILD, blueprint.plain()))
    programs = build(barrier=group.barrier)
    group.barrier()
    group.hurry()
    return programs._replace(executor=LeaderExecutor(programs.executor, group))


def _check_device() -> None:
    """ConfigError if JAX finds no device, for example because JAX_PLATFORMS names one that is
    missing."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin is missing
        asked = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise ConfigError(f"{asked}: there is no such device: {first_line(error)}") from error


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
