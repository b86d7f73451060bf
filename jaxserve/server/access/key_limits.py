"""The limits of one API key, counted over all frontends.

`concurrency` bounds two counts: open calls of any kind (including reads of files and streams of the
console), and requests in the engine, one for each prompt and continuation.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from jaxserve.server.access.key_file import ApiKey

_RATE_WINDOW_S = 60.0
_AGAIN_S = 1.0  # Retry-After of a concurrency limit, a guess


class RateLimited(RuntimeError):
    """The key has reached a limit for now. retry_s: when to try again, in seconds from now."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class TooManyRequests(ValueError):
    """One call asks for more at once than its key may ever have."""


class Usage:
    """Usage of one key; used on the event loop's thread. The rate limit is a token bucket: a call
    takes one token, the bucket holds `rate` tokens, and `rate` tokens a minute come back. clock:
    seconds.

    calls, requests: numbers of open calls, and of requests in the engine.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent, self._since = 0.0, clock()  # tokens missing from the bucket, and since when
        self.calls = self.requests = 0

    def enter(self, key: ApiKey, *, rated: bool = True) -> None:
        """Counts a call. rated: whether it also counts against the rate. Raises RateLimited, and
        then does not count the call."""
        if key.concurrency and self.calls >= key.concurrency:
            raise _full(key, f"{self.calls} calls are open")
        if key.rate and rated:
            self._spend(key)
        self.calls += 1

    def leave(self) -> None:
        """Counts a call that has ended."""
        self.calls -= 1

    def take_requests(self, key: ApiKey, count: int) -> None:
        """Counts `count` requests of a call. Raises RateLimited, or TooManyRequests if they will
        never fit, and then does not count them."""
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
        # The limit may have been lowered meanwhile: nobody waits for longer than the window.
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
