"""Detects a stalled engine: one that has requests but finishes no step for a long time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from jaxserve.server.requests.engine_client import EngineClient

log = logging.getLogger(__name__)

_LOOKS = 8  # looks within `stall_s`


async def watch_for_stalls(
    engine: EngineClient,
    stall_s: float,
    tell: Callable[[str | None], Awaitable[None]],
    *,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Watches the engine until it is cancelled.

    Args:
        engine: the engine.
        stall_s: seconds without a finished step after which an engine with requests has stalled; 0
            never looks.
        tell: called with the reason when it has stalled, and with None once it goes on.
        clock: clock in seconds; None for the event loop's.
        sleep: waits for a number of seconds.
    """
    if not stall_s:
        return
    now = clock or asyncio.get_running_loop().time
    pause, waited, stalled = stall_s / _LOOKS, 0.0, False
    last, steps = now(), engine.stats().steps
    while True:
        await sleep(pause)
        # If this loop was held up, the engine may have been held up, too: do not count that time.
        passed, last = min(now() - last, 2 * pause), now()
        stats = engine.stats()
        if stats.steps != steps or not stats.running + stats.waiting:
            waited, steps = 0.0, stats.steps
            if stalled:
                stalled = False
                log.warning("the engine goes on")
                await tell(None)
            continue
        waited += passed
        if not stalled and waited >= stall_s:
            stalled = True
            count = stats.running + stats.waiting
            work = "1 request" if count == 1 else f"{count} requests"
            why = f"the engine has finished no step for {stall_s:g} s, with {work} in flight"
            log.error("%s", why)
            await tell(why)
