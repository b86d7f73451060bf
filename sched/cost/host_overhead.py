"""The host's work around each step, and how long it takes (see docs/performance.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

# Seconds for which a thread keeps Python's interpreter while another one waits for it
# (`sys.getswitchinterval`): a client that submits requests in a row has this long before the engine
# wakes up.
BURST = 5e-3


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds that the host's thread takes around a step.

    Attributes:
        plan: The policy's plan.
        plan_row: Added for each request in the table.
        launch: Building the batch and launching it.
        launch_row: Added for each of its rows.
        admit: For each row that takes a slot for sampling.
        move: For each pool operation sent to the device.
        finish: Work after the tokens have arrived.
        finish_row: Added for each row that samples a token.
        idle: Added to a step on a device that was idle.
        receive: From one step to the next plan.
        receive_row: Added for each request received in that time.
        wake: From an arrival until a sleeping thread is ready to plan, counted from the last of the
        arrivals within BURST of the first.

    Raises:
        ValueError: A field is negative or infinite.
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
        """The fields by name, as in a profile's file."""
        return asdict(self)
