"""The engine's first cost model, and rho: configured, kept from an earlier start, or measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from jaxserve.engine.device.executor import Executor
from jaxserve.engine.startup.choices.engine_choices import Choices
from jaxserve.engine.startup.choices.model_options import experts_of
from jaxserve.engine.startup.start_cache import StartCache
from jaxserve.engine.startup.step_profile import Progress, shapes, timed_model
from jaxserve.engine.startup.step_timer import StepTimer
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel


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
    cache: StartCache,
    chosen: Choices,
    executor: Executor,
    progress: Progress = iter,
) -> InitialCostModel:
    """The configured profile's model, else the one kept from an earlier start, else one measured
    now.

    Args:
        profile: `scheduler.profile`.
        cache: where models are kept.
        chosen: what was decided from the configuration.
        executor: warm, and not serving anything yet. Steps are timed on it.
        progress: wraps the list of steps to time.
    """
    if chosen.profile is not None:
        return _with_rho(chosen.profile.cost_model, chosen, f"profile {Path(profile).name}")
    served = chosen.kernels.model.config
    num_layers, experts = served.num_layers, experts_of(served)

    def measure() -> Coefficients:
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
        return timed_model(
            timer.seconds, wanted, timer.padding, num_layers, experts=experts, progress=progress
        ).coefficients

    coefficients, kept = cache.coefficients(measure)
    model = LinearCostModel(
        coefficients,
        num_layers,
        overlapped=executor.copies_beside,  # timed one way after the other
        num_experts=experts[0],
        experts_per_token=experts[1],
    )
    return _with_rho(model, chosen, "kept from an earlier start" if kept else "timed at the start")


def _with_rho(model: LinearCostModel, chosen: Choices, source: str) -> InitialCostModel:
    """The model with its rho. A configured rho changes the model accordingly."""
    if chosen.kernels.model.hidden_read is None:
        return InitialCostModel(model, None, source)
    k, layers, given = model.coefficients, model.num_layers, chosen.kernels.given_rho
    if given is None:
        return InitialCostModel(model, layers * (k.hidden_token - k.decode_kv), source)
    read = dataclasses.replace(k, hidden_token=max(0.0, k.decode_kv + given / layers))
    return InitialCostModel(dataclasses.replace(model, coefficients=read), given, source)
