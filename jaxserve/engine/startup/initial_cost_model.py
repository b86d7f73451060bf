"""The engine's first cost model, and rho: configured, kept from an earlier start, or measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from jaxserve.engine.device.executor import Executor
from jaxserve.engine.startup import cost_model_cache
from jaxserve.engine.startup.choices.engine_choices import Choices
from jaxserve.engine.startup.choices.model_options import experts_of
from jaxserve.engine.startup.step_profile import Progress, shapes, timed_model
from jaxserve.engine.startup.step_timer import StepTimer
from jaxserve.sched.cost.cost_model import LinearCostModel


@dataclass(frozen=True)
class InitialCostModel:
    """The cost model before any step was served.

    Attributes:
        model: predicts steps.
        rho: see `View`; None without hidden caches.
        source: where the model came from, to show to users.
    """

    model: LinearCostModel
    rho: float | None
    source: str


def find_initial_cost_model(
    profile: str,
    cache_dir: str,
    chosen: Choices,
    executor: Executor,
    progress: Progress = iter,
) -> InitialCostModel:
    """The configured profile's model, else the one kept from an earlier start, else one measured
    now.

    Args:
        profile: `scheduler.profile`.
        cache_dir: where models are kept; "" for nowhere.
        chosen: what was decided from the configuration.
        executor: warm, and not serving anything yet. Steps are timed on it.
        progress: wraps the list of steps to time.
    """
    if chosen.profile is not None:
        return _with_rho(chosen.profile.cost_model, chosen, f"profile {Path(profile).name}")
    key = cost_model_cache.key_of(chosen)
    served = chosen.kernels.model.config
    num_layers, experts = served.num_layers, experts_of(served)
    known = cost_model_cache.find(cache_dir, key)
    beside = executor.copies_beside
    if known is not None:
        model = LinearCostModel(
            known,
            num_layers,
            overlapped=beside,
            num_experts=experts[0],
            experts_per_token=experts[1],
        )
        return _with_rho(model, chosen, "kept from an earlier start")
    timer = StepTimer(executor, chosen.memory.num_blocks, served.vocab_size)
    limits = chosen.scheduling.limits
    wanted = shapes(
        timer.padding,
        max_rows=limits.max_rows,
        max_prefill=limits.max_prefill_tokens,
        max_len=chosen.kernels.model.max_len,
        hidden=chosen.kernels.model.hidden_read is not None,
        swaps=chosen.moves_cache,
    )
    model = timed_model(
        timer.seconds, wanted, timer.padding, num_layers, experts=experts, progress=progress
    )
    model = dataclasses.replace(model, overlapped=beside)  # timed one way after the other
    cost_model_cache.keep(cache_dir, key, model.coefficients)
    return _with_rho(model, chosen, "timed at the start")


def _with_rho(model: LinearCostModel, chosen: Choices, source: str) -> InitialCostModel:
    """The model with its rho. A configured rho changes the model accordingly."""
    if chosen.kernels.model.hidden_read is None:
        return InitialCostModel(model, None, source)
    k, layers, given = model.coefficients, model.num_layers, chosen.kernels.given_rho
    if given is None:
        return InitialCostModel(model, layers * (k.hidden_token - k.decode_kv), source)
    read = dataclasses.replace(k, hidden_token=max(0.0, k.decode_kv + given / layers))
    return InitialCostModel(dataclasses.replace(model, coefficients=read), given, source)
