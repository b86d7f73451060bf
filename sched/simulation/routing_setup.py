"""What is before simulated replicas, checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.sched.policy import Policy
from jaxserve.sched.routing.snapshot import Prices
from jaxserve.sched.routing.take_snapshot import constant_fields
from jaxserve.sched.simulation.settings import Routing, Setting


def routed(setting: Setting, policy: Policy, routing: str | Routing) -> Setting:
    """The setting with that before its replicas; a name stands for one router that sees them as
    they are. ValueError says what is wrong."""
    if isinstance(routing, str):
        routing = Routing(routing)
    if routing.routers > setting.replicas:
        raise ValueError(
            f"routers must be at most as many as replicas, {setting.replicas}, got "
            f"{routing.routers}"
        )
    last = max((fault.replica for fault in routing.faults), default=0)
    if last >= setting.replicas:
        raise ValueError(f"there is no replica {last} that could have a fault")
    known: dict[str, Any] = {}
    if routing.looks:
        prices = Prices.from_cost_model(setting.cost_model)
        known = constant_fields(
            prices, policy, setting.limits, setting.num_blocks, setting.block_size
        )
    return replace(setting, routing=routing, fixed=known)
