"""Passes a replica's answer on to the client, and turns to another replica if the first is lost.

An answer of which tokens were passed on goes on behind them at another replica, if its replica said
which they are (`server/moves/resume_point.py`). Of other answers, a request is retried once, and
only if its replica died, failed or was stopping before any part was passed on. So a client never
gets parts of two answers, nor anything twice: what can be neither resumed nor repeated ends with an
error. An answer may also move while its replica is well (`mover.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from jaxserve.deploy.replicas import Where
from jaxserve.server.moves.resume_point import Answered, Begun, ResumePoint
from jaxserve.server.moves.why import Why

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
        final: whether none like it will ever take it.
    """

    def __init__(self, reason: str, replica: str, final: bool = False) -> None:
        super().__init__(reason, replica, final)  # as it is pickled
        self.reason, self.replica, self.final = reason, replica, final


class ReplicaLost(RuntimeError):
    """The replica that was serving a call is lost.

    Args:
        reason: why.
        dead: whether the replica has certainly stopped serving. If not, it may still be computing,
            out of reach, and the call is not repeated.
        replica: its name if its process still runs and takes no more calls; empty otherwise.
        final: whether none like it will ever take the call.
    """

    def __init__(self, reason: str, *, dead: bool, replica: str = "", final: bool = False) -> None:
        super().__init__(f"the replica that served the request is gone: {reason}")
        self.dead, self.replica, self.final = dead, replica, final


class _Left(ReplicaLost):
    """The replica was left to go on at another one."""


class Watch(Protocol):
    """Who wants to know how an answer goes."""

    def begun(self, relay: Relay) -> None:
        """A replica has begun to answer, or to go on with the answer, so that others can."""

    def prefilled(self, relay: Relay) -> None:
        """The first token of each continuation has been passed on, and the answer has not
        moved."""


