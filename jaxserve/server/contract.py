"""What the server needs of an engine; `jaxserve.engine.engine.Engine` is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jaxserve.engine.output import Output
from jaxserve.engine.stats import EngineInfo, EngineStats, Observer
from jaxserve.sched.request import Request


class ServedEngine(Protocol):
    """Every method may be called from any thread."""

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Raises InvalidRequest, QueueFull, EngineStopped."""

    def cancel(self, request_id: str) -> None:
        """Idempotent; a final Output with CANCELLED follows for each unfinished continuation."""

    def encode(self, text: str) -> list[int]: ...

    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats: ...

    def drain(self, grace_s: float) -> bool:
        """Stops admission, blocks until all is finished or the grace (seconds) has passed, then
        cancels the rest; True if nothing had to be cancelled."""

    def stop(self) -> None: ...

    def add_failure_listener(self, listener: Callable[[BaseException], None]) -> None: ...

    def add_observer(self, observer: Observer) -> None: ...
