"""What other threads tell the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.engine.device.sampling import RequestRow
from jaxserve.engine.output import Output
from jaxserve.engine.text.stop_conditions import ContinuationText
from jaxserve.sched.cost.reachability import Alone, SloProblem
from jaxserve.sched.request import Request


@dataclass(frozen=True)
class Submit:
    """A request to serve, with all that it is served with, made on its caller's thread. texts: of
    its continuations. row: for the device. alone: what an idle engine takes for it. problems: with
    its targets."""

    request: Request
    on_output: Callable[[Output], None]
    texts: Sequence[ContinuationText]
    row: RequestRow
    alone: Alone
    problems: tuple[SloProblem, ...] = ()


@dataclass(frozen=True)
class Cancel:
    """A request to end."""

    request_id: str