class Relay:
    """Passes one answer on.

    Args:
        send: sends the call to a replica and yields its answer; the generator raises ReplicaLost.
            Its arguments are which replica it is for, where the answer goes on, and what the
            replica before has cached of it, as `Cache.pages`.
        tells: whether a part of a piece contains any of the answer. Parts before that (headers, for
            example) are held back, so that a retry remains possible.
        point: where the answer begins.
        leaves: whether the replica of this name is to go, and others can go on with answers of this
            system fingerprint.
        sequences: how many continuations the answer has.
        watch: told how it goes; None for nobody.
    """

    def __init__(
        self,
        send: Callable[[Where, ResumePoint, Any], Pieces],
        tells: Callable[[Any], object],
        point: ResumePoint,
        leaves: Callable[[str, str], bool] = lambda name, fingerprint: False,
        sequences: int = 1,
        watch: Watch | None = None,
    ) -> None:
        self._send, self._tells, self._answered = send, tells, Answered(point)
        self._leaves, self._sequences, self._watch = leaves, sequences, watch
        self._held: list[Any] = []
        self._begun = self._repeated = self._decided = False
        self._where, self._looked = Where(), ""
        self._lost_at, self._tries = 0.0, 0
        self._alarm: asyncio.Timeout | None = None
        self._leaving = False
        self._moving: tuple[str, Why] = "", ""  # where to, once the replica has left it
        self._waiting = False

    async def pieces(self) -> Pieces:
        """Yields the answer, piece by piece, without the marks.

        Raises:
            ReplicaLost: the replica was lost, and no other one can answer the call.
        """
        while True:
            try:
                answered = self._answered
                answer = self._send(self._where, answered.point, answered.pages)
                async with aclosing(answer) as pieces:
                    while (piece := await self._next(pieces)) is not None:
                        if passed_on := self._take(piece):
                            yield passed_on
                if self._answered.left:
                    raise _Left("it has left it", dead=True)
                if self._held:
                    yield self._held
                return
            except _Left as lost:
                gone = self._answered.left or self._is_to_leave()
                left: Why = "drained" if gone else "lost"
                if not self._waiting:  # it went on there, so this is another move
                    self._tries = 0
                await self._turn(lost, self._moving[1] or left)
            except ReplicaLost as lost:
                await self._turn(lost, "lost")

    @property
    def replica(self) -> str:
        """The name of the replica that has begun to answer; "" while none has, or if its answer
        cannot be resumed."""
        return self._answered.replica if self._answered.begun and not self._waiting else ""

    @property
    def point(self) -> ResumePoint:
        """Where the answer can be resumed."""
        return self._answered.point

    @property
    def tokens(self) -> int:
        """Number of tokens that were passed on, if the answer can be resumed."""
        return sum(len(one.tokens) for one in self.point.outputs)

    @property
    def moving(self) -> bool:
        """Whether it is about to move."""
        return bool(self._moving[1])

    def move(self, to: str, why: Why) -> None:
        """Has the answer go on at the replica `to`: now if nothing of it has been passed on, or
        else once its replica has left it. why: as `ResumePoint.why`."""
        self._moving = to, why
        if not self._answered.has_tokens:
            self.turn()

    def turn(self) -> None:
        """Leaves the replica now, with nothing of what it has cached; not if the rest of the answer
        can come from this one only."""
        if self._begun and not (self._answered.begun and self._answered.has_tokens):
            return
        self._leaving = True
        if self._alarm is not None and not self._alarm.expired():
            self._alarm.reschedule(asyncio.get_running_loop().time())

    def stay(self) -> None:
        """The answer does not move."""
        self._moving = "", ""

    def look(self) -> None:
        """Turns to another replica in LEAVE_S if the one that answers is to go, and has not ended
        by then. To be called whenever there may be news of that."""
        if self._is_to_leave() and self._looked != self._answered.replica:
            self._looked = self._answered.replica
            asyncio.get_running_loop().call_later(LEAVE_S, self._leave, self._looked)

    def _is_to_leave(self) -> bool:
        answered = self._answered
        return answered.begun and self._leaves(answered.replica, answered.point.fingerprint)

    def _leave(self, name: str) -> None:
        self._looked = ""
        if self._answered.replica == name and self._is_to_leave():
            self.turn()

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
                raise _Left("it was left", dead=True) from None
            if self._waiting:
                raise ReplicaLost("no other one goes on with it", dead=True) from None
            raise
        finally:
            self._alarm = None

    def _take(self, piece: list[Any]) -> list[Any]:
        """The parts that can be passed on now."""
        before, self._waiting = "" if self._waiting else self._answered.replica, False
        parts = self._answered.take(piece)
        if parts or not isinstance(piece[-1], Begun):
            self._tries = 0
        if self._answered.replica != before:
            self.look()
            if self._watch is not None and self._answered.begun:
                self._watch.begun(self)
        if not self._decided and self._prefilled():
            self._decided = True
            if self._watch is not None:
                self._watch.prefilled(self)
        self._held += parts
        if not self._begun:
            told = self._answered.has_tokens
            self._begun = told if self._answered.begun else any(map(self._tells, parts))
        if not self._begun:
            return []
        passed_on, self._held = self._held, []
        return passed_on

    def _prefilled(self) -> bool:
        outputs = self._answered.point.outputs
        return len(outputs) == self._sequences and all(one.tokens for one in outputs)

    async def _turn(self, lost: ReplicaLost, why: Why) -> None:
        """Gets ready to turn to another replica. Raises the error if none can answer the call."""
        avoided, (to, _) = self._where.avoid, self._moving
        self._leaving, self._moving = False, ("", "")
        if lost.replica:
            avoided = (*avoided, lost.replica)
        self._where = Where(avoided, "" if to in avoided else to)
        if not (self._answered.begun and self._answered.has_tokens):
            again = self._repeated and why == "lost"
            if self._begun or again or not lost.dead:
                raise lost
            self._repeated, self._held = self._repeated or why == "lost", []
            self._answered = Answered(self._answered.point.anew())
            return
        now, point = time.monotonic(), self._answered.point
        if not self._tries:
            self._lost_at, self._decided = now, True
            point.moved.append(max(0.0, time.time() - point.arrived))
            point.why = why
        elif lost.final or now - self._lost_at > RESUME_S:
            raise lost
        else:
            await asyncio.sleep(min(_PAUSE_S * self._tries, _LONGEST_PAUSE_S))
        self._tries += 1
        self._waiting = True
