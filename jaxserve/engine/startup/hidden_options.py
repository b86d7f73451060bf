"""What is decided about hidden caches at the start: whether there are any, how they are read, and
whether rho is given."""

from __future__ import annotations

import logging

from jaxserve.config import AUTO, ConfigError
from jaxserve.models.base import ModelConfig
from jaxserve.sched.cache.cache_kinds import (
    ABSORBED,
    default_hidden_read,
    why_no_hidden_caches,
)
from jaxserve.sched.policy import Policy

log = logging.getLogger(__name__)


def choose_read(wanted: str, policy_name: str, policy: Policy, config: ModelConfig) -> str | None:
    """How hidden caches are read, `HIDDEN_READS`, or None: there are none, since the policy plans
    none, or since the model gains nothing by them, which is said once.

    ConfigError if `wanted` is not auto and cannot be had.
    """
    field = f"cache.hidden_read={wanted}"
    if not policy.hybrid_cache:
        if wanted != AUTO:
            raise ConfigError(f"{field}: scheduler.policy={policy_name} keeps KV caches only")
        return None
    reason = why_no_hidden_caches(
        config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    )
    if reason is not None:
        if wanted != AUTO:
            raise ConfigError(f"{field}: {reason}")
        log.warning("no hidden caches, all are KV: %s", reason)
        return None
    rotary = config.rope is not None
    if wanted == ABSORBED and rotary:
        raise ConfigError(
            f"{field}: the model rotates its keys by position, so Wk cannot be folded into the "
            "query; use projected"
        )
    if wanted != AUTO:
        return wanted
    return default_hidden_read(rotary=rotary)


def given_rho(text: str, read: str | None) -> float | None:
    """The number that cache.rho says, None for auto. ConfigError for a number where there are no
    hidden caches to read (read is None)."""
    if text == AUTO:
        return None
    if read is None:
        raise ConfigError(f"cache.rho={text}: there are no hidden caches here, only KV")
    return float(text)
