"""What the parts of the page are made with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """What the command line says.

    Attributes:
        trace: Path of a trace beside the drawn workloads; "" for none.
        rate: Of the trace, requests/s; None for its own.
        num_requests: The first of the trace; None for all.
        quick: Whether the sizes are toy sizes.
        jobs: Processes.
    """

    trace: str = ""
    rate: float | None = None
    num_requests: int | None = None
    quick: bool = False
    jobs: int = 1
