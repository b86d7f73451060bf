"""The requests of one call that wants vectors, few of which are with the engine at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxserve.engine.errors import QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.sched.request import Request
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.engine_requests import EngineRequests

MAX_INPUTS = 2048
"""Prompts of one call. OpenAI takes as many."""
MAX_INPUT_TOKENS = 300_000
"""Of all prompts of a call together, likewise."""
AT_ONCE = 128
"""Requests of a call that the engine has at once, as many as a call for completions has."""


class PooledCall:
    """Serves the requests of one call. The caller's key has at most as many running at once as it
    may; the others wait here.

    Args:
        requests: the way to the engine.
        wanted: at least one request.
        record: of the call, whose caller they count for.

    Raises:
        RateLimited: the caller may not have as many now.
    """

    def __init__(
        self, requests: EngineRequests, wanted: Sequence[Request], record: CallRecord
    ) -> None:
        self._requests, self._wanted, self._record = requests, wanted, record
        self._at_once = min(len(wanted), AT_ONCE, record.caller.most_requests or AT_ONCE)
        self._open, self._ended = 0, asyncio.Event()
        record.charge(wanted, at_once=self._at_once)

    async def outputs(self) -> list[Output]:
        """The last output of each, with what it has pooled, in their order.

        Raises:
            QueueFull: the engine's queue is full, and this call has nothing in it.
            Exception: what `EngineRequests.open_stream` raises, or what a request fails with. The
                others are cancelled then.
        """
        found: list[Output | None] = [None] * len(self._wanted)
        places = iter(range(len(self._wanted)))

        async def work() -> None:
            for place in places:
                found[place] = await self._serve(self._wanted[place])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_once):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [output for output in found if output is not None]

    async def _serve(self, request: Request) -> Output:
        while True:
            self._ended.clear()
            try:
                stream = self._requests.open_stream(request, record=self._record)
                break
            except QueueFull:
                if not self._open:
                    raise
            await self._ended.wait()
        self._open += 1
        try:
            while (delta := await stream.next()) is not None:
                last = delta.last
            assert last is not None
            if last.finish_reason is FinishReason.CANCELLED:
                raise self._requests.cancelled_error()
            return last
        finally:
            self._open -= 1
            self._ended.set()
            self._requests.end_stream(stream)
