"""What the host does around each step, and how long it takes (see docs/performance.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

# Seconds for which a thread keeps Python's interpreter to itself where another one wants it
# (`sys.getswitchinterval`): who submits requests in a row has as long before the engine wakes up.
BURST = 5e-3


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """How long the host's thread takes around a step, in seconds.

    Attributes:
        plan: The policy's plan.
        plan_row: More for each request that is there.
        launch: Building the batch and launching it.
        launch_row: More for each of its rows.
        admit: For each row that takes a slot for sampling.
        move: For each operation on the pool that is sent to the device.
        finish: Work once the tokens are there.
        finish_row: More for each row that samples one.
        idle: What a step takes longer on a device that had nothing to do.
        receive: From one step to the next plan.
        receive_row: More for each request taken in then.
        wake: From an arrival until a sleeping thread is ready to plan. It counts from the last of
            the arrivals that come within BURST of the first.

    Raises:
        ValueError: One is negative or infinite.
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
