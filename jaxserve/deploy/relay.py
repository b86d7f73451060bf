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
from typing import Any, Literal

from jaxserve.server.moves.resume_point import Answered, Begun, ResumePoint

Pieces = AsyncGenerator[list[Any], None]
RESUME_S = 30.0
"""Seconds within which another replica has to go on with an answer."""
LEAVE_S = 4.0
"""Seconds that an answer may still take of a replica that is to go, before another goes on though
the first has not left it (`EngineReplica`)."""
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


class _Left(ReplicaLost):
    """The replica is to go, and was left."""


class Relay:
    """Passes one answer on.

    Args:
        send: sends the call to a replica and yields its answer; the generator raises ReplicaLost.
            Its arguments are the names of replicas to avoid if there are others, where the answer
            goes on, and what the replica before has cached of it, as `Cache.pages`.
        tells: whether a part of a piece contains any of the answer. Parts before that (headers, for
            example) are held back, so that a retry remains possible.
        point: where the answer begins.
        leaves: whether the replica of this name is to go, and others can go on with answers of this
            system fingerprint.
    """

    def __init__(
        self,
        send: Callable[[tuple[str, ...], ResumePoint, Any], Pieces],
        tells: Callable[[Any], object],
        point: ResumePoint,
        leaves: Callable[[str, str], bool] = lambda name, fingerprint: False,
    ) -> None:
        self._send, self._tells, self._answered = send, tells, Answered(point)
        self._leaves = leaves
        self._held: list[Any] = []
        self._begun = self._repeated = False
        self._avoided: tuple[str, ...] = ()
        self._lost_at, self._tries = 0.0, 0
        self._alarm: asyncio.Timeout | None = None
        self._leaving = self._waiting = False

    async def pieces(self) -> Pieces:
        """Yields the answer, piece by piece, without the marks.

        Raises:
            ReplicaLost: the replica was lost, and no other one can answer the call.
        """
        while True:
            try:
                answered = self._answered
                answer = self._send(self._avoided, answered.point, answered.pages)
                async with aclosing(answer) as pieces:
                    while (piece := await self._next(pieces)) is not None:
                        if passed_on := self._take(piece):
                            yield passed_on
                if self._answered.left:
                    raise _Left("it is being removed", dead=True)
                if self._held:
                    yield self._held
                return
            except _Left as lost:
                await self._turn(lost, "drained")
            except ReplicaLost as lost:
                await self._turn(lost, "lost")

    def look(self) -> None:
        """Turns to another replica in LEAVE_S if the one that answers is to go, and has not ended
        by then. To be called whenever there may be news of that."""
        if self._is_to_leave():
            name = self._answered.replica
            asyncio.get_running_loop().call_later(LEAVE_S, self._leave, name)

    def _is_to_leave(self) -> bool:
        answered = self._answered
        return answered.begun and self._leaves(answered.replica, answered.point.fingerprint)

    def _leave(self, name: str) -> None:
        if self._answered.replica == name and self._is_to_leave():
            self._leaving = True
            if self._alarm is not None:
                self._alarm.reschedule(asyncio.get_running_loop().time())

    async def _next(self, pieces: Pieces) -> list[Any] | None:
        """The next piece; None at the end. Raises _Left once the replica is to be left, and
        ReplicaLost if no other one has begun to go on with the answer by RESUME_S."""
        left = max(0.0, self._lost_at + RESUME_S - time.monotonic()) if self._waiting else None
        try:
            async with asyncio.timeout(0 if self._leaving else left) as self._alarm:
                return await anext(pieces, None)
        except TimeoutError:
            if self._leaving:
                self._leaving = False
                raise _Left("it is being removed", dead=True) from None
            if self._waiting:
                raise ReplicaLost("no other one goes on with it", dead=True) from None
            raise
        finally:
            self._alarm = None

    def _take(self, piece: list[Any]) -> list[Any]:
        """The parts that can be passed on now."""
        before, self._waiting = self._answered.replica, False
        parts = self._answered.take(piece)
        if parts or not isinstance(piece[-1], Begun):
            self._tries = 0
        if self._answered.replica != before:
            self.look()
        self._held += parts
        if not self._begun:
            told = self._answered.has_tokens
            self._begun = told if self._answered.begun else any(map(self._tells, parts))
        if not self._begun:
            return []
        passed_on, self._held = self._held, []
        return passed_on

    async def _turn(self, lost: ReplicaLost, why: Literal["lost", "drained"]) -> None:
        """Gets ready to turn to another replica. Raises the error if none can answer the call."""
        self._leaving = False
        if lost.replica:
            self._avoided = (*self._avoided, lost.replica)
        if not (self._answered.begun and self._answered.has_tokens):
            again = self._repeated and why == "lost"
            if self._begun or again or not lost.dead:
                raise lost
            self._repeated, self._held = self._repeated or why == "lost", []
            self._answered = Answered(self._answered.point.anew())
            return
        now, point = time.monotonic(), self._answered.point
        if not self._tries:
            self._lost_at = now
            point.moved.append(max(0.0, time.time() - point.arrived))
            point.why = why
        elif now - self._lost_at > RESUME_S:
            raise lost
        else:
            await asyncio.sleep(min(_PAUSE_S * self._tries, _LONGEST_PAUSE_S))
        self._tries += 1
        self._waiting = True
