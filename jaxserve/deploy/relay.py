"""An answer on its way from a replica to the client, when replicas die.

A request is sent to a second replica, once, where the first has died, or its engine has failed or
is stopping, before any of the answer was passed on; whatever that one had computed is lost with it.
So nobody is ever given parts of two answers, and an answer of which a part was passed on is never
begun again: it ends with what there is, and an error that says so.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

Pieces = AsyncGenerator[list[Any], None]


class Unserved(RuntimeError):
    """What a replica says that serves no more, of a call of which it has said nothing else: why,
    and its name."""

    def __init__(self, reason: str, replica: str) -> None:
        super().__init__(reason, replica)  # as it is pickled
        self.reason, self.replica = reason, replica


class ReplicaLost(RuntimeError):
    """The replica that had the request is gone, with `reason`. dead: for certain, or as good as
    that; else it may still be computing, out of reach. replica: its name, where it still runs."""

    def __init__(self, reason: str, *, dead: bool, replica: str = "") -> None:
        super().__init__(f"the replica that served the request is gone: {reason}")
        self.dead, self.replica = dead, replica


async def relay_response(send: Callable[[str], Pieces], tells: Callable[[Any], object]) -> Pieces:
    """The answer, piece by piece. send: gives the request to some replica, to none of that name
    where there are others; its answer raises ReplicaLost. tells: whether a part of it has anything
    of what was asked for; what comes before is held back. Raises ReplicaLost where the request is
    not sent again."""
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
