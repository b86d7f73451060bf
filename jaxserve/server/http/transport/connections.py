"""The connections of one door: at most so many, and who has to go for the next one."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxserve.server.requests.admission import Overloaded

_NEWCOMERS = 4  # one place of so many is for those of whom nothing is known yet


class Standing(enum.IntEnum):
    """What is known of who has it; the first has to go first."""

    STRANGER = 0
    KNOWN = 1  # has shown a key, where one is needed, or has asked for health
    CALLING = 2  # has a call that was let in


class Connections:
    """At most `limit`, on the event loop's thread. For one more the longest silent stranger is
    dropped, else the longest silent of those who are known; never one with a call. A quarter of
    the places is for strangers, else those who are known could keep all others out."""

    def __init__(self, limit: int) -> None:
        self._newcomers = max(1, limit // _NEWCOMERS)
        self.limit = limit
        # By when they were last heard of, the longest silent first.
        self._places: dict[Standing, dict[Place, None]] = {each: {} for each in Standing}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def enter(self, drop: Callable[[], object]) -> Place:
        """A new one. drop: closes it at once."""
        place = Place(self, drop)
        self.put(place, Standing.STRANGER)
        if len(self) > self.limit:
            strangers, known = self._places[Standing.STRANGER], self._places[Standing.KNOWN]
            among = strangers if len(strangers) > self._newcomers or not known else known
            first = next(iter(among))
            first.leave()
            first.drop()
        return place

    def check_room(self) -> None:
        """Raises Overloaded where one more call would leave no place for those who come."""
        calling = len(self._places[Standing.CALLING])
        if calling >= self.limit - self._newcomers:
            problem = f"{calling} connections have calls, as many as open files allow (ulimit -n)"
            raise Overloaded(f"{problem}; try again later")

    def put(self, place: Place, standing: Standing) -> None:
        """It has that standing now, and has just been heard of."""
        self._places[place.standing].pop(place, None)
        place.standing = standing
        self._places[standing][place] = None

    def remove(self, place: Place) -> None:
        """It is none any more."""
        self._places[place.standing].pop(place, None)


class Place:
    """One connection's. drop: closes it at once; that changes once a handshake is over. Without
    `connections` nobody counts it."""

    def __init__(
        self, connections: Connections | None = None, drop: Callable[[], object] = lambda: None
    ) -> None:
        self._connections, self.drop = connections, drop
        self.standing = Standing.STRANGER

    def heard(self) -> None:
        """It has said something."""
        self._be(self.standing)

    def known(self) -> None:
        """Whoever has it may call, or has asked for health."""
        self._be(max(self.standing, Standing.KNOWN))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """While it has a call. Raises Overloaded."""
        if self._connections is not None:
            self._connections.check_room()
        self._be(Standing.CALLING)
        try:
            yield
        finally:
            self._be(Standing.KNOWN)

    def leave(self) -> None:
        """It is closed."""
        if self._connections is not None:
            self._connections.remove(self)
        self._connections = None

    def _be(self, standing: Standing) -> None:
        if self._connections is not None:
            self._connections.put(self, standing)
