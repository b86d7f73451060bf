"""The requests of one call for vectors. Only a few of them are in the engine at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxserve.engine.errors import QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.sched.request import Request
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.engine_requests import EngineRequests

MAX_INPUTS = 2048
"""Most prompts of one call; OpenAI accepts as many."""
MAX_INPUT_TOKENS = 300_000
"""Most tokens of all prompts of a call, likewise."""
AT_ONCE = 128
"""Most requests of a call in the engine at once; as many as a call for completions may have."""


class PooledCall:
    """Serves the requests of one call. At most as many run at once as the caller's key allows; the
    others wait here.

    Args:
        requests: the way to the engine.
        wanted: at least one request.
        record: the call's record; the requests count for its caller.

    Raises:
        RateLimited: If the caller may not have as many now.
    """

    def __init__(
        self, requests: EngineRequests, wanted: Sequence[Request], record: CallRecord
    ) -> None:
        self._requests, self._wanted, self._record = requests, wanted, record
        self._at_once = min(len(wanted), AT_ONCE, record.caller.most_requests or AT_ONCE)
        self._open, self._ended = 0, asyncio.Event()
        record.charge(wanted, at_once=self._at_once)

    async def outputs(self) -> list[Output]:
        """The last output of each request, with its pooled values, in order.

        Raises:
            QueueFull: If the engine's queue is full and has no request of this call.
            Exception: As `EngineRequests.open_stream` raises, or the error of a failed request. The
                other requests are then cancelled.
        """
        outputs: list[Output | None] = [None] * len(self._wanted)
        places = iter(range(len(self._wanted)))

        async def work() -> None:
            for place in places:
                outputs[place] = await self._serve(self._wanted[place])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_once):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [output for output in outputs if output is not None]

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
