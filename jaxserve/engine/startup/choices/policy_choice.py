"""The first stage of a start: who is served, in which batches."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import ConfigError, SchedulerConfig
from jaxserve.engine.startup.choices.group_choice import choose_groups
from jaxserve.engine.startup.choices.pool_size import GIB, choose_block_size
from jaxserve.models.base import ModelConfig
from jaxserve.models.layer_groups import LayerGroups, groups_beside
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.scheduler import request_bytes

TABLES_GIB = 1  # of host memory, for what is kept of the requests


@dataclass(frozen=True)
class Scheduling:
    """Who is served, in which batches.

    Attributes:
        policy: the scheduling policy.
        name: of the policy, as configured.
        limits: of a batch.
        block_size: tokens of a block.
        groups: the groups of layers with block lists of their own; None if all share one.
    """

    policy: Policy
    name: str
    limits: Limits
    block_size: int
    groups: LayerGroups | None = None


def choose_policy(
    config: SchedulerConfig, block_size: int, max_len: int, model: ModelConfig
) -> Scheduling:
    """The policy, its limits, and the groups of layers that it has blocks for.

    Args:
        config: the scheduler's.
        block_size: `cache.block_size`.
        max_len: tokens of the longest request.
        model: the model.

    Raises:
        ConfigError: with one clear line.
    """
    policy, block_size = _policy(config), choose_block_size(block_size)
    limits = _limits(config, policy, max_len)
    sizes = {"max_len": max_len, "block_size": block_size}
    groups = choose_groups(model, policy, config.policy, **sizes)
    scheduling = Scheduling(policy, config.policy, limits, block_size, groups)
    _check_tables(config.max_queue, scheduling, max_len, model)
    return scheduling


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


def _limits(given: SchedulerConfig, policy: Policy, max_len: int) -> Limits:
    try:
        # Whole prompts know no P (InferMax Table 1).
        prefill = given.max_prefill_tokens if policy.chunked else given.max_batch_tokens
        limits = Limits(given.max_batch_tokens, prefill, given.max_rows)
    except ValueError as error:
        raise ConfigError(f"scheduler.{error}") from error
    if not policy.chunked and limits.max_batch_tokens < max_len:
        raise ConfigError(
            f"scheduler.policy={given.policy} computes a prompt in one step, so "
            f"scheduler.max_batch_tokens ({limits.max_batch_tokens}) must be at least the longest "
            f"request ({max_len} tokens); raise it, or lower engine.max_model_len"
        )
    return limits


def _check_tables(max_queue: int, scheduling: Scheduling, max_len: int, model: ModelConfig) -> None:
    """ConfigError if the host tables of so many requests would take too much memory."""
    groups, rows = scheduling.groups, scheduling.limits.max_rows
    if groups is not None:  # the pool is not known yet, but seldom has fewer bits
        groups = groups.for_pool(model, model.num_kv_heads, scheduling.block_size, "bfloat16")
    size = request_bytes(max_len, scheduling.block_size, groups_beside(groups))
    most = TABLES_GIB * GIB // size
    if max_queue + rows > most:
        raise ConfigError(
            f"scheduler.max_queue and scheduler.max_rows together must be at most {most}, as the "
            f"{size} bytes kept of each request take {TABLES_GIB} GiB then; got "
            f"{max_queue} + {rows}"
        )
