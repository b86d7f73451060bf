"""The requests of one call, submitted together."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.sched.request import Request
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.engine_requests import EngineRequests
from jaxserve.server.requests.output_streams import Stream


class CallStreams:
    """Submits all requests of a call, or none; `end` it, however the call ends.

    Args:
        requests: the way to the engine.
        wanted: one a prompt.
        record: of the call, whose caller they count for.

    Raises:
        RateLimited: the caller may not have as many now.
        TooManyRequests: the caller may never have as many.
        Exception: what `EngineRequests.open_stream` raises.
    """

    def __init__(
        self, requests: EngineRequests, wanted: Sequence[Request], record: CallRecord
    ) -> None:
        self._requests = requests
        self.wanted, self.record = wanted, record
        record.charge(wanted)
        self.streams: list[Stream] = []
        try:
            for request in wanted:
                self.streams.append(requests.open_stream(request, record=record))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Whatever is unfinished is cancelled."""
        for stream in self.streams:
            self._requests.end_stream(stream)
