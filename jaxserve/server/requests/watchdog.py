"""Detects an engine that has stalled: it has requests, and finishes no step for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from jaxserve.server.requests.engine_client import EngineClient

log = logging.getLogger(__name__)

_LOOKS = 8  # in the time after which an engine has stalled


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
        stall_s: seconds without a finished step, though there are requests, after which it has
            stalled; 0 never looks.
        tell: called with the reason when it has stalled, and with None once it goes on.
        clock: seconds; None for the event loop's.
        sleep: waits for so many seconds.
    """
    if not stall_s:
        return
    now = clock or asyncio.get_running_loop().time
    each, waited, stalled = stall_s / _LOOKS, 0.0, False
    last, steps = now(), engine.stats().steps
    while True:
        await sleep(each)
        # Of a time in which we ourselves were held up, the engine may have been, too.
        passed, last = min(now() - last, 2 * each), now()
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
