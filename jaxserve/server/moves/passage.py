"""One call at one replica, whose answer another may have begun, and yet another may go on with."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from pydantic import ValidationError

from jaxserve.engine.output import TokenLogprobs
from jaxserve.sched.request import Generated, Request
from jaxserve.server.moves.resume_point import (
    KEY_BYTES,
    MOST_VALUES,
    Begun,
    Cache,
    Handle,
    Mark,
    Passed,
    ResumePoint,
    values,
)

NEXT_S = 0.1
"""Seconds that an answer may wait for its next token before it leaves."""
PASSAGE = "jaxserve.passage"
"""Key of a call's scope state, and attribute of its gRPC context."""


class _Delta(Protocol):
    """As much of an `output_streams.Delta` as is needed here."""

    token_ids: list[int]
    times: list[float]
    expected_missed: bool
    replayed: bool

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """One entry per token, if asked for."""


class _Call(Protocol):
    """As much of a `CallRecord` as is needed here."""

    outcome: Any
    reason: str
    requests: Sequence[Request]


class CannotResume(ValueError):
    """A record is not one from which this replica can resume an answer; the message says why."""


class Passage:
    """One call at one replica.

    Args:
        record: From `ResumePoint.record`, of the version of whoever sent it.
        fingerprint: The replica's system fingerprint.
        replica: Its name.

    Attributes:
        point: The record.
        began: When the call came, in seconds of time.monotonic().
        begun: Whether this replica's answer can be resumed.
        left: Whether it is left to other replicas, and nothing more is said here.
        settled: Set once it has left after `leave`, or stays.
        tokens: How many the client has been told.
        silent: Whether what the frontend says is left out, since the client has it.
        tell: Takes the marks.
        call: The frontend's record of the call, once there is one.
        pages: What came from the replica before, as `Request.pages`.
        sent: Keys of what this one has offered to others.

    Raises:
        CannotResume: Another replica has to do it.
    """

    def __init__(self, record: bytes, fingerprint: str, replica: str) -> None:
        try:
            self.point = ResumePoint.read(record)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise CannotResume(f"the record of the call: {where}: {first['msg']}") from None
        except ValueError as error:
            raise CannotResume(f"the record of the call: {error}") from None
        asked = self.point.fingerprint
        if asked not in ("", fingerprint):
            raise CannotResume(f"the answer was begun by {asked}; this replica is {fingerprint}")
        self.begun, self.left, self.silent = False, False, bool(self.point.outputs)
        self.tokens = sum(len(one.tokens) for one in self.point.outputs)
        self.tell: Callable[[Mark], None] = lambda _: None
        self.call: _Call | None = None
        # The clock of the host that says when it came may be ahead.
        self.began = time.monotonic() - max(0.0, time.time() - self.point.arrived)
        self._begun = Begun(fingerprint, replica)
        self.pages: Mapping[bytes, np.ndarray] = {}
        self._leaving: Cache | None = None
        self.settled, self.sent = asyncio.Event(), frozenset[bytes]()
        self._outputs = {one.number: one for one in self.point.outputs}
        self._values = sum(map(values, self.point.outputs))

    def drawn(self, what: str) -> bytes:
        """See `CallRecord.drawn`."""
        key = bytes.fromhex(self.point.key)
        return hashlib.blake2b(what.encode(), digest_size=KEY_BYTES, key=key).digest()

    def begin(self, wanted: Sequence[Request]) -> list[Request]:
        """The call's requests with what other replicas have generated of them."""
        if any(each.sampling.prompt_logprobs is not None or each.pooling for each in wanted):
            return list(wanted)
        self.begun = True
        self.tell(self._begun)
        if not self.silent:
            return list(wanted)
        n, moved = wanted[0].sampling.n, tuple(self.point.moved)
        pages, self.pages = self.pages, {}
        made = []
        for place, request in enumerate(wanted):
            found = tuple(self._generated(place * n + index) for index in range(n))
            made.append(dataclasses.replace(request, generated=found, moved=moved, pages=pages))
        return made

    def _generated(self, number: int) -> Generated:
        one = self._outputs.get(number)
        if one is None:
            return Generated()
        logprobs = tuple((logprob, tuple(top)) for logprob, top in one.logprobs)
        now = time.monotonic()  # clocks of hosts differ: no token came later, nor before another
        times = accumulate((min(self.began + after, now) for after in one.times), max)
        return Generated(tuple(one.tokens), tuple(times), logprobs, one.given_up)

    @contextmanager
    def passing(self, number: int, delta: _Delta) -> Iterator[None]:
        """Within it, the frontend says what a delta stands for, and nothing else. number: the
        continuation's."""
        if not self.begun:
            yield
            return
        self.silent = delta.replayed
        yield
        if delta.replayed:
            return
        logprobs = tuple((one.logprob, one.top) for one in delta.logprobs)
        self.tokens += len(delta.token_ids)
        times = tuple(came - self.began for came in delta.times)
        tokens = tuple(delta.token_ids)
        passed = Passed(number, tokens, times, logprobs, delta.expected_missed)
        self._values += values(passed)
        self.tell(passed)
        if self._leaving is not None:
            self._leave(self._leaving)

    def leave(self, pages: Handle | None) -> None:
        """Leaves the answer to other replicas, with what is cached of it here, once its next token
        is told: another one would compute that again. Within NEXT_S in any case. It stays if there
        is more than is kept for them. pages: as `Cache.pages`."""
        if not (self.tokens and self.begun):
            self._leave(Cache(pages))
        elif self._leaving is None:
            self._leaving = Cache(pages)
            asyncio.get_running_loop().call_later(NEXT_S, self._leave, self._leaving)

    def _leave(self, mark: Cache) -> None:
        if self.begun and not self.left and self._values <= MOST_VALUES:
            self.tell(mark)
            self.left = True
        self.settled.set()

    def over(self) -> None:
        """All continuations have ended: what follows is new."""
        self.silent = False
