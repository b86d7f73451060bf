"""The engine over a warm executor."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable

import jax

from jaxserve import __version__
from jaxserve.config import Config
from jaxserve.engine.drafts.drafting import DRAFTERS
from jaxserve.engine.engine import Engine
from jaxserve.engine.recorder import MIB, Recorder
from jaxserve.engine.startup.adapters import adapter_slots, load_adapters
from jaxserve.engine.startup.blueprint import Programs
from jaxserve.engine.startup.choices.engine_choices import Choices
from jaxserve.engine.startup.choices.kernel_choice import Kernels
from jaxserve.engine.startup.initial_cost_model import InitialCostModel, find_initial_cost_model
from jaxserve.engine.startup.start_cache import NOWHERE, StartCache
from jaxserve.engine.stats import EngineInfo
from jaxserve.engine.text.detokenizer import Tokenizer
from jaxserve.engine.text.grammar_process import GrammarLimits
from jaxserve.models.layer_groups import groups_beside
from jaxserve.progress import Show, shown
from jaxserve.sched.cache.cache_kinds import PROJECTED
from jaxserve.sched.cache.groups.states import StateGroups
from jaxserve.sched.cache.groups.windows import WindowGroups
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.recording import Header
from jaxserve.sched.registry import full_name, make_retention
from jaxserve.sched.scheduler import Scheduler


def assemble(
    config: Config,
    chosen: Choices,
    programs: Programs,
    tokenizer: Tokenizer,
    *,
    progress: Show = Show.NOTHING,
    cache: StartCache = NOWHERE,
    clock: Callable[[], float] = time.monotonic,
    block_secret: bytes | None = None,
) -> Engine:
    """The engine over a warm executor, see `build_engine`.

    Args:
        config: the configuration.
        chosen: what was decided from it.
        programs: what runs the steps.
        tokenizer: the model's.
        progress: shows the timing of the first cost model.
        cache: where that model is kept for the next start.
        clock: seconds, for the engine and its recorder.
        block_secret: as in `build_engine`.
    """
    executor, kernels, memory = programs.executor, chosen.kernels, chosen.memory
    limits = chosen.scheduling.limits
    initial = find_initial_cost_model(
        config.scheduler.profile,
        cache,
        chosen,
        executor,
        lambda work: shown(progress, "timing", "step", work=work),
    )
    cost_model = OnlineCostModel(initial.model)
    scheduler = Scheduler(
        chosen.scheduling.policy,
        limits,
        num_blocks=memory.num_blocks,
        block_size=chosen.scheduling.block_size,
        max_model_len=kernels.model.max_len,
        capacity=config.scheduler.max_queue + limits.max_rows,
        cost_model=cost_model,
        padding=executor.buckets.padding,
        host_slots=memory.host_slots,
        prefix_caching=config.cache.prefix_caching,
        retention=make_retention(config.cache.retention),
        groups=groups_beside(kernels.model.groups),
        seed=config.scheduler.seed,
        rho=initial.rho,
        projects=kernels.model.hidden_read == PROJECTED,
        infer_programs=config.scheduler.infer_programs,
        program_silence=config.scheduler.program_silence_s,
    )
    info = _info(config, chosen, scheduler, initial, programs)
    engine = Engine(
        executor,
        scheduler,
        tokenizer,
        info,
        cost_model=cost_model,
        eos_ids=kernels.model.config.eos_token_ids,
        overlap=config.engine.overlap,
        forbid_compile=config.engine.forbid_compile,
        share_between_keys=config.cache.share_between_keys,
        block_secret=block_secret,
        adapters=adapter_slots(kernels, info.model),
        compiler=programs.compiler,
        grammar_limits=GrammarLimits(
            config.engine.grammar_compile_s,
            config.engine.grammar_mib,
            config.engine.grammar_mask_ms,
        ),
        clock=clock,
    )
    load_adapters(config.lora.adapters, engine.load_adapter)
    if config.engine.record:
        header = _header(config, chosen, info, initial)
        limit = config.engine.record_mib * MIB
        engine.add_observer(Recorder(config.engine.record, header, limit, clock))
    return engine


def _info(
    config: Config,
    chosen: Choices,
    scheduler: Scheduler,
    initial: InitialCostModel,
    programs: Programs,
) -> EngineInfo:
    kernels, step_model = chosen.kernels, chosen.kernels.model
    family, model = step_model.family, step_model.config
    return EngineInfo(
        model=config.model.served_name,
        family=family.name,
        num_params=family.num_params(model),
        num_layers=model.num_layers,
        dtype=_dtype_name(kernels),
        cache_dtype=kernels.cache_dtype.name,
        vocab_size=model.vocab_size,
        max_model_len=step_model.max_len,
        policy=full_name(config.scheduler.policy, config.scheduler.params),
        num_blocks=scheduler.pool.num_blocks,
        block_size=scheduler.pool.block_size,
        pool_tokens=scheduler.pool.pool_tokens,
        pool_bytes=programs.pool_bytes,
        device=jax.devices()[0].device_kind,
        mesh_tensor=step_model.shards,
        attention_backend=step_model.backend,
        cost_model=initial.source,
        hidden_read=step_model.hidden_read,
        rho=scheduler.view.rho,
        prefix_caching=scheduler.cache is not None,
        retention=config.cache.retention,
        speculates=chosen.scheduling.policy.speculates,
        d_model=model.d_model,
        pooling=chosen.pooling,
        causal=model.causal,
        not_deterministic=kernels.not_deterministic,
        sampling_defaults=chosen.sampling_defaults,
        system_fingerprint=programs.fingerprint,
    )


def _dtype_name(kernels: Kernels) -> str:
    quantization = kernels.model.config.quantization
    name = kernels.dtype.name
    return name if quantization is None else f"{name}, weights {quantization.scheme.kind}"


def _header(config: Config, chosen: Choices, info: EngineInfo, initial: InitialCostModel) -> Header:
    groups = groups_beside(chosen.kernels.model.groups)
    return Header(
        began=datetime.datetime.now(datetime.UTC).isoformat(),
        versions={"jaxserve": __version__, "jax": jax.__version__},
        model=info.model,
        dtype=info.dtype,
        device=info.device,
        policy=info.policy,
        seed=config.scheduler.seed,
        overlap=config.engine.overlap,
        **dataclasses.asdict(chosen.scheduling.limits),
        max_queue=config.scheduler.max_queue,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        host_slots=chosen.memory.host_slots,
        hidden_read=info.hidden_read,
        rho=info.rho,
        cost_model=initial.model,
        padding=chosen.memory.buckets.padding,
        prefix_caching=config.cache.prefix_caching,
        retention=config.cache.retention,
        drafters=DRAFTERS if chosen.scheduling.policy.speculates else (),
        groups=groups if isinstance(groups, WindowGroups) else None,
        states=groups if isinstance(groups, StateGroups) else None,
    )
