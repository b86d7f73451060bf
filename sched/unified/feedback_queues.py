"""The settings of multi-level feedback queues, which FastServe and Autellix share."""

from __future__ import annotations

import math
import sys


def check_queues(most: int, queues: int, quantum: float, ratio: float, patience: float) -> None:
    """Raises ValueError for settings out of range.

    Args:
        most: Most queues.
        queues: Number of queues.
        quantum: Service in the first queue, more than 0.
        ratio: From one quantum to the next, more than 1.
        patience: After how much waiting a request is in the first queue, more than 0.
    """
    if not 1 <= queues <= most:
        raise ValueError(f"queues must be 1 to {most}, got {queues}")
    for name, value, least in (
        ("quantum", quantum, 0.0),
        ("ratio", ratio, 1.0),
        ("patience", patience, 0.0),
    ):
        if not value > least:
            raise ValueError(f"{name} must be more than {least:g}, got {value}")
    steps = queues - 1
    if math.log(quantum) + steps * math.log(ratio) > math.log(sys.float_info.max):
        raise ValueError(f"quantum x ratio^{steps}, of the last queue, is not a finite number")
