"""What is decided about hidden caches at the start: whether there are any, how they are read, and
whether rho is given."""

from __future__ import annotations

import logging
import math

from jaxserve.engine.errors import ConfigError
from jaxserve.engine.hidden import ABSORBED, PROJECTED, READS
from jaxserve.models.base import ModelConfig
from jaxserve.sched.policy import Policy

log = logging.getLogger(__name__)

AUTO = "auto"


def why_not(config: ModelConfig) -> str | None:
    """Why the model has no hidden caches, or None: a token's hidden vector has to be smaller than
    its K and V, and of the size of one of them, which is what blocks hold."""
    kv_width = config.num_kv_heads * config.head_dim
    if config.d_model >= 2 * kv_width:
        return (
            f"a hidden vector has {config.d_model} elements, no fewer than the {2 * kv_width} of K "
            f"and V, which groups of {config.num_heads // config.num_kv_heads} heads share"
        )
    if config.num_kv_heads != config.num_heads or config.d_model != kv_width:
        return (
            f"a hidden vector has {config.d_model} elements, and {config.num_kv_heads} KV heads of "
            f"{config.head_dim} for {config.num_heads} heads make up blocks of another size"
        )
    return None


def choose_read(wanted: str, policy_name: str, policy: Policy, config: ModelConfig) -> str | None:
    """How hidden caches are read, `hidden.READS`, or None: there are none, since the policy plans
    none, or since the model gains nothing by them, which is said once.

    ConfigError if `wanted` is not auto and cannot be had.
    """
    field = f"cache.hidden_read={wanted}"
    if wanted not in (AUTO, *READS):
        raise ConfigError(
            f"cache.hidden_read must be auto or one of {', '.join(READS)}, got {wanted!r}"
        )
    if not policy.hybrid_cache:
        if wanted != AUTO:
            raise ConfigError(f"{field}: scheduler.policy={policy_name} keeps KV caches only")
        return None
    reason = why_not(config)
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
    return PROJECTED if rotary else ABSORBED


def given_rho(text: str, read: str | None) -> float | None:
    """The number that cache.rho says, None for auto. ConfigError for anything else, and for a
    number where there are no hidden caches to read (read is None)."""
    if text == AUTO:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"cache.rho must be auto or a number of seconds, got {text!r}")
    if read is None:
        raise ConfigError(f"cache.rho={text}: there are no hidden caches here, only KV")
    return value
