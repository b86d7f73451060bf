"""Simulations with their options by name, as tests vary them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.simulator import simulator
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, FleetOptions, RunOptions, TrafficOptions

RECORDS = {
    "engine": EngineOptions,
    "fleet": FleetOptions,
    "traffic": TrafficOptions,
    "run": RunOptions,
}


def grouped(**named: Any) -> dict[str, Any]:
    """The arguments of the simulator's `simulate` that have these fields."""
    found: dict[str, Any] = {}
    for name, record in RECORDS.items():
        own = {field.name for field in dataclasses.fields(record)} & named.keys()
        found[name] = record(**{field: named.pop(field) for field in own})
    assert not named, f"no options of simulations: {', '.join(named)}"
    return found


def simulate(policy: Any, workload: Any, place: Any, **named: Any) -> SimulationResult:
    """The simulator's, with the options that have these fields."""
    return simulator.simulate(policy, workload, place, **grouped(**named))
