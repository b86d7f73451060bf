"""Passes a replica's answer on to the client, and retries on another replica if the first is lost.

A request is retried once, and only if its replica died, failed or was stopping before any part of
the answer was passed on. What that replica had computed is lost. So a client never gets parts of
two answers: an answer that breaks off is not retried, but ends with an error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

Pieces = AsyncGenerator[list[Any], None]


class Unserved(RuntimeError):
    """A replica that takes no more requests refuses a call before answering any part of it.

    Args:
        reason: why it takes no more.
        replica: its name.
    """

    def __init__(self, reason: str, replica: str) -> None:
        super().__init__(reason, replica)  # as it is pickled
        self.reason, self.replica = reason, replica


class ReplicaLost(RuntimeError):
    """The replica that was serving a call is lost.

    Args:
        reason: why.
        dead: whether the replica has certainly stopped serving. If not, it may still be computing,
            out of reach, and the call is not retried.
        replica: its name if its process still runs; empty otherwise.
    """

    def __init__(self, reason: str, *, dead: bool, replica: str = "") -> None:
        super().__init__(f"the replica that served the request is gone: {reason}")
        self.dead, self.replica = dead, replica


async def relay_response(send: Callable[[str], Pieces], tells: Callable[[Any], object]) -> Pieces:
    """Yields the answer to one call, piece by piece, with one retry on another replica.

    Args:
        send: sends the call to a replica and yields its answer; the generator raises ReplicaLost.
            Its argument is the name of a replica to avoid if there are others, or "".
        tells: whether a part of a piece contains any of the answer. Parts before that (headers, for
            example) are held back, so that a retry remains possible.

    Raises:
        ReplicaLost: the replica was lost and the call cannot be retried.
    """
    avoided = ""
    for may_go_elsewhere in (True, False):
        held: list[Any] = []
        begun = False
        try:
            async with aclosing(send(avoided)) as pieces:
                async for piece in pieces:
                    held += piece
                    begun = begun or any(map(tells, piece))
                    if begun:
                        yield held
                        held = []
            if held:
                yield held
            return
        except ReplicaLost as lost:
            if begun or not (lost.dead and may_go_elsewhere):
                raise
            avoided = lost.replica
