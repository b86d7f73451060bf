"""Options of simulations by name, as tests vary them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.simulator.settings import EngineOptions, FleetOptions, RunOptions, TrafficOptions

RECORDS = {
    "engine": EngineOptions,
    "fleet": FleetOptions,
    "traffic": TrafficOptions,
    "run": RunOptions,
}


def grouped(**named: Any) -> dict[str, Any]:
    """The arguments of `simulate` that have these fields."""
    found: dict[str, Any] = {}
    for name, record in RECORDS.items():
        own = {field.name for field in dataclasses.fields(record)} & named.keys()
        found[name] = record(**{field: named.pop(field) for field in own})
    assert not named, f"no options of simulations: {', '.join(named)}"
    return found
