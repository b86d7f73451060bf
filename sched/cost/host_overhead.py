"""What the host does around each step, and how long it takes (see docs/performance.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

# Seconds for which a thread keeps Python's interpreter to itself where another one wants it
# (`sys.getswitchinterval`): who submits requests in a row has as long before the engine wakes up.
BURST = 5e-3


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds of the host's thread around a step, and how they grow.

    plan, plan_row: the policy's plan, and for each request there is. launch, launch_row: the batch
    and its launch, and for each of its rows. admit: for each row that takes a slot for sampling.
    move: for each operation on the pool that is sent to the device. finish, finish_row: once the
    tokens are there, and for each row that samples one. idle: what a step takes longer on a device
    that had nothing to do. receive, receive_row: from one step to the next plan, and for each
    request taken in then. wake: from an arrival until a thread that slept is as far as one that did
    not; where others arrive meanwhile, within BURST of the first, from the last of them. ValueError
    for a negative or infinite one.
    """

    plan: float = 0.0
    plan_row: float = 0.0
    launch: float = 0.0
    launch_row: float = 0.0
    admit: float = 0.0
    move: float = 0.0
    finish: float = 0.0
    finish_row: float = 0.0
    idle: float = 0.0
    receive: float = 0.0
    receive_row: float = 0.0
    wake: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"host.{field.name} must be 0 or more seconds, got {value}")

    def as_dict(self) -> dict[str, float]:
        """By name, as a profile's file has them."""
        return asdict(self)
