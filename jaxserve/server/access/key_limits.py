"""What the calls of one key may take, whichever frontend they come through.

`concurrency` bounds two counts: calls that are open, whatever they do (files that are read, streams
of the console), and requests that calls have with the engine, one a prompt and continuation.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from jaxserve.server.access.key_file import ApiKey

_RATE_WINDOW_S = 60.0
_AGAIN_S = 1.0  # when a place may be free, at the earliest; nobody knows


class RateLimited(RuntimeError):
    """The key may not now. retry_s: when it may, in seconds from now."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class TooManyRequests(ValueError):
    """One call asks for more at once than its key may ever have."""


class Usage:
    """Of one key, on the event loop's thread. The rate is a token bucket: one token per call, as
    many as the key may call a minute at most, and so many a minute come back. clock: seconds.

    calls, requests: how many it has open, and with the engine.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent, self._since = 0.0, clock()  # tokens that are not in the bucket, and then
        self.calls = self.requests = 0

    def enter(self, key: ApiKey, *, rated: bool = True) -> None:
        """One more call. rated: it counts against the rate, too. Raises RateLimited; then it counts
        nowhere."""
        if key.concurrency and self.calls >= key.concurrency:
            raise _full(key, f"{self.calls} calls are open")
        if key.rate and rated:
            self._spend(key)
        self.calls += 1

    def leave(self) -> None:
        """One has ended."""
        self.calls -= 1

    def take_requests(self, key: ApiKey, count: int) -> None:
        """Counts `count` requests of a call. Raises RateLimited, or TooManyRequests if they will
        never fit; then they are not counted."""
        limit = key.concurrency
        if limit and count > limit:
            asked = f"the call asks for {count} requests (one a prompt and continuation)"
            raise TooManyRequests(f"{asked}; key {key.name} may have {limit} at once (concurrency)")
        if limit and self.requests + count > limit:
            raise _full(key, f"{self.requests} requests run, and the call asks for {count}")
        self.requests += count

    def give_back_requests(self, count: int) -> None:
        """Stops counting `count` requests, which have ended."""
        self.requests -= count

    def _spend(self, key: ApiKey) -> None:
        now, a_token_s = self._clock(), _RATE_WINDOW_S / key.rate
        self._spent = max(0.0, self._spent - (now - self._since) / a_token_s)
        self._since = now
        # A limit that was lowered meanwhile: nobody waits for longer than the window.
        self._spent = min(self._spent, float(key.rate))
        short = self._spent + 1 - key.rate
        if short > 1e-9:
            retry_s = short * a_token_s
            problem = f"key {key.name}: {key.rate} calls a minute are what it may make"
            raise RateLimited(f"{problem}; the next one in {retry_s:.1f} s", retry_s)
        self._spent += 1


def _full(key: ApiKey, state: str) -> RateLimited:
    problem = f"key {key.name}: {state}; it may have {key.concurrency} at once (concurrency)"
    return RateLimited(f"{problem}; try again later", _AGAIN_S * random.uniform(1, 2))
