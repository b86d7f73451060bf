"""Whether layers with a sliding window give blocks behind it back, and what layers with a state
allow."""

from __future__ import annotations

import logging

from jaxserve.config import ConfigError
from jaxserve.models.base import ModelConfig
from jaxserve.models.layer_groups import LayerGroups, layer_groups
from jaxserve.sched.cache.block_sizes import blocks_a_plane, blocks_for
from jaxserve.sched.cache.groups.windows import WindowGroups
from jaxserve.sched.policy import Policy

log = logging.getLogger(__name__)


def choose_groups(
    model: ModelConfig, policy: Policy, name: str, *, max_len: int, block_size: int
) -> LayerGroups | None:
    """The groups of layers with block lists of their own; None if all layers share one, so that
    blocks behind windows are kept. Logs one line if any layer has a window or a state.

    Args:
        model: the model.
        policy: the scheduling policy.
        name: its name, for the log.
        max_len: tokens of the longest request.
        block_size: tokens of a block.

    Raises:
        ConfigError: the policy does what states do not allow.
    """
    if model.delta is not None:
        return _with_states(model, policy, name)
    windows = [kind.sliding_window for kind in model.layer_kinds]
    shorter = [each for each in windows if each is not None and each < max_len]
    if not shorter or not model.causal:
        return None
    groups = layer_groups(model)
    told = f"{len(shorter)} of {len(windows)} layers have a window"
    if groups is None:
        log.info("%s; blocks behind it are kept: no layer is without", told)
        return None
    if policy.two_sided:
        log.info("%s; blocks behind it are kept: scheduler.policy=%s lends blocks", told, name)
        return None
    windows_there = groups.beside
    assert isinstance(windows_there, WindowGroups)
    blocks, there = int(blocks_for(max_len, block_size)), int(blocks_a_plane(max_len, block_size))
    there -= int(windows_there.behind(max_len - 1, block_size))  # while it decodes
    own, plain = groups.slots * (blocks + windows_there.planes * there), len(windows) * blocks
    if own >= plain:
        log.info("%s; blocks behind it are kept: %d tokens save nothing", told, max_len)
        return None
    log.info(
        "%s, and give blocks behind it back: a request of %s tokens keeps %.0f%% of what it would "
        "otherwise",
        told,
        f"{max_len:,}",
        100 * own / plain,
    )
    return groups


def _with_states(model: ModelConfig, policy: Policy, name: str) -> LayerGroups:
    """The groups of a model with states."""
    if policy.two_sided:
        raise ConfigError(
            f"scheduler.policy={name} lends blocks, which a model whose layers keep a state "
            "(layer_types in its config.json) does not allow; take another policy"
        )
    groups = layer_groups(model)
    assert groups is not None
    log.info(
        "%d of %d layers keep a state of fixed size in place of K and V",
        sum(kind.state for kind in model.layer_kinds),
        model.num_layers,
    )
    return groups
