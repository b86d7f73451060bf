"""Passes a replica's answer on to the client, and turns to another replica if the first is lost.

An answer of which tokens were passed on goes on behind them at another replica, if its replica said
which they are (`server/moves/resume_point.py`). Of other answers, a request is retried once, and
only if its replica died, failed or was stopping before any part was passed on. So a client never
gets parts of two answers, nor anything twice: what can be neither resumed nor repeated ends with an
error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from jaxserve.server.moves.resume_point import Answered, ResumePoint

Pieces = AsyncGenerator[list[Any], None]
RESUME_S = 30.0
"""Seconds within which another replica has to go on with an answer."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # before a further try


class Unserved(RuntimeError):
    """A replica has not answered a call, or has stopped answering it, so that another one may.

    Args:
        reason: why.
        replica: its name if it takes no more calls; empty if it may take this one later.
    """

    def __init__(self, reason: str, replica: str) -> None:
        super().__init__(reason, replica)  # as it is pickled
        self.reason, self.replica = reason, replica


class ReplicaLost(RuntimeError):
    """The replica that was serving a call is lost.

    Args:
        reason: why.
        dead: whether the replica has certainly stopped serving. If not, it may still be computing,
            out of reach, and the call is not repeated.
        replica: its name if its process still runs and takes no more calls; empty otherwise.
    """

    def __init__(self, reason: str, *, dead: bool, replica: str = "") -> None:
        super().__init__(f"the replica that served the request is gone: {reason}")
        self.dead, self.replica = dead, replica


class Relay:
    """Passes one answer on.

    Args:
        send: sends the call to a replica and yields its answer; the generator raises ReplicaLost.
            Its arguments are the names of replicas to avoid if there are others, and where the
            answer goes on.
        tells: whether a part of a piece contains any of the answer. Parts before that (headers, for
            example) are held back, so that a retry remains possible.
        point: where the answer begins.
    """

    def __init__(
        self,
        send: Callable[[tuple[str, ...], ResumePoint], Pieces],
        tells: Callable[[Any], object],
        point: ResumePoint,
    ) -> None:
        self._send, self._tells, self._answered = send, tells, Answered(point)
        self._held: list[Any] = []
        self._begun = self._repeated = False
        self._avoided: tuple[str, ...] = ()
        self._lost_at, self._tries = 0.0, 0

    async def pieces(self) -> Pieces:
        """Yields the answer, piece by piece, without the marks.

        Raises:
            ReplicaLost: the replica was lost, and no other one can answer the call.
        """
        while True:
            try:
                answer = self._send(self._avoided, self._answered.point)
                async with aclosing(answer) as pieces:
                    async for piece in pieces:
                        if passed_on := self._take(piece):
                            yield passed_on
                if self._held:
                    yield self._held
                return
            except ReplicaLost as lost:
                await self._turn(lost)

    def _take(self, piece: list[Any]) -> list[Any]:
        """The parts that can be passed on now."""
        self._tries = 0
        parts = self._answered.take(piece)
        self._held += parts
        if not self._begun:
            told = self._answered.has_tokens
            self._begun = told if self._answered.begun else any(map(self._tells, parts))
        if not self._begun:
            return []
        passed_on, self._held = self._held, []
        return passed_on

    async def _turn(self, lost: ReplicaLost) -> None:
        """Gets ready to turn to another replica. Raises the error if none can answer the call."""
        if lost.replica:
            self._avoided = (*self._avoided, lost.replica)
        if not (self._answered.begun and self._answered.has_tokens):
            if self._begun or self._repeated or not lost.dead:
                raise lost
            self._repeated, self._held = True, []
            self._answered = Answered(self._answered.point.anew())
            return
        now, point = time.monotonic(), self._answered.point
        if not self._tries:
            self._lost_at = now
            point.moved.append(max(0.0, time.time() - point.arrived))
            point.why = "lost"
        elif now - self._lost_at > RESUME_S:
            raise lost
        else:
            await asyncio.sleep(min(_PAUSE_S * self._tries, _LONGEST_PAUSE_S))
        self._tries += 1
